"""The hook that keeps an engine's waiting queue in an order of ours.

`ordered` extends the scheduler class in use. Before each step the `Ordering` behind it
chooses who goes next; vLLM's `schedule` then does what it always does, on our queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    SchedulingPolicy,
    create_request_queue,
)
from vllm.v1.request import RequestStatus

from vllm_calrouter.calibration.work import work_of_rows
from vllm_calrouter.engine.observer import booking_of
from vllm_calrouter.engine.pace import Pace
from vllm_calrouter.ordering import Deadline, Job, Order, ShortFirst, Step
from vllm_calrouter.ordering.queue import OrderedQueue
from vllm_calrouter.ordering.short_first import urgency_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_calrouter.calibration import EngineCosts

logger = init_logger("vllm.calrouter")

#: Requests with a deadline after which an older one weighs 1/e in what is typical.
_MEMORY = 50
#: Seconds without a request that has one after which nothing is typical.
_SPARE_KNOWN_S = 60.0

#: No deadline is further away, and no clock is as old: about 30 years.
_MOST_S = 1e9


class Reader:
    """Makes jobs of requests.

    A request without a deadline counts as one that has as much time to spare as those
    with one have on average, and no less than it would give way for under `ShortFirst`;
    where none has one, as `ShortFirst` would order it.

    Args:
        scheduler: vLLM's; knows what of a prompt is cached.
        pace: of this engine.
        clock: seconds; the routers' own where they are on this host.
    """

    def __init__(self, scheduler: Any, pace: Pace, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._clock = clock
        self._manager = scheduler.kv_cache_manager
        self._numbers = count(1)
        self._spare_s: float | None = None
        self._spare_noted_s = 0.0
        #: When the engine last looked for new requests.
        self.looked_s = clock()

    def read(self, request: Request) -> Job:
        """What an order has to know of a request that comes to wait now."""
        now_s = self._clock()
        booking = booking_of(request) or {}
        sent_s = now_s - self._age_s(booking.get("sent_s"), now_s)
        job = Job(
            request=request,
            number=next(self._numbers),
            arrived_s=sent_s,
            tokens=0,
            squares=0,
            cost_s=0.0,
        )
        self.price(job)
        left_s = booking.get("deadline_s")
        if _is_seconds(left_s):
            job.deadline_s = job.urgency_s = sent_s + left_s
            self._note_spare(left_s - job.cost_s, now_s)
            return job
        job.urgency_s = urgency_s(sent_s, job.cost_s)
        spare_s = self._others_spare_s(now_s)
        if spare_s is not None:
            # At least what it would give way for by itself: others' targets may be
            # such that nobody can meet them.
            due_s = max(job.urgency_s, sent_s + spare_s) + job.cost_s
            job.deadline_s = job.urgency_s = due_s
        return job

    def price(self, job: Job) -> None:
        """Note what of a prompt is to be computed here, and what that costs."""
        request, costs = job.request, self._pace.costs
        end = request.num_tokens
        if _is_remote(request):
            # All but the last token comes from elsewhere.
            cached, job.cost_s = end - 1, costs.transfer_s(end)
        else:
            cached, job.cost_s = self._cached_tokens(request), 0.0
        job.tokens = end - cached
        job.squares = end * end - cached * cached
        job.cost_s += costs.step_s(job.tokens, job.squares, 0, 0)

    def _cached_tokens(self, request: Request) -> int:
        manager = self._manager
        if getattr(manager, "enable_kv_cache_events", False):
            # A look-up would tell of a reuse that did not happen yet.
            return 0
        tokens: int = manager.get_computed_blocks(request)[1]
        return tokens

    def _age_s(self, sent_s: Any, now_s: float) -> float:
        """How long a request was on its way: steps last, and it waits for one to end.

        Not longer than since the engine last looked, whatever another machine's clock
        says.
        """
        if not _is_seconds(sent_s):
            return 0.0
        age_s: float = min(now_s - sent_s, now_s - self.looked_s)
        return max(0.0, age_s)

    def _others_spare_s(self, now_s: float) -> float | None:
        """Time to spare of those that have a target; None: of late nobody has."""
        if now_s - self._spare_noted_s > _SPARE_KNOWN_S:
            self._spare_s = None
        return self._spare_s

    def _note_spare(self, spare_s: float, now_s: float) -> None:
        self._spare_noted_s = now_s
        spare_s = max(0.0, spare_s)
        typical_s = spare_s if self._spare_s is None else self._spare_s
        self._spare_s = typical_s + (spare_s - typical_s) / _MEMORY


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that was put together: when, how long it is predicted to take, and whether
    it computes prompts."""

    made_s: float
    seconds: float
    prompts: bool


