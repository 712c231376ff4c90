"""vLLM's waiting queue, in an order of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from vllm_calrouter.ordering.job import Job
from vllm_calrouter.ordering.order import Order
from vllm_calrouter.ordering.step import Step

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Level:
    """Who waits under one priority."""

    order: Order
    #: Requests that vLLM put back to the front: preempted ones, first of all.
    returned: deque[Job] = field(default_factory=deque)


class OrderedQueue(RequestQueue):  # type: ignore[misc]
    """Requests that wait without KV, the next to admit first.

    vLLM's priority, where its scheduling policy is `priority`, goes above all; within
    one priority those that vLLM puts back to the front go first, as in its own queue;
    then `Order` decides. A request that a step skipped (its adapter or grammar is not
    ready, say) keeps its place.

    Between `begin_step` and `end_step` the queue calls itself empty as soon as those
    chosen for the step were taken out, so that vLLM fills no step with a piece of
    another prompt. Were all of them skipped, the others are offered.

    Args:
        read: what an order has to know of a request that comes to wait.
        make_order: one for each priority.
        by_priority: whether vLLM's priority counts.
    """

    def __init__(
        self,
        read: Callable[[Request], Job],
        make_order: Callable[[], Order],
        *,
        by_priority: bool,
    ) -> None:
        self.plans = make_order().plans
        self._read = read
        self._make_order = make_order
        self._by_priority = by_priority
        self._levels: dict[int, _Level] = {}
        self._jobs: dict[str, Job] = {}
        #: Chosen for the step under way.
        self._front: deque[Job] = deque()
        #: Whether the step under way is to hold nobody else.
        self._closed = False
        #: Taken out in the step under way, by id: admitted, or skipped and to return.
        self._popped: dict[str, Job] = {}

    def begin_step(self, step: Step) -> None:
        """Choose who goes into a step, where the order does (`plans`)."""
        if not self.plans:
            return
        for _, level in sorted(self._levels.items()):
            for job in level.returned:
                if step.has_room:
                    step.price(job)
                    step.put(job)
            if step.has_room:
                level.order.take(step)
            if not step.has_room:
                break
        self._front.extend(step.jobs)
        self._closed = bool(step.jobs)

    def end_step(self) -> None:
        """The step is put together.

        Who was taken out and did not return, runs; whom it had no place for, waits on.
        """
        for job in self._popped.values():
            if job.home is not None:
                job.home.left(job)
        self._popped.clear()
        self._closed = False
        for job in self._front:
            self._put_back(job)
        self._front.clear()
        self._drop_empty_levels()

    def add_request(self, request: Request) -> None:
        job = self._read(request)
        self._jobs[request.request_id] = job
        job.home = self._level(job).order
        job.home.add(job)

    def pop_request(self) -> Request:
        job = self._first()
        if self._front:
            self._front.popleft()
        self._forget(job)
        self._popped[job.request.request_id] = job
        return job.request

    def peek_request(self) -> Request:
        return self._first().request

    def prepend_request(self, request: Request) -> None:
        job = self._popped.pop(request.request_id, None)
        if job is None:
            job = self._read(request)
            job.home = None
        self._jobs[request.request_id] = job
        if job.home is None:
            self._level(job).returned.appendleft(job)
        else:
            job.home.add(job)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        if request.request_id not in self._jobs:
            raise ValueError(f"{request.request_id} does not wait here")
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set()
        for request in requests:
            job = self._jobs.get(request.request_id)
            if job is not None:
                self._forget(job)
                gone.add(job.number)
                if job.home is not None:
                    job.home.left(job)
        if gone and self._front:
            self._front = deque(j for j in self._front if j.number not in gone)

    def __bool__(self) -> bool:
        if self._closed and not self._front:
            self._closed = any(map(_runs, self._popped.values()))
            return bool(self._jobs) and not self._closed
        return bool(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Request]:
        front = {job.number for job in self._front}
        yield from (job.request for job in self._front)
        for _, level in sorted(self._levels.items()):
            for job in (*level.returned, *level.order.jobs()):
                if job.number not in front:
                    yield job.request

    def all_jobs(self) -> list[Job]:
        """Everybody who waits, in no order."""
        return list(self._jobs.values())

    def _first(self) -> Job:
        if self._front:
            return self._front[0]
        for _, level in sorted(self._levels.items()):
            job = level.returned[0] if level.returned else level.order.first()
            if job is not None:
                return job
        raise IndexError("nobody waits")

    def _level(self, job: Job) -> _Level:
        priority = job.request.priority if self._by_priority else 0
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._make_order())
        return level

    def _put_back(self, job: Job) -> None:
        if job.home is not None:
            job.home.add(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.request.request_id]
        if job.home is None:
            self._level(job).returned.remove(job)
        else:
            job.home.remove(job)

    def _drop_empty_levels(self) -> None:
        # Any number may be a priority; what a client makes up must not cost memory.
        if len(self._levels) == 1:
            return
        used = {job.request.priority for job in self._jobs.values()}
        self._levels = {p: lv for p, lv in self._levels.items() if p in used}


def _runs(job: Job) -> bool:
    return bool(job.request.status == RequestStatus.RUNNING)
