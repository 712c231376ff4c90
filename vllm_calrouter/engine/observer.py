"""What an engine holds and what its steps cost, read off vLLM's scheduler.

`observed` extends the scheduler class in use; the `Observer` behind it keeps the
figures. What runs is summed up anew at each step, so that no sum ever drifts. What
waits may be a thousand times as much, and is kept up to date by what enters and leaves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_calrouter.messages import (
    BOOKING,
    MOST_ROUTERS,
    MOST_TIMINGS,
    EngineMessage,
    Role,
    StepTiming,
    Transfer,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.calrouter")

#: Where nothing changes but that sequences grow, an engine tells it this often only.
QUIET_S = 0.025

#: After so many faults, each within so many seconds of the last, nothing is told.
_MOST_FAULTS = 3
_FAULTS_APART_S = 60.0

_LONGEST_UID = 64
#: Below all that is ever computed, also of who has output in flight from before.
_NO_TARGET = -(1 << 62)
_MOST_NUMBER = (1 << 63) - 1


class Tell(Protocol):
    """Where an observer's messages go (a `Publisher`)."""

    def tell(self, message: EngineMessage, step_began_s: float | None) -> None: ...

    def close(self) -> None: ...


class _Fresh(NamedTuple):
    """A waiting request that holds no KV and never ran."""

    prompt_tokens: int
    output_tokens: int


class _Running(NamedTuple):
    """Sums over the running batch."""

    prefill_tokens: int
    output_tokens: int
    context_tokens: int