class Ordering:
    """Orders one engine's waiting queue; every method runs in its main thread.

    Args:
        scheduler: vLLM's, whose waiting queue is replaced.
        order: name of the order.
        patience: of `Deadline`; None: no bound.
        costs: of this engine.
        clock: seconds.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        order: str,
        patience: float | None,
        costs: EngineCosts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = Pace(costs)
        self._clock = clock
        self._reader = Reader(scheduler, self._pace, clock)
        #: When the steps under way are expected to have ended.
        self._free_s = clock()
        self._under_way: deque[_UnderWay] = deque()
        #: When the last step ended.
        self._done_s = clock()

        def make_order() -> Order:
            return Deadline(patience) if order == "deadline" else ShortFirst()

        self._queue = OrderedQueue(
            self._reader.read,
            make_order,
            by_priority=scheduler.policy == SchedulingPolicy.PRIORITY,
        )
        scheduler.waiting = self._queue

    def begin_step(self, scheduler: Any) -> None:
        """Choose who goes next.

        A fault of an order's own must not cost a request: it is logged, and vLLM's own
        queue takes over.
        """
        self._reader.looked_s = self._clock()
        if not self._queue.plans:
            return
        try:
            self._choose(scheduler)
        except Exception:
            logger.exception("this engine serves in vLLM's own order from now on")
            self.step_aside(scheduler)

    def _choose(self, scheduler: Any) -> None:
        seqs_left = scheduler.max_num_active_reqs - len(scheduler.running)
        seqs_left -= scheduler.num_waiting_for_streaming_input
        if not self._queue or seqs_left <= 0:
            return
        step = self._step_under(scheduler, seqs_left)
        if step.has_room:
            self._queue.begin_step(step)

    def _step_under(self, scheduler: Any, seqs_left: int) -> Step:
        """The next step as it would be without any of those that wait."""
        step = Step(
            costs=self._pace.costs,
            price=self._reader.price,
            start_s=self._start_s(self._clock()),
            seqs_left=seqs_left,
            tokens_left=scheduler.max_num_scheduled_tokens,
        )
        for request in scheduler.running:
            done = request.num_computed_tokens
            tokens = request.num_tokens_with_spec + request.num_output_placeholders
            _run(step, done, min(tokens - done, step.tokens_left))
        # Those whose KV cache has come go before all that wait without one.
        for request in scheduler.kv_holding_waiting:
            if not _may_run(request, scheduler):
                continue
            done = request.num_computed_tokens
            tokens = max(1, request.num_tokens - done) + scheduler.num_spec_tokens
            _run(step, done, min(tokens, step.tokens_left))
            step.seqs_left -= 1
        return step

    def end_step(self, output: SchedulerOutput, scheduler: Any) -> None:
        """A step was put together."""
        self._queue.end_step()
        if not output.total_num_scheduled_tokens:
            return
        now_s = self._clock()
        step = _UnderWay(now_s, *self._predicted(output, scheduler))
        self._free_s = self._start_s(now_s) + step.seconds
        self._under_way.append(step)

    def step_done(self, output: SchedulerOutput) -> None:
        """The results of a step are there."""
        if not output.total_num_scheduled_tokens or not self._under_way:
            return
        step, now_s = self._under_way.popleft(), self._clock()
        if step.prompts:
            self._pace.note(step.seconds, now_s - max(step.made_s, self._done_s))
        self._done_s = now_s
        self._free_s = now_s + sum(step.seconds for step in self._under_way)

    def _start_s(self, now_s: float) -> float:
        """When a step that is put together now starts: not before those under way end.

        vLLM schedules ahead where it is asynchronous or its pipeline has stages.
        """
        return max(now_s, self._free_s) if self._under_way else now_s

    def _predicted(self, output: SchedulerOutput, scheduler: Any) -> tuple[float, bool]:
        """What a step takes in seconds, and whether it computes prompts."""
        rows, prompts = [], False
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            # vLLM has advanced it already: this is where the step ends.
            end = request.num_computed_tokens
            if end - tokens < request.num_prompt_tokens:
                rows.append((tokens, end))
                prompts = True
            else:
                # Several at once, guessed ones, take about as long as one.
                rows.append((1, end))
        return self._pace.costs.step_s(*work_of_rows(rows)), prompts

    def step_aside(self, scheduler: Any) -> None:
        """Give everybody who waits back to a queue of vLLM's own."""
        plain = create_request_queue(scheduler.policy)
        jobs = sorted(self._queue.all_jobs(), key=lambda job: job.number)
        for job in jobs:
            plain.add_request(job.request)
        scheduler.waiting = plain
        scheduler.ordering = None


class _Ordered:
    """Goes before a scheduler class; lets its ordering choose before each step."""

    ordering: Ordering | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.ordering is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.ordering.begin_step(self)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self.ordering is not None:
            self.ordering.end_step(output, self)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        if self.ordering is not None:
            self.ordering.step_done(scheduler_output)
        return super().update_from_output(scheduler_output, *args)  # type: ignore[misc]


def ordered(scheduler_class: type) -> type:
    """The class, with an `ordering` that chooses who goes next once it is set."""
    return type(f"Ordered{scheduler_class.__name__}", (_Ordered, scheduler_class), {})


def order_queue(
    scheduler: Any,
    order: str,
    patience: float | None,
    costs: EngineCosts,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Let an engine serve in this order from now on.

    A scheduler class that brings a queue of its own keeps it, and says so.
    """
    if type(scheduler.waiting) not in (FCFSRequestQueue, PriorityRequestQueue):
        logger.warning(
            "this engine's scheduler has a %s of its own: the order %s steps aside",
            type(scheduler.waiting).__name__,
            order,
        )
        return
    scheduler.ordering = Ordering(
        scheduler, order=order, patience=patience, costs=costs, clock=clock
    )


def _run(step: Step, done: int, tokens: int) -> None:
    """Add to a step what one request computes in it anyway."""
    if tokens <= 0:
        return
    end = done + tokens
    step.tokens_left -= tokens
    if tokens == 1:
        step.decode_seqs += 1
        step.context_tokens += end
    else:
        step.prefill_tokens += tokens
        step.squares += end * end - done * done


def _may_run(request: Request, scheduler: Any) -> bool:
    """Whether a request that holds KV can be admitted now."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return bool(request.status != RequestStatus.WAITING_FOR_STREAMING_REQ)


def _is_seconds(value: object) -> TypeGuard[float]:
    # Comparisons with what is not a number are false.
    return isinstance(value, int | float) and -_MOST_S < value < _MOST_S


def _is_remote(request: Request) -> bool:
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))
