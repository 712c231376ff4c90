"""Short prompts first, each with a bounded head start: no deadline needed."""

from __future__ import annotations

from vllm_calrouter.ordering.heap import Heap
from vllm_calrouter.ordering.job import NOWHERE, Job
from vllm_calrouter.ordering.order import Order

#: Seconds by which a prompt gives way, per second it costs. Chosen by simulation
#: (docs/policies.md).
WEIGHT = 3.0


def urgency_s(arrived_s: float, cost_s: float) -> float:
    """What to sort by: arrival, and later the more the prompt costs.

    A job that costs c seconds is overtaken only by cheaper ones that arrive within
    `WEIGHT` * c seconds after it, so nothing waits without bound that would not do so
    in vLLM's own queue.
    """
    return arrived_s + WEIGHT * cost_s


class ShortFirst(Order):
    """By `urgency_s`."""

    def __init__(self) -> None:
        super().__init__()
        self._heap = Heap()
        self._waiting: dict[int, Job] = {}

    def add(self, job: Job) -> None:
        job.ticket = self.ticket()
        job.urgency_s = urgency_s(job.arrived_s, job.cost_s)
        self._waiting[job.number] = job
        self._heap.push(job.urgency_s, job)

    def remove(self, job: Job) -> None:
        job.ticket = NOWHERE
        self._waiting.pop(job.number, None)
        self._heap.sweep(len(self._waiting))

    def first(self) -> Job | None:
        return self._heap.first()

    def jobs(self) -> list[Job]:
        return sorted(self._waiting.values(), key=lambda j: (j.urgency_s, j.number))
