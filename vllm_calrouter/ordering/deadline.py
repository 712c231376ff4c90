"""Serve as many as possible in time, and bound what the others wait."""

from __future__ import annotations

import math

from vllm_calrouter.ordering.heap import Heap
from vllm_calrouter.ordering.job import NOWHERE, Job
from vllm_calrouter.ordering.order import Order
from vllm_calrouter.ordering.step import Step

# Chosen by simulation, on seeds 1 to 4 (docs/policies.md).

#: Prompt tokens after which a step takes no further prompt with a deadline: a longer
#: step burns the deadlines of who arrives meanwhile, a shorter one wastes the weights
#: it reads.
STEP_TOKENS = 2048

#: A late job may go where it costs at most this part of the least time to spare.
SPARE_SHARE = 0.25

#: While more feasible jobs than this wait, there is a crowd ...
CROWD = 4

#: ... and who has less to spare than so many times the time a step takes at least
#: (`prefill_base_s`) counts as late. It would have to go alone, and a crowd served one
#: by one waits for the weights to be read for each.
CROWD_SPARE = 3.0


class Deadline(Order):
    """Feasible jobs by earliest deadline; late ones where they harm nobody.

    A job is feasible while it would be in time if it started now. Once it is not, it
    stays late: no order can mend it, and serving it costs others theirs. Late jobs go,
    the cheapest first, when nobody else waits or everybody has time to spare. Jobs that
    have no deadline go by `Job.urgency_s` among the feasible ones.

    Nobody is overtaken without end. With A the prompt seconds that came before a job
    and S those served so far, both since the order was last empty, `S - A` is at most
    the work that came later and went ahead of it. Once that exceeds `patience` times
    the job's own prompt seconds, it goes next: before all others, and by
    `A + patience * cost` among those whose patience has ended, too. Of these, jobs that
    came earlier make up A, and jobs that came later and precede it arrived within its
    own patience; so it waits longer than in the order of arrival by at most `patience`
    times its own prompt seconds and those of the longest prompt before it, and a step.

    So a short prompt, of which there are many, is overtaken briefly, and a long one, of
    which there are few and whose turn is worth many others, gives way for longer. That
    keeps the tail near the one of the order of arrival.

    Args:
        patience: see above; None: no bound.
    """

    plans = True

    def __init__(self, patience: float | None = None) -> None:
        super().__init__()
        self._patience = math.inf if patience is None else patience
        #: By number.
        self._waiting: dict[int, Job] = {}
        self._late_count = 0
        self._by_deadline = Heap()
        self._by_latest_start = Heap()
        self._late_by_cost = Heap()
        self._by_end_of_patience = Heap()
        self._arrived_s = 0.0
        self._served_s = 0.0

    def add(self, job: Job) -> None:
        job.ticket = self.ticket()
        if job.booked_s is None:
            self._book(job)
        if job.number not in self._waiting:
            self._waiting[job.number] = job
            self._late_count += job.late
        self._by_end_of_patience.push(job.patient_until_s, job)
        if job.late:
            self._late_by_cost.push(job.cost_s, job)
            return
        self._by_deadline.push(job.urgency_s, job)
        self._by_latest_start.push(job.latest_start_s, job)

    def remove(self, job: Job) -> None:
        job.ticket = NOWHERE
        if self._waiting.pop(job.number, None) is not None:
            self._late_count -= job.late
        self._by_deadline.sweep(self._feasible_count)
        self._by_latest_start.sweep(self._feasible_count)
        self._late_by_cost.sweep(self._late_count)
        self._by_end_of_patience.sweep(len(self._waiting))

    def left(self, job: Job) -> None:
        self._served_s += job.booked_s or 0.0
        if not self._waiting:
            self._served_s = self._arrived_s = 0.0

    def take(self, step: Step) -> None:
        self._note_late(step.start_s)
        if self._feasible_count > CROWD:
            self._note_late(step.start_s + CROWD_SPARE * step.costs.prefill_base_s)
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
        job.patient_until_s = self._arrived_s + self._patience * job.cost_s
        self._arrived_s += job.cost_s

    @property
    def _feasible_count(self) -> int:
        return len(self._waiting) - self._late_count

    def _note_late(self, start_s: float) -> None:
        """Whoever must start before this is late."""
        while (job := self._by_latest_start.first()) is not None:
            if job.latest_start_s >= start_s:
                return
            job.late = True
            self._late_count += 1
            self.add(job)

    def _take_overtaken(self, step: Step) -> None:
        while step.has_room and (job := self._by_end_of_patience.first()) is not None:
            if job.patient_until_s >= self._served_s:
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
    end_by_s = step.end_by_s if job.late else min(step.end_by_s, job.deadline_s)
    if end_by_s == math.inf and not job.late:
        return True
    if step.job_tokens + job.tokens > STEP_TOKENS:
        return False
    return step.end_with_s(job) <= end_by_s