class Observer:
    """Keeps an engine's figures; every method runs in the engine's main thread.

    Args:
        scheduler: vLLM's, whose methods call back here.
        rank, role: of this engine.
        to: gets every message.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        rank: int,
        role: Role,
        to: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._role: Role = role
        self._to = to
        self._clock = clock
        self._incarnation = time.time_ns()
        self._pool = scheduler.kv_cache_manager.block_pool

        self._fresh: dict[str, _Fresh] = {}
        self._fresh_prompt_tokens = 0
        self._fresh_output_tokens = 0
        self._preempted: dict[str, Request] = {}
        #: Running requests whose prompts are not computed yet, or that still get output
        #: from before a preemption.
        self._prefilling: dict[str, Request] = {}
        #: Predicted output length of every live request that carries one, and how many
        #: tokens it will have computed when it has come.
        self._predicted: dict[str, int] = {}
        self._targets: dict[str, int] = {}
        #: Blocks of finished requests that wait for a reader.
        self._held: dict[str, int] = {}
        self._seen: dict[str, int] = {}

        self._preemptions = 0
        self._transfers = 0
        self._transfer_bytes = 0
        self._transfer_s = 0.0
        self._recent_transfers: deque[Transfer] = deque(maxlen=MOST_TIMINGS)
        self._steps = 0
        self._recent_steps: deque[StepTiming] = deque(maxlen=MOST_TIMINGS)
        #: Shapes of the steps that are being computed, by the identity of their output.
        self._under_way: dict[int, tuple[int, int, int, int]] = {}
        self._began_s = 0.0
        self._busy = False
        #: Whether anything but growth happened since the last message, and its time.
        self._changed = False
        self._told_s = 0.0
        self._faults = 0
        self._fault_s = 0.0

    # What the scheduler's methods report, in the order of an engine's loop.

    def added(self, request: Request) -> None:
        """A request, or the next part of a streaming session, was added."""
        self._changed = True
        booking = booking_of(request)
        if booking is not None:
            self._note_booking(request, booking)
        if self._scheduler.requests.get(request.request_id) is request:
            self._enter(request)
        self._tell_if_paused()

    def finished_from_outside(self) -> None:
        """Requests were aborted."""
        self._tell_if_paused()

    def paused_or_resumed(self) -> None:
        # What stood still was no step's time.
        self._busy = False
        self.tell()

    def step_begins(self) -> None:
        """`schedule` is about to run, which forgets who finished."""
        if not self._busy and not self._under_way:
            self._began_s = self._clock()
        self._forget_finished()

    def scheduled(self, output: SchedulerOutput) -> None:
        """`schedule` has put a step together."""
        self._note_prefilling(output)
        if output.preempted_req_ids:
            self._preemptions += len(output.preempted_req_ids)
            self._note_preempted(output.preempted_req_ids)
        self._forget_prefilled()
        if output.num_scheduled_tokens:
            self._under_way[id(output)] = self._shape(output)
        if self._scheduler.running and not self._is_like_the_last(output):
            self._tell()

    def answering(self, output: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        """A step's results are there, and about to be taken in."""
        self._busy = bool(output.num_scheduled_tokens)
        if self._busy:
            now = self._clock()
            # None: the step began before a fault.
            if shape := self._under_way.pop(id(output), None):
                tokens, seqs, context, squares = shape
                took_s = now - self._began_s
                timing = StepTiming(tokens, seqs, context, took_s, squares)
                self._recent_steps.append(timing)
                self._steps += 1
            self._began_s = now
        connector = answer.kv_connector_output
        if connector is not None and connector.kv_connector_stats is not None:
            self._note_transfers(connector.kv_connector_stats.data)

    def answered(self) -> None:
        """A step's results were taken in."""
        # With nothing running there may be no other step soon to tell it.
        if not self._scheduler.running:
            self.tell()

    def tell(self) -> None:
        """Send what the engine holds now."""
        self._forget_prefilled()
        self._tell()

    def close(self) -> None:
        self._to.close()

    def begin_again(self) -> bool:
        """After a fault: forget what was kept, and read all anew off the scheduler.

        False when that helped too seldom to go on.
        """
        now_s = self._clock()
        if now_s - self._fault_s > _FAULTS_APART_S:
            self._faults = 0
        self._faults += 1
        self._fault_s = now_s
        if self._faults >= _MOST_FAULTS:
            return False
        requests = self._scheduler.requests
        self._under_way.clear()
        self._busy = False
        self._changed = True
        self._read_waiting()
        # Those that decode already are forgotten in a moment.
        self._prefilling = {r.request_id: r for r in self._scheduler.running}
        self._held = {
            request_id: self._blocks_of(request_id)
            for request_id, request in requests.items()
            if request.is_finished()
        }
        for books in (self._predicted, self._targets):
            for request_id in books.keys() - (requests.keys() - self._held.keys()):
                del books[request_id]
        return True

    def message(self) -> EngineMessage:
        """What the engine holds now; without number and age."""
        self._forget_prefilled()
        return self._message()

    # Figures.

    def _tell(self) -> None:
        began_s = self._began_s if self._under_way else None
        self._changed = False
        self._told_s = self._clock()
        self._to.tell(self._message(), began_s)

    def _is_like_the_last(self, output: SchedulerOutput) -> bool:
        """Whether this step has nothing to tell but a token more of each sequence."""
        return not (
            self._changed
            or self._prefilling
            or output.finished_req_ids
            or output.preempted_req_ids
            or self._clock() - self._told_s >= QUIET_S
        )

    def _tell_if_paused(self) -> None:
        # Otherwise a step follows, and tells it.
        if self._scheduler.pause_state != PauseState.UNPAUSED:
            self.tell()

    def _message(self) -> EngineMessage:
        scheduler = self._scheduler
        running = self._count_running()
        self._forget_finished()
        prefill_tokens = running.prefill_tokens
        output_tokens = running.output_tokens
        remote = in_flight = 0
        arrived = scheduler.finished_recving_kv_req_ids
        for request in scheduler.kv_holding_waiting:
            self._leave(request.request_id)
            self._preempted.pop(request.request_id, None)
            prefill_tokens += _to_prefill(request)
            output_tokens += self._to_come(request)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                remote += 1
                in_flight += request.request_id not in arrived
        self._check_waiting()
        for request in self._preempted.values():
            prefill_tokens += _to_prefill(request)
            output_tokens += self._to_come(request)
        return EngineMessage(
            rank=self._rank,
            role=self._role,
            incarnation=self._incarnation,
            sequence=0,
            prefill_tokens=prefill_tokens + self._fresh_prompt_tokens,
            output_tokens=output_tokens + self._fresh_output_tokens,
            context_tokens=running.context_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.kv_holding_waiting) - remote,
            waiting_remote=remote,
            # One block is the null block, which is never free.
            kv_total_blocks=self._pool.num_gpu_blocks - 1,
            kv_free_blocks=self._pool.get_num_free_blocks(),
            kv_pinned_blocks=sum(self._held.values()),
            block_tokens=scheduler.block_size,
            max_seqs=scheduler.max_num_active_reqs,
            max_batched_tokens=scheduler.max_num_scheduled_tokens,
            preemptions=self._preemptions,
            transfers_in_flight=in_flight,
            transfers=self._transfers,
            transfer_bytes=self._transfer_bytes,
            transfer_s=self._transfer_s,
            recent_transfers=list(self._recent_transfers),
            steps=self._steps,
            recent_steps=list(self._recent_steps),
            step_age_s=0.0,
            seen=self._seen.copy(),
        )

    def _count_running(self) -> _Running:
        """Sums over the running batch, in one short loop."""
        target_of = self._targets.get
        prefill = output = context = 0
        for request in self._scheduler.running:
            done = request.num_computed_tokens - request.num_in_flight_tokens
            context += done
            left = target_of(request.request_id, _NO_TARGET) - done
            if left > 0:
                output += left
        for request in self._prefilling.values():
            ready = request.num_computed_tokens - request.num_in_flight_tokens
            output -= self._ahead(request, ready)
            # What was in flight when it was preempted is none of this run's.
            context += request.num_stale_output_tokens
            ready += request.num_stale_output_tokens
            prefill += max(0, _prefill_end(request) - ready)
        return _Running(prefill, output, context)

    def _ahead(self, request: Request, ready: int) -> int:
        """How much more than its output still to come a request's target says.

        The two are the same for who decodes, and has nothing in flight from before.
        """
        target = self._targets.get(request.request_id)
        if target is None:
            return 0
        return max(0, target - ready) - self._to_come(request)

    def _shape(self, output: SchedulerOutput) -> tuple[int, int, int, int]:
        """The step just scheduled, as `StepTiming` words it."""
        ran = output.num_scheduled_tokens
        prefill_tokens, squares, seqs = 0, 0, len(ran)
        batch = self._scheduler.running
        context = sum([request.num_computed_tokens for request in batch])
        context -= output.total_num_scheduled_tokens
        if seqs < len(batch):
            context -= sum(
                request.num_computed_tokens
                for request in batch
                if request.request_id not in ran
            )
        for request_id, request in self._prefilling.items():
            tokens = ran.get(request_id)
            if tokens is None:
                continue
            before = request.num_computed_tokens - tokens
            # The last token of a prompt whose KV came from elsewhere costs what a token
            # of decode does.
            if before < _prefill_end(request) - 1:
                prefill_tokens += tokens
                squares += tokens * (before + request.num_computed_tokens)
                seqs -= 1
                context -= before
        return prefill_tokens, seqs, context, squares

    def _note_prefilling(self, output: SchedulerOutput) -> None:
        """Note who was admitted, and forget who has its prompt computed."""
        requests = self._scheduler.requests
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        for request_id in (*admitted, *output.scheduled_cached_reqs.resumed_req_ids):
            self._changed = True
            self._leave(request_id)
            self._prefilling[request_id] = requests[request_id]

    def _forget_prefilled(self) -> None:
        for request_id, request in list(self._prefilling.items()):
            ready = request.num_computed_tokens - request.num_in_flight_tokens
            if request.status != RequestStatus.RUNNING or ready >= _prefill_end(
                request
            ):
                del self._prefilling[request_id]
                self._changed = True

    def _to_come(self, request: Request) -> int:
        predicted = self._predicted.get(request.request_id)
        return max(0, predicted - request.num_output_tokens) if predicted else 0

    # Who waits without KV.

    def _enter(self, request: Request) -> None:
        self._leave(request.request_id)
        prompt_tokens = 0 if _is_remote(request) else request.num_prompt_tokens
        entry = _Fresh(prompt_tokens, self._to_come(request))
        self._fresh[request.request_id] = entry
        self._fresh_prompt_tokens += entry.prompt_tokens
        self._fresh_output_tokens += entry.output_tokens

    def _leave(self, request_id: str) -> None:
        entry = self._fresh.pop(request_id, None)
        if entry is not None:
            self._fresh_prompt_tokens -= entry.prompt_tokens
            self._fresh_output_tokens -= entry.output_tokens

    def _note_preempted(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._preempted[request_id] = request

    def _check_waiting(self) -> None:
        """Make the books agree with the queue.

        A request may also come back to it in rare ways that nobody reports (a cache
        reset, a KV load that failed, a session's next part): then all is read again.
        """
        scheduler = self._scheduler
        if self._preempted:
            self._preempted = {
                request_id: request
                for request_id, request in self._preempted.items()
                if _is_preempted(request)
            }
        if len(self._fresh) + len(self._preempted) != len(scheduler.waiting):
            self._read_waiting()

    def _read_waiting(self) -> None:
        self._fresh.clear()
        self._fresh_prompt_tokens = self._fresh_output_tokens = 0
        self._preempted.clear()
        for request in self._scheduler.waiting:
            if _is_preempted(request):
                self._preempted[request.request_id] = request
            else:
                self._enter(request)

    # Who finished.

    def _forget_finished(self) -> None:
        scheduler = self._scheduler
        for request_id in scheduler.finished_req_ids:
            self._leave(request_id)
            self._preempted.pop(request_id, None)
            self._predicted.pop(request_id, None)
            self._targets.pop(request_id, None)
            if request_id in scheduler.requests and request_id not in self._held:
                self._held[request_id] = self._blocks_of(request_id)
        if self._held:
            released = self._held.keys() - scheduler.requests.keys()
            for request_id in released:
                del self._held[request_id]

    def _blocks_of(self, request_id: str) -> int:
        manager = self._scheduler.kv_cache_manager
        return sum(map(len, manager.get_blocks(request_id).blocks))

    # What requests and the connector carry.

    def _note_booking(self, request: Request, booking: dict[str, Any]) -> None:
        router, number = booking.get("router"), booking.get("booking")
        if (
            isinstance(router, str)
            and 0 < len(router) <= _LONGEST_UID
            and _is_count(number)
        ):
            seen = self._seen
            if router not in seen and len(seen) >= MOST_ROUTERS:
                # Of all those that came and went, the one heard of first.
                del seen[next(iter(seen))]
            seen[router] = max(seen.get(router, 0), number)
        predicted = booking.get("output_tokens")
        if _is_count(predicted) and predicted:
            predicted = min(predicted, request.max_tokens)
            self._predicted[request.request_id] = predicted
            # The last token is written and never computed.
            target = request.num_prompt_tokens + predicted - 1
            self._targets[request.request_id] = target

    def _note_transfers(self, data: dict[str, Any]) -> None:
        # As NIXL's connector tells them; others that tell none are not asked.
        seconds, sizes = data.get("transfer_duration"), data.get("bytes_transferred")
        if not isinstance(seconds, list) or not isinstance(sizes, list):
            return
        for transfer_s, size_bytes in zip(seconds, sizes, strict=False):
            self._transfers += 1
            self._transfer_s += transfer_s
            self._transfer_bytes += size_bytes
            self._recent_transfers.append(Transfer(transfer_s, size_bytes))


class _Observed:
    """Goes before a scheduler class; calls it, and tells its observer.

    A fault of the observer's own must not cost a request: it is logged, and the
    observer begins again. Where that does not help the engine falls silent, which its
    routers notice.
    """

    observer: Observer | None = None

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._note("added", request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self._note("finished_from_outside")
        return finished

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        super().set_pause_state(*args, **kwargs)  # type: ignore[misc]
        self._note("paused_or_resumed")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._note("step_begins")
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._note("scheduled", output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._note("answering", scheduler_output, model_runner_output)
        answers = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self._note("answered")
        return answers

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self.observer is not None:
            self.observer.close()

    def _note(self, what: str, *args: Any) -> None:
        if self.observer is None:
            return
        try:
            getattr(self.observer, what)(*args)
        except Exception:
            logger.exception("what this engine holds was lost count of: counting again")
            self._begin_again(self.observer)

    def _begin_again(self, observer: Observer) -> None:
        try:
            goes_on = observer.begin_again()
        except Exception:
            logger.exception("counting again failed")
            goes_on = False
        if not goes_on:
            logger.error("this engine no longer tells routers what it holds")
            self.observer = None
            observer.close()


def observed(scheduler_class: type) -> type:
    """The class, with an `observer` that hears of all that happens once it is set."""
    name = f"Observed{scheduler_class.__name__}"
    return type(name, (_Observed, scheduler_class), {})


def booking_of(request: Request) -> dict[str, Any] | None:
    """What the leg's router wrote on it."""
    params = request.sampling_params
    extra = params.extra_args if params else request.pooling_params.extra_kwargs
    found = extra.get(BOOKING) if extra else None
    return found if isinstance(found, dict) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MOST_NUMBER


def _is_remote(request: Request) -> bool:
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def _is_preempted(request: Request) -> bool:
    return bool(request.status == RequestStatus.PREEMPTED)


def _prefill_end(request: Request) -> int:
    """How far a request computes before it decodes; again, what it lost, if preempted.

    The last token it wrote was never computed.
    """
    end: int = max(request.num_prompt_tokens, request.num_tokens - 1)
    return end


def _to_prefill(request: Request) -> int:
    """Prompt tokens that a request in no step has still to compute."""
    left: int = _prefill_end(request) - request.num_computed_tokens
    return max(0, left)
