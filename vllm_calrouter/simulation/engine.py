"""One engine in virtual time: vLLM's scheduler and KV-cache manager without a model.

What a step holds is vLLM's decision; how long it takes is the profile's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.calibration.work import work_of_rows
from vllm_calrouter.router.legs import KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreRequest

    from vllm_calrouter.messages import EngineMessage
    from vllm_calrouter.simulation.connector import Read

#: What the model says, whatever it is asked.
TOKEN = 0

#: What the scheduler asks its KV-cache manager of a running row; of others, more.
_RUNNING_ROW = {"num_lookahead_tokens": 0}


class _Quiet:
    """Decode steps in which the scheduler has nothing to decide.

    Nobody waits who could be admitted, everybody computes one token, nobody ends, and
    there are blocks for all: the next steps are known, and the scheduler is told of
    them together afterwards, as one step of several tokens each. Its state is then the
    one that single steps would have led to, but for the numbers of the blocks.
    """

    def __init__(self, batch: list[Request], most_steps: int) -> None:
        self.batch = batch
        self.left = most_steps
        self.begun = 0
        self.done = 0
        self.context = sum(request.num_computed_tokens for request in batch)
        self._second = [r for r in batch if r.num_output_tokens == 1]

    def untold(self) -> Iterator[tuple[str, int]]:
        """Requests with their tokens that no router was told of."""
        seconds = {request.request_id for request in self._second}
        for request in self.batch:
            yield request.request_id, self.done - (request.request_id in seconds)

    def end_step(self) -> dict[int, EngineCoreOutputs]:
        """Count the step under way; returns what it tells each router.

        Of an output only the first two tokens and the last are looked at by time. The
        last never comes here, and what comes between is told with what comes next.
        """
        self.done += 1
        told: dict[int, EngineCoreOutputs] = {}
        for request in self._second if self.done == 1 else ():
            message = told.get(request.client_index)
            if message is None:
                message = told[request.client_index] = EngineCoreOutputs()
                message.outputs = []
            message.outputs.append(EngineCoreOutput(request.request_id, [TOKEN]))
        return told

    def grown_blocks(self, block_tokens: int, *, begun: bool = True) -> int:
        """Blocks taken by the steps done so far, or by the one begun as well."""
        steps = self.begun if begun else self.done
        return sum(
            -(-(r.num_computed_tokens + steps) // block_tokens)
            + (-r.num_computed_tokens // block_tokens)
            for r in self.batch
        )

    @contextmanager
    def shown(self, *, told: bool) -> Iterator[None]:
        """Requests look as they would had the scheduler been told step by step.

        Args:
            told: whether it was told by now, of a step of several tokens under way:
                all but one of them are computed.
        """
        computed = 0 if told else self.begun
        in_flight = -self.done if told else self.begun - self.done
        self._advance(computed, in_flight)
        try:
            yield
        finally:
            self._advance(-computed, -in_flight)

    def _advance(self, computed: int, in_flight: int) -> None:
        for request in self.batch:
            request.num_computed_tokens += computed
            request.num_in_flight_tokens += in_flight

    def append(self, tokens: int) -> None:
        """Make up for tokens that were told and that the scheduler does not know."""
        if tokens:
            for request in self.batch:
                request.append_output_token_ids([TOKEN] * tokens)


class Engine:
    """Steps one scheduler; holds no clock: whoever has one calls it.

    Args:
        rank: of the engine.
        scheduler: vLLM's, under the plugin's limits (`build_scheduler`).
        costs: how long a step of what composition takes.
        block_hasher: vLLM's, where prefixes are cached.
        every_step: run every step through the scheduler, those without a decision in
            them too. Slower, with the same outcome.
    """

    def __init__(
        self,
        rank: int,
        scheduler: Any,
        costs: EngineCosts,
        block_hasher: Callable[[Request], list[Any]] | None,
        *,
        every_step: bool = False,
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.costs = costs
        if not every_step:
            _skip_empty_allocations(scheduler.kv_cache_manager, scheduler.block_size)
        self.busy_s = 0.0
        self.steps = 0
        self._pool = scheduler.kv_cache_manager.block_pool
        self._block_hasher = block_hasher
        self._every_step = every_step
        self._counts = (0, 0)
        #: Blocks free at the last step's end; None where nothing changed them since.
        self._free: int | None = None
        self._preempted: list[str] = []
        self._under_way: SchedulerOutput | None = None
        self._quiet: _Quiet | None = None
        #: Quiet steps that the step under way tells the scheduler of.
        self._told: _Quiet | None = None
        #: Tokens of quiet steps that routers are still to be told of.
        self._untold: dict[str, int] = {}
        self._inbox: list[EngineCoreRequest] = []
        self._in_quiet_step = False
        # Dictionaries, not sets: their order does not depend on the process.
        self._received: dict[str, None] = {}
        self._sent: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._in_quiet_step or self._under_way is not None

    @property
    def counts(self) -> tuple[int, int, float]:
        """Requests waiting and running and the fraction of KV blocks in use: engines
        tell between steps, not within."""
        free = self._free_blocks() if self._free is None else self._free
        return (*self._counts, 1.0 - free / (self._pool.num_gpu_blocks - 1))

    def _free_blocks(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        if self._quiet is not None:
            block_tokens = self.scheduler.block_size
            free -= self._quiet.grown_blocks(block_tokens, begun=False)
        return free

    def message(self, sequence: int, step_age_s: float) -> EngineMessage:
        """What the engine tells routers now; only where it has an observer.

        `step_age_s`: how long its step has been under way; 0 where it is idle.
        """
        free = self._pool.get_num_free_blocks()
        quiet, told = self._quiet, self._told
        if quiet is not None:
            free -= quiet.grown_blocks(self.scheduler.block_size)
            view: AbstractContextManager[None] = quiet.shown(told=False)
        else:
            view = nullcontext() if told is None else told.shown(told=True)
        with view:
            message: EngineMessage = self.scheduler.observer.message()
        return msgspec.structs.replace(
            message, sequence=sequence, step_age_s=step_age_s, kv_free_blocks=free
        )

    def add(self, leg: EngineCoreRequest) -> None:
        """Queue a leg, as if it had come over the wire: engines look between steps."""
        self._inbox.append(leg)

    def _add(self, leg: EngineCoreRequest) -> None:
        request = Request.from_engine_core_request(_own(leg), self._block_hasher)
        self.scheduler.add_request(request)
        if leg.abort_immediately:
            self.scheduler.finish_requests(
                leg.request_id, RequestStatus.FINISHED_ABORTED
            )

    def received(self, request_id: str) -> None:
        """The KV cache this leg waited for is here."""
        self.settle()
        self._received[request_id] = None

    def sent(self, request_id: str) -> None:
        """The KV cache this finished leg kept was read."""
        self.settle()
        self._sent[request_id] = None

    def settle(self) -> None:
        """Bring the scheduler to where the engine is; before anybody looks at it."""
        quiet = self._quiet
        if quiet is None:
            return
        if self._in_quiet_step:
            self._in_quiet_step = False
            self._under_way = self._schedule()
        elif quiet.done:
            counts, free = self._counts, self._free_blocks()
            quiet.append(quiet.done - 1)
            self._finish(self.scheduler.schedule())
            self._counts, self._free = counts, free
        self._leave_quiet()

    def take_reads(self) -> list[Read]:
        """KV caches to be moved here, since the last call."""
        connector = self.scheduler.connector
        return [] if connector is None else connector.take_reads()

    def take_preempted(self) -> list[str]:
        """Ids of the legs preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def begin_step(self) -> tuple[float | None, list[dict[int, EngineCoreOutputs]]]:
        """Start a step.

        Returns its duration in seconds, None when there is nothing to compute, and
        what was to be told without computing anything.
        """
        if self._quiet is None:
            self._empty_inbox()
            if not self._every_step:
                self._quiet = self._look_for_quiet()
        if self._goes_on_quietly():
            return self._account(self._begin_quiet_step()), []
        told: list[dict[int, EngineCoreOutputs]] = []
        while self._has_work():
            quiet = self._quiet
            step = self._schedule()
            if step.total_num_scheduled_tokens:
                self._under_way = step
                return self._account(self._seconds(step, quiet)), told
            news = bool(self._received or self._sent)
            told.append(self._update(step, [], []))
            if not news:
                break
        return None, told

    def end_step(self) -> dict[int, EngineCoreOutputs]:
        """Finish the step under way; returns what the engine tells each router."""
        if self._in_quiet_step:
            assert self._quiet is not None
            self._in_quiet_step = False
            told = self._quiet.end_step()
            self._count()
            return told
        step = self._under_way
        assert step is not None, "no step is under way"
        self._under_way = self._told = None
        told = self._finish(step)
        if self._untold:
            self._tell_late(told.values())
        return told

    def _tell_late(self, told: Iterable[EngineCoreOutputs]) -> None:
        """Add to a step's news what quiet steps have not told."""
        for message in told:
            for output in message.outputs:
                late = self._untold.pop(output.request_id, 0)
                output.new_token_ids += [TOKEN] * late

    def _leave_quiet(self) -> _Quiet | None:
        quiet, self._quiet = self._quiet, None
        if quiet is not None and quiet.done:
            untold = self._untold
            for request_id, tokens in quiet.untold():
                untold[request_id] = untold.get(request_id, 0) + tokens
        return quiet

    def _account(self, seconds: float) -> float:
        self.busy_s += seconds
        self.steps += 1
        return seconds

    def _look_for_quiet(self) -> _Quiet | None:
        """The steps ahead in which there is nothing to decide, if there are any."""
        scheduler = self.scheduler
        running: list[Request] = scheduler.running
        _, waiting = scheduler.get_request_counts()
        full = len(running) >= scheduler.max_num_active_reqs
        if not running or self._received or self._sent or (waiting and not full):
            return None
        # The step after these runs through the scheduler, their tokens with it.
        seqs = len(running)
        most = min(
            scheduler.max_num_scheduled_tokens // seqs,
            self._pool.get_num_free_blocks() // seqs * scheduler.block_size,
        )
        for request in running:
            produced = request.num_output_tokens
            if not produced or request.num_tokens - request.num_computed_tokens != 1:
                return None
            most = min(
                most,
                request.max_tokens - produced,
                scheduler.max_model_len - request.num_tokens,
            )
        return _Quiet(list(running), most - 1) if most > 1 else None

    def _goes_on_quietly(self) -> bool:
        """Whether the next step has nothing to decide either; takes in new legs."""
        quiet, scheduler = self._quiet, self.scheduler
        if quiet is None:
            return False
        if self._inbox and len(quiet.batch) < scheduler.max_num_active_reqs:
            rest = scheduler.max_num_scheduled_tokens
            rest -= (quiet.done + 1) * len(quiet.batch)
            if rest < sum(map(_own_tokens, self._inbox)):
                # What was told must not cost the new ones a part of their step.
                self.settle()
            quiet.left = 0
        self._empty_inbox()
        return quiet.left > 0

    def _empty_inbox(self) -> None:
        if not self._inbox:
            return
        legs, self._inbox = self._inbox, []
        for leg in legs:
            self._add(leg)
        running, waiting = self.scheduler.get_request_counts()
        self._counts = (waiting, running)

    def _begin_quiet_step(self) -> float:
        quiet = self._quiet
        assert quiet is not None
        quiet.left -= 1
        quiet.begun += 1
        quiet.context += len(quiet.batch)
        self._in_quiet_step = True
        return self.costs.step_s(0, 0, len(quiet.batch), quiet.context)

    def _has_work(self) -> bool:
        # vLLM's `has_requests` also counts blocks pinned for a reader, to keep polling.
        return bool(
            self._received
            or self._sent
            or self.scheduler.finished_req_ids
            or self.scheduler.has_unfinished_requests()
        )

    def _schedule(self) -> SchedulerOutput:
        """vLLM's step, with what quiet steps have told and it has not seen."""
        self._free = self._free_blocks()
        self._told = self._leave_quiet()
        if self._told is not None:
            self._told.append(self._told.done)
        step: SchedulerOutput = self.scheduler.schedule()
        self._preempted += sorted(step.preempted_req_ids or ())
        return step

    def _finish(self, step: SchedulerOutput) -> dict[int, EngineCoreOutputs]:
        ids = list(step.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [
            [] if (r := requests.get(i)) is None or r.is_prefill_chunk else [TOKEN]
            for i in ids
        ]
        return self._update(step, ids, tokens)

    def _update(
        self, step: SchedulerOutput, ids: list[str], tokens: list[list[int]]
    ) -> dict[int, EngineCoreOutputs]:
        moved = None
        if self._received or self._sent:
            moved = KVConnectorOutput(
                finished_recving=self._received, finished_sending=self._sent
            )
            self._received, self._sent = {}, {}
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=moved,
        )
        told: dict[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            step, result
        )
        self._count()
        return told

    def _count(self) -> None:
        running, waiting = self.scheduler.get_request_counts()
        self._counts = (waiting, running)
        self._free = None

    def _seconds(self, step: SchedulerOutput, quiet: _Quiet | None) -> float:
        """How long a step takes, which also brings in what quiet ones have told."""
        return self.costs.step_s(*work_of_rows(self._rows(step, quiet)))

    def _rows(
        self, step: SchedulerOutput, quiet: _Quiet | None
    ) -> Iterator[tuple[int, int]]:
        requests = self.scheduler.requests
        # The running rows come first, and all of them were there.
        late = 0 if quiet is None or not quiet.done else len(quiet.batch)
        for request_id, tokens in step.num_scheduled_tokens.items():
            if late and quiet is not None:
                late -= 1
                tokens -= quiet.done
            # vLLM has advanced it already: this is where the step ends.
            yield tokens, requests[request_id].num_computed_tokens


