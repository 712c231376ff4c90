"""What every order can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vllm_calrouter.ordering.job import Job
from vllm_calrouter.ordering.step import Step


class Order(ABC):
    """Waiting jobs of one priority, the next to serve first.

    Holds a job from `add` until `remove`; `take` hands jobs out, which come back by
    `add` if the step had no place for them.
    """

    #: Whether it chooses who goes into a step (`take`). Else vLLM takes one after the
    #: other (`first`) as far as a step goes.
    plans = False

    def __init__(self) -> None:
        self._last_ticket = 0

    def ticket(self) -> int:
        """A ticket no job had before."""
        self._last_ticket += 1
        return self._last_ticket

    @abstractmethod
    def add(self, job: Job) -> None:
        """Let a job wait."""

    @abstractmethod
    def remove(self, job: Job) -> None:
        """Forget a job, handed out or not."""

    def take(self, step: Step) -> None:
        """Hand out the next jobs: put into the step what belongs there."""
        raise NotImplementedError

    @abstractmethod
    def first(self) -> Job | None:
        """The next job, whatever there is room for."""

    @abstractmethod
    def jobs(self) -> list[Job]:
        """All jobs that wait and are not handed out, in order."""

    def left(self, job: Job) -> None:
        """A job was removed for good: it runs, or nobody wants it any more."""
        return
