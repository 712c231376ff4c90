"""One engine in virtual time: vLLM's scheduler and KV-cache manager without a model.

What a step holds is vLLM's decision; how long it takes is the profile's.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.router.legs import KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

    from vllm_calrouter.simulation.connector import Read

#: What the model says, whatever it is asked.
TOKEN = 0


class Engine:
    """Steps one scheduler; holds no clock: whoever has one calls it.

    Args:
        rank: of the engine.
        scheduler: vLLM's, under the plugin's limits (`build_scheduler`).
        costs: how long a step of what composition takes.
        block_hasher: vLLM's, where prefixes are cached.
    """

    def __init__(
        self,
        rank: int,
        scheduler: Any,
        costs: EngineCosts,
        block_hasher: Callable[[Request], list[Any]] | None,
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.costs = costs
        self.busy_s = 0.0
        self.steps = 0
        self._preempted: list[str] = []
        #: Requests waiting and running and fraction of KV blocks, as the engine last
        #: told: engines tell between steps, not within.
        self.counts: tuple[int, int, float] = (0, 0, 0.0)
        self._block_hasher = block_hasher
        self._under_way: SchedulerOutput | None = None
        # Dictionaries, not sets: their order does not depend on the process.
        self._received: dict[str, None] = {}
        self._sent: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._under_way is not None

    def add(self, leg: EngineCoreRequest) -> None:
        """Queue a leg, as if it had come over the wire."""
        request = Request.from_engine_core_request(_own(leg), self._block_hasher)
        self.scheduler.add_request(request)
        if leg.abort_immediately:
            self.scheduler.finish_requests(
                leg.request_id, RequestStatus.FINISHED_ABORTED
            )

    def received(self, request_id: str) -> None:
        """The KV cache this leg waited for is here."""
        self._received[request_id] = None

    def sent(self, request_id: str) -> None:
        """The KV cache this finished leg kept was read."""
        self._sent[request_id] = None

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
        told: list[dict[int, EngineCoreOutputs]] = []
        while self._has_work():
            step = self.scheduler.schedule()
            self._preempted += sorted(step.preempted_req_ids or ())
            if step.total_num_scheduled_tokens:
                self._under_way = step
                seconds = self._seconds(step)
                self.busy_s += seconds
                self.steps += 1
                return seconds, told
            news = bool(self._received or self._sent)
            told.append(self._update(step, [], {}, []))
            if not news:
                break
        return None, told

    def _has_work(self) -> bool:
        # vLLM's `has_requests` also counts blocks pinned for a reader, to keep polling.
        return bool(
            self._received
            or self._sent
            or self.scheduler.finished_req_ids
            or self.scheduler.has_unfinished_requests()
        )

    def end_step(self) -> dict[int, EngineCoreOutputs]:
        """Finish the step under way; returns what the engine tells each router."""
        step = self._under_way
        assert step is not None, "no step is under way"
        self._under_way = None
        ids = list(step.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [
            [] if (r := requests.get(i)) is None or r.is_prefill_chunk else [TOKEN]
            for i in ids
        ]
        return self._update(step, ids, {n: i for i, n in enumerate(ids)}, tokens)

    def _update(
        self,
        step: SchedulerOutput,
        ids: list[str],
        indices: dict[str, int],
        tokens: list[list[int]],
    ) -> dict[int, EngineCoreOutputs]:
        moved = None
        if self._received or self._sent:
            moved = KVConnectorOutput(
                finished_recving=self._received, finished_sending=self._sent
            )
            self._received, self._sent = {}, {}
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index=indices,
            sampled_token_ids=tokens,
            kv_connector_output=moved,
        )
        told: dict[int, EngineCoreOutputs] = self.scheduler.update_from_output(
            step, result
        )
        running, waiting = self.scheduler.get_request_counts()
        self.counts = (waiting, running, self.scheduler.get_kv_cache_usage())
        return told

    def _seconds(self, step: SchedulerOutput) -> float:
        requests = self.scheduler.requests
        prefill_tokens = squares = seqs = context = 0
        for request_id, tokens in step.num_scheduled_tokens.items():
            # vLLM has advanced it already: this is where the step ends.
            end = requests[request_id].num_computed_tokens
            if tokens == 1:
                seqs += 1
                context += end
            else:
                start = end - tokens
                prefill_tokens += tokens
                squares += end * end - start * start
        return self.costs.step_s(prefill_tokens, squares, seqs, context)


def _own(leg: EngineCoreRequest) -> EngineCoreRequest:
    """The leg with what an engine writes to made its own, as over a wire."""
    params = leg.sampling_params
    if params is None or KV_PARAMS not in (params.extra_args or {}):
        return leg
    own = copy(leg)
    own.sampling_params = copy(params)
    own.sampling_params.extra_args = deepcopy(params.extra_args)
    return own
