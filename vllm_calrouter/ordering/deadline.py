"""Serve as many as possible in time, and keep a share for those that are late."""

from __future__ import annotations

from vllm_calrouter.ordering.heap import Heap
from vllm_calrouter.ordering.job import NOWHERE, Job
from vllm_calrouter.ordering.order import Order
from vllm_calrouter.ordering.step import Step

#: Prompt tokens after which a step takes no further prompt: a longer step burns the
#: deadlines of who arrives meanwhile, a shorter one wastes the weights it reads.
#: Chosen by simulation (docs/policies.md).
STEP_TOKENS = 512

#: A late job may go where it costs at most this part of the least time to spare.
SPARE_SHARE = 0.25


class Deadline(Order):
    """Feasible jobs by earliest deadline; late ones where they harm nobody.

    A job is feasible while it would be in time if it started now. Once it is not, it
    stays late: no order can mend it, and serving it costs others theirs. Late jobs go,
    the cheapest first, when nobody else waits or everybody has time to spare; and, the
    oldest first, as long as their share of the time served since one began to wait is
    below `late_share`. So a late job waits at most `1 / late_share` times as long as
    the late work ahead of it takes.

    Args:
        late_share: fraction of the prompt seconds, from 0 to 1.
    """

    cuts_steps = True

    def __init__(self, late_share: float) -> None:
        super().__init__()
        self._late_share = late_share
        self._waiting: dict[int, Job] = {}
        self._late_count = 0
        self._by_deadline = Heap()
        self._by_latest_start = Heap()
        self._late_by_cost = Heap()
        self._late_by_age = Heap()
        #: Prompt seconds served since a late job began to wait.
        self._served_s = 0.0
        self._served_late_s = 0.0

    def add(self, job: Job) -> None:
        job.ticket = self.ticket()
        if job.number not in self._waiting:
            self._waiting[job.number] = job
            self._late_count += job.late
        if job.late:
            self._late_by_cost.push(job.cost_s, job)
            self._late_by_age.push(job.number, job)
            return
        self._by_deadline.push(job.urgency_s, job)
        self._by_latest_start.push(job.latest_start_s, job)

    def remove(self, job: Job) -> None:
        job.ticket = NOWHERE
        if self._waiting.pop(job.number, None) is not None:
            self._late_count -= job.late
        late, feasible = self._late_count, len(self._waiting) - self._late_count
        for heap in (self._by_deadline, self._by_latest_start):
            heap.sweep(feasible)
        for heap in (self._late_by_cost, self._late_by_age):
            heap.sweep(late)

    def served(self, job: Job) -> None:
        if not self._late_count:
            self._served_s = self._served_late_s = 0.0
            return
        self._served_s += job.cost_s
        if job.late:
            self._served_late_s += job.cost_s

    def take(self, step: Step) -> None:
        self._note_late(step.start_s)
        if self._owes_late():
            self._hand_out(self._late_by_age.first(), step)
        spare_s = self._spare_s(step.start_s)
        while step.has_room and (job := self._by_deadline.first()) is not None:
            if not _fits(job, step):
                step.full = True
                return
            self._hand_out(job, step)
        while step.has_room and (job := self._late_by_cost.first()) is not None:
            if not _fits(job, step) or job.cost_s > SPARE_SHARE * spare_s:
                step.full = True
                return
            self._hand_out(job, step)

    def first(self) -> Job | None:
        return self._by_deadline.first() or self._late_by_cost.first()

    def jobs(self) -> list[Job]:
        return sorted(
            self._waiting.values(),
            key=lambda j: (j.late, j.cost_s if j.late else j.urgency_s, j.number),
        )

    def _note_late(self, now_s: float) -> None:
        while (job := self._by_latest_start.first()) is not None:
            if job.latest_start_s >= now_s:
                return
            job.late = True
            self._late_count += 1
            self.add(job)

    def _owes_late(self) -> bool:
        if not self._late_count:
            return False
        return self._served_late_s < self._late_share * self._served_s

    def _spare_s(self, now_s: float) -> float:
        """The least time to spare of all who can still be in time."""
        tightest = self._by_latest_start.first()
        return float("inf") if tightest is None else tightest.latest_start_s - now_s

    def _hand_out(self, job: Job | None, step: Step) -> None:
        if job is None:
            return
        job.ticket = NOWHERE
        step.put(job)


def _fits(job: Job, step: Step) -> bool:
    """Whether a job may join a step without harm to those in it; the first may."""
    if not step.jobs:
        return True
    if step.job_tokens + job.tokens > STEP_TOKENS:
        return False
    end_by_s = step.end_by_s if job.late else min(step.end_by_s, job.deadline_s)
    return step.end_with_s(job) <= end_by_s
