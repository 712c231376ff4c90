"""The cluster: routers, engines, transfers and one clock.

The router is the one of the API server, unchanged; this module is to it what
`router/client.py` is there. Events at the same time run in the order in which they were
scheduled, so a run is a function of its inputs alone.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_calrouter import placement
from vllm_calrouter.router.admission import RefusedError
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.subscriber import hear
from vllm_calrouter.router.wishes import Wishes
from vllm_calrouter.simulation.engine import Engine
from vllm_calrouter.simulation.results import Served
from vllm_calrouter.simulation.schedulers import Schedulers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    from vllm_calrouter.calibration import EngineCosts, SloClass
    from vllm_calrouter.messages import EngineMessage
    from vllm_calrouter.options import RouterOptions
    from vllm_calrouter.simulation.connector import Read
    from vllm_calrouter.workloads import Arrival


class SimulationError(RuntimeError):
    """A cluster that cannot serve what it is given; one line."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's limits of every engine.

    Defaults are the study's where it names them, else vLLM's for a server.
    """

    max_model_len: int = 32_768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2_048
    block_tokens: int = 16
    prefix_caching: bool = True


class Cluster:
    """Engines behind routers, ready for one run.

    Args:
        options: the router's; `prefill` says how many engines only prefill.
        costs: one engine's constants each, by rank.
        slo: the classes that requests may name.
        believed: what routers and orders take the engines' constants for; what they
            are without it.
        limits: vLLM's limits.
        routers: API servers; requests go to them in turn.
        report_s: seconds between two reports of vLLM's coordinator, which publishes
            requests and KV use every 0.1.
        message_s, message_age_s: seconds between two messages of an engine's own, where
            somebody prices, and how late they are heard.
        tells_slo: whether requests state their targets.
    """

    def __init__(
        self,
        options: RouterOptions,
        costs: Sequence[EngineCosts],
        slo: dict[str, SloClass],
        *,
        believed: Sequence[EngineCosts] | None = None,
        limits: Limits | None = None,
        routers: int = 1,
        report_s: float = 0.1,
        message_s: float = 0.02,
        message_age_s: float = 0.001,
        tells_slo: bool = True,
        every_step: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        believed = believed or costs
        self.now_s = 0.0
        self._slo = slo

        def clock() -> float:
            return self.now_s

        self._tells_slo = tells_slo
        self._report_s = report_s
        self._message_s = message_s
        self._message_age_s = message_age_s
        self._listens = options.listens
        schedulers = Schedulers(options, **msgspec.structs.asdict(self.limits))
        self.engines = [
            Engine(
                rank,
                schedulers.make(
                    rank, believed[rank], clock, kv_tokens=cost.kv_capacity_tokens
                ),
                cost,
                schedulers.block_hasher,
                every_step=every_step,
            )
            for rank, cost in enumerate(costs)
        ]
        self.routers = [
            Router(
                options,
                len(self.engines),
                index=index,
                count=routers,
                costs=believed,
                limits=placement.engine_limits(
                    options,
                    len(self.engines),
                    placement.Limits(
                        self.limits.max_num_seqs, self.limits.max_num_batched_tokens
                    ),
                ),
                prefix_caching=self.limits.prefix_caching,
                clock=clock,
            )
            for index in range(routers)
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._turn = itertools.count()
        self._wire_free_s = [0.0] * len(self.engines)
        self._step_began_s = [0.0] * len(self.engines)
        self._counts: list[tuple[int, int, float]] = [e.counts for e in self.engines]
        self._served: dict[str, Served] = {}
        self._unfinished = 0

    def run(
        self,
        arrivals: Sequence[Arrival],
        progress: Callable[[int], None] | None = None,
    ) -> list[Served]:
        """Serve all arrivals to their ends; returns what became of each, in order.

        Args:
            arrivals: in order of arrival.
            progress: told the number of requests that are done, now and then.

        Raises SimulationError when a request can never be served.
        """
        self._check(arrivals)
        self._unfinished = len(arrivals)
        served = [
            Served(number, arrival, self._slo[arrival.slo], self.engines[0].costs)
            for number, arrival in enumerate(arrivals)
        ]
        for one in served:
            self._at(one.arrival.arrival_s, partial(self._arrive, one))
        self._at(0.0, self._report)
        if self._listens:
            self._at(0.0, lambda: self._tell_all(1))
        with _no_garbage_collection():
            self._loop(len(served), progress)
        for one in served:
            _check_tokens(one)
        return served

    def _loop(self, total: int, progress: Callable[[int], None] | None) -> None:
        turns = 0
        while self._unfinished:
            if not self._events:
                raise SimulationError(
                    f"{self._unfinished} of {total} requests can never be served: "
                    "nothing runs, and nothing more will happen"
                )
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            turns += 1
            if progress is not None and turns % 1024 == 0:
                progress(total - self._unfinished)

    def drain(self) -> None:
        """Let what goes on after the last answer happen: KV caches being freed."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._turn), event))

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        most = self.limits.max_model_len
        held = min(e.costs.kv_capacity_tokens for e in self.engines)
        for number, arrival in enumerate(arrivals):
            tokens = arrival.prompt_tokens + arrival.output_tokens
            what = f"request {number} takes {tokens:,} tokens, prompt and output"
            if tokens > most:
                raise SimulationError(f"{what}: more than max_model_len, {most:,}")
            if tokens > held - self.limits.block_tokens:
                raise SimulationError(f"{what}: more than an engine holds, {held:,}")

    def _arrive(self, one: Served) -> None:
        router = self.routers[one.number % len(self.routers)]
        request = _request(one, tells_slo=self._tells_slo)
        if self._tells_slo and not _let_in(router, one):
            one.finish = "refused"
            self._unfinished -= 1
            return
        self._served[request.request_id] = one
        router.placer.report(self._counts)
        self._send(router, router.begin(request))

    def _send(self, router: Router, leg: EngineCoreRequest) -> None:
        rank = leg.data_parallel_rank
        leg.client_index = router.index
        one = self._served[leg.external_req_id]
        one.sent_to(rank, prefill=rank < router.pools.prefill)
        self._served[leg.request_id] = one
        engine = self.engines[rank]
        engine.add(leg)
        self._wake(engine)

    def _wake(self, engine: Engine) -> None:
        """Let an idle engine look, after whatever else happens at this time."""
        self._at(self.now_s, lambda: self._step(engine))

    def _step(self, engine: Engine) -> None:
        if engine.busy:
            return
        seconds, told = engine.begin_step()
        self._step_began_s[engine.rank] = self.now_s
        self._start_reads(engine)
        for leg_id in engine.take_preempted():
            self._served[leg_id].preemptions += 1
        for outputs in told:
            self._tell(outputs)
        if seconds is not None:
            self._at(self.now_s + seconds, lambda: self._end_step(engine))

    def _end_step(self, engine: Engine) -> None:
        outputs = engine.end_step()
        self._start_reads(engine)
        self._tell(outputs)
        self._wake(engine)

    def _start_reads(self, engine: Engine) -> None:
        for read in engine.take_reads():
            self._start_read(engine, read)

    def _start_read(self, reader: Engine, read: Read) -> None:
        if not read.tokens:
            self._at(self.now_s, lambda: self._freed(read))
            return
        # One KV cache after another leaves an engine: the link is shared.
        free_s = max(self.now_s, self._wire_free_s[read.owner_rank])
        free_s += reader.costs.wire_s(read.tokens)
        self._wire_free_s[read.owner_rank] = free_s
        arrived_s = free_s + reader.costs.transfer_base_s
        self._at(arrived_s, lambda: self._arrived(reader, read))

    def _arrived(self, reader: Engine, read: Read) -> None:
        reader.received(read.request_id)
        self._wake(reader)
        self._freed(read)

    def _freed(self, read: Read) -> None:
        owner = self.engines[read.owner_rank]
        owner.sent(read.owner_request_id)
        self._wake(owner)

    def _tell(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for index, message in outputs.items():
            router = self.routers[index]
            legs = router.answered(message)
            self._deliver(message.outputs)
            for leg in legs:
                self._send(router, router.still_wanted(leg))

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        served, now_s = self._served, self.now_s
        for output in outputs:
            one = served[output.request_id]
            one.delivered(len(output.new_token_ids), now_s)
            if output.finish_reason is not None and one.finish is None:
                one.finish = str(output.finish_reason)
                self._unfinished -= 1

    def _tell_all(self, sequence: int) -> None:
        """Every engine's message goes out to every router."""
        messages = [
            engine.message(sequence, self.now_s - began_s if engine.busy else 0.0)
            for engine, began_s in zip(self.engines, self._step_began_s, strict=True)
        ]
        self._at(self.now_s + self._message_age_s, lambda: self._hear(messages))
        if self._unfinished:
            after_s = self.now_s + self._message_s
            self._at(after_s, lambda: self._tell_all(sequence + 1))

    def _hear(self, messages: list[EngineMessage]) -> None:
        for router in self.routers:
            for message in messages:
                hear(router.placer.table, message, router.uid, self.now_s)

    def _report(self) -> None:
        self._counts = [engine.counts for engine in self.engines]
        # Where nothing else is to come, there will be nothing new to report.
        if self._events:
            self._at(self.now_s + self._report_s, self._report)


def _check_tokens(one: Served) -> None:
    """Every client got exactly what it asked for, or was told why not."""
    told, asked = one.tokens, one.arrival.output_tokens
    if one.finish == "length" and told != asked:
        raise SimulationError(f"request {one.number} got {told} of {asked} tokens")


def _let_in(router: Router, one: Served) -> bool:
    try:
        router.admit(Wishes(slo=one.arrival.slo, ttft_s=one.ttft_target_s))
    except RefusedError:
        return False
    return True


def _request(one: Served, *, tells_slo: bool) -> EngineCoreRequest:
    """The request as an API server makes it; wishes are in `vllm_xargs`' place.

    Its class is told as figures: the server of a simulation knows no classes by name.
    """
    arrival = one.arrival
    wishes: dict[str, float] = {"true_output_tokens": arrival.output_tokens}
    if tells_slo:
        wishes["slo_ttft_ms"] = 1e3 * one.ttft_target_s
        wishes["slo_tpot_ms"] = 1e3 * one.tpot_target_s
    if arrival.hinted_tokens:
        wishes["output_tokens"] = arrival.hinted_tokens
    name = f"{one.number}"
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=arrival.prompt(one.number),
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=wishes,
        ),
        pooling_params=None,
        arrival_time=arrival.arrival_s,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing in a run is cyclic, and the collector would walk all of it again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
