"""Serve as many as possible in time, and bound what the others wait."""

from __future__ import annotations

import math

from vllm_calrouter.ordering.heap import Heap
from vllm_calrouter.ordering.job import NOWHERE, Job
from vllm_calrouter.ordering.order import Order
from vllm_calrouter.ordering.step import Step

#: Prompt tokens after which a step takes no further prompt: a longer step burns the
#: deadlines of who arrives meanwhile, a shorter one wastes the weights it reads.
#: Chosen by simulation (docs/policies.md).
STEP_TOKENS = 1024

#: A late job may go where it costs at most this part of the least time to spare.
SPARE_SHARE = 0.25


class Deadline(Order):
    """Feasible jobs by earliest deadline; late ones where they harm nobody.

    A job is feasible while it would be in time if it started now. Once it is not, it
    stays late: no order can mend it, and serving it costs others theirs. Late jobs go,
    the cheapest first, when nobody else waits or everybody has time to spare.

    Nobody is overtaken without end. With A the prompt seconds that came before a job
    and S those served so far, both since the order was last empty, `S - A` is at most
    the work that came later and went ahead of it. Once that exceeds `max_overtake_s`
    the job goes next. As A grows from job to job, and a job is served before the next
    one may demand it, none waits for another's turn: it starts when at most
    `A + max_overtake_s` is served, so it waits that much longer than in the order of
    arrival, and one step.

    Args:
        max_overtake_s: in prompt seconds as the profile prices them; None: no bound.
    """

    plans = True

    def __init__(self, max_overtake_s: float | None = None) -> None:
        super().__init__()
        self._most_s = math.inf if max_overtake_s is None else max_overtake_s
        #: By number, in order of arrival.
        self._waiting: dict[int, Job] = {}
        self._late_count = 0
        self._by_deadline = Heap()
        self._by_latest_start = Heap()
        self._late_by_cost = Heap()
        self._arrived_s = 0.0
        self._served_s = 0.0

    def add(self, job: Job) -> None:
        job.ticket = self.ticket()
        if job.booked_s is None:
            self._book(job)
        if job.number not in self._waiting:
            self._waiting[job.number] = job
            self._late_count += job.late
        if job.late:
            self._late_by_cost.push(job.cost_s, job)
            return
        self._by_deadline.push(job.urgency_s, job)
        self._by_latest_start.push(job.latest_start_s, job)

    def remove(self, job: Job) -> None:
        job.ticket = NOWHERE
        if self._waiting.pop(job.number, None) is not None:
            self._late_count -= job.late
        feasible = len(self._waiting) - self._late_count
        self._by_deadline.sweep(feasible)
        self._by_latest_start.sweep(feasible)
        self._late_by_cost.sweep(self._late_count)

    def left(self, job: Job) -> None:
        self._served_s += job.booked_s or 0.0
        if not self._waiting:
            self._served_s = self._arrived_s = 0.0

    def take(self, step: Step) -> None:
        self._note_late(step.start_s)
        self._take_overtaken(step)
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

    def _book(self, job: Job) -> None:
        job.booked_s = job.cost_s
        job.ahead_s = self._arrived_s
        self._arrived_s += job.cost_s

    def _note_late(self, now_s: float) -> None:
        while (job := self._by_latest_start.first()) is not None:
            if job.latest_start_s >= now_s:
                return
            job.late = True
            self._late_count += 1
            self.add(job)

    def _take_overtaken(self, step: Step) -> None:
        for job in self._waiting.values():
            if self._served_s - job.ahead_s <= self._most_s or not step.has_room:
                return
            step.price(job)
            if step.jobs and step.job_tokens + job.tokens > STEP_TOKENS:
                step.full = True
                return
            self._hand_out(job, step)

    def _spare_s(self, now_s: float) -> float:
        """The least time to spare of all who can still be in time."""
        tightest = self._by_latest_start.first()
        return math.inf if tightest is None else tightest.latest_start_s - now_s

    def _hand_out(self, job: Job, step: Step) -> None:
        job.ticket = NOWHERE
        step.put(job)


def _fits(job: Job, step: Step) -> bool:
    """Whether a job may join a step without harm to those in it; the first may."""
    step.price(job)
    if not step.jobs:
        return True
    if step.job_tokens + job.tokens > STEP_TOKENS:
        return False
    end_by_s = step.end_by_s if job.late else min(step.end_by_s, job.deadline_s)
    return step.end_with_s(job) <= end_by_s