def _own_tokens(leg: EngineCoreRequest) -> int:
    """The most tokens an engine may compute of a leg in its first step."""
    tokens = len(leg.prompt_token_ids or ())
    params = leg.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    moved: int = (extra.get(KV_PARAMS) or {}).get("remote_num_tokens", 0)
    # With all of it there, the last one is computed again.
    return max(1, tokens - moved)


def _skip_empty_allocations(manager: Any, block_tokens: int) -> None:
    """Spare the KV-cache manager the question of rows that stay within their block.

    It would find that there is nothing to allocate, to free or to remember: most rows
    of a decode step.
    """
    allocate, nothing = manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, tokens: int, **more: Any) -> Any:
        within = request.num_computed_tokens % block_tokens
        if within and within + tokens < block_tokens and more == _RUNNING_ROW:
            return nothing
        return allocate(request, tokens, **more)

    manager.allocate_slots = allocate_slots


def _own(leg: EngineCoreRequest) -> EngineCoreRequest:
    """The leg with what an engine writes to made its own, as over a wire."""
    params = leg.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    if KV_PARAMS not in extra:
        return leg
    own = copy(leg)
    own.sampling_params = copy(params)
    own.sampling_params.extra_args = {**extra, KV_PARAMS: dict(extra[KV_PARAMS])}
    return own
