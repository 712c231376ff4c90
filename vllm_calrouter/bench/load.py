"""One run: requests sent when they arrive, whatever has become of those before.

Every time is counted from when a request was to be sent, so that neither a client that
falls behind nor a bound on what is in flight makes a server look faster. With a
slow-down, arrivals and targets are stretched and times divided by it: figures are those
of the hardware the server stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vllm_calrouter.bench.prompts import prompt
from vllm_calrouter.bench.server import About, BenchError, Counts, Server
from vllm_calrouter.calibration import EngineCosts, SloClass
from vllm_calrouter.simulation.results import Served, percentile, summary
from vllm_calrouter.workloads import Arrival

#: Seconds between two looks at the router's last decisions, of which it keeps 500.
_LOOK_S = 2.0

Record = dict[str, Any]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent, and what they were promised.

    Fields:
        costs: of an engine, for targets that are multiples of a prompt's own prefill.
        slo: the classes.
        slow_down: of the server's engines; all times are divided by it.
        tells_slo: whether requests state their targets.
        most_in_flight: requests at the server at a time.
    """

    costs: EngineCosts
    slo: Mapping[str, SloClass]
    slow_down: float = 1.0
    tells_slo: bool = True
    most_in_flight: int = 1024


class Load:
    """A run's requests against one server.

    Args:
        server: what they are sent to.
        about: what it is.
        terms: how they are sent.
        uid: of the run, unlike any other's: prefixes are shared within it only.
        write: gets a record of each request.
        progress: told how many are done.
    """

    def __init__(
        self,
        server: Server,
        about: About,
        terms: Terms,
        uid: str,
        *,
        write: Callable[[Record], None],
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._server = server
        self._about = about
        self._terms = terms
        self._uid = uid
        self._write = write
        self._progress = progress
        self._gate = asyncio.Semaphore(terms.most_in_flight)
        self._began_s = 0.0
        self._done = 0
        self._held_back = 0
        self._late_s: list[float] = []
        self._unwritten: dict[int, Served] = {}

    async def run(self, arrivals: Sequence[Arrival]) -> Record:
        """Send them all; figures as `calrouter simulate` has them."""
        slo, costs = self._terms.slo, self._terms.costs
        served = [Served(n, a, slo[a.slo], costs) for n, a in enumerate(arrivals)]
        before = await self._server.counts()
        self._began_s = time.perf_counter()
        looking = asyncio.create_task(self._look_often())
        try:
            sent = []
            for one in served:
                await self._until(one.arrival.arrival_s)
                sent.append(asyncio.create_task(self._serve(one)))
            await asyncio.gather(*sent)
            virtual_s = self._now_s()
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
        await self._look()
        self._write_all(self._unwritten)
        after = await self._server.counts()
        return self._figures(served, before, after, virtual_s)

    def _figures(
        self, served: Sequence[Served], before: Counts, after: Counts, virtual_s: float
    ) -> Record:
        figures = summary(served)
        # The server's own counts are of every API server it has.
        figures["preemptions"] = after.preemptions - before.preemptions
        if after.legs:
            legs = figures["legs_by_engine"] = {"prefill": {}, "decode": {}}
            for (phase, rank), count in sorted(after.legs.items()):
                if more := count - before.legs.get((phase, rank), 0):
                    legs[phase][rank] = more
        late_s = sorted(self._late_s)
        return {
            **figures,
            "errors": sorted({str(o.finish) for o in served if _failed(o)})[:3],
            "held_back": self._held_back,
            "sent_late_p99_s": percentile(late_s, 0.99),
            "virtual_s": virtual_s,
            "wall_s": virtual_s * self._terms.slow_down,
        }

    def _now_s(self) -> float:
        """Emulated seconds since the run began."""
        return (time.perf_counter() - self._began_s) / self._terms.slow_down

    async def _until(self, moment_s: float) -> None:
        ahead_s = (moment_s - self._now_s()) * self._terms.slow_down
        # Also when it is late: requests under way must have their turn.
        await asyncio.sleep(max(0.0, ahead_s))

    async def _serve(self, one: Served) -> None:
        self._held_back += self._gate.locked()
        async with self._gate:
            body = self._body(one)
            self._late_s.append(self._now_s() - one.arrival.arrival_s)
            one.finish = await self._server.stream(
                body, self._request_id(one.number), self._delivered_to(one)
            )
        self._done += 1
        self._unwritten[one.number] = one
        self._progress(self._done)

    def _delivered_to(self, one: Served) -> Callable[[int, float], None]:
        def delivered(tokens: int, at_s: float) -> None:
            since_s = (at_s - self._began_s) / self._terms.slow_down
            one.delivered(tokens, since_s)

        return delivered

    def _request_id(self, number: int) -> str:
        return f"{self._uid}-{number}"

    def _body(self, one: Served) -> Record:
        arrival, slow_down = one.arrival, self._terms.slow_down
        wishes: dict[str, float] = {"true_output_tokens": arrival.output_tokens}
        if self._terms.tells_slo:
            wishes["slo_ttft_ms"] = 1e3 * one.ttft_target_s * slow_down
            wishes["slo_tpot_ms"] = 1e3 * one.tpot_target_s * slow_down
        if arrival.hinted_tokens:
            wishes["output_tokens"] = arrival.hinted_tokens
        return {
            "model": self._about.model,
            "prompt": prompt(arrival, one.number),
            "max_tokens": arrival.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": self._uid,
            "vllm_xargs": wishes,
        }

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Learn where requests went, and write those that are done."""
        if self._about.policy is None or not self._unwritten:
            return
        ended = dict(self._unwritten)
        # The server names a request after the id it was given, with its route's prefix.
        names = {f"cmpl-{self._request_id(n)}-0": one for n, one in ended.items()}
        # Where requests went is good to know, and no reason to lose a run.
        decisions: list[Record] = []
        with contextlib.suppress(BenchError):
            decisions = await self._server.decisions()
        for decision in decisions:
            one = names.get(decision["request_id"])
            if one is not None:
                one.prefill_rank = decision["prefill_rank"]
                one.decode_rank = decision["decode_rank"]
        self._write_all(ended)

    def _write_all(self, ended: Mapping[int, Served]) -> None:
        for number, one in list(ended.items()):
            self._write(one.record())
            del self._unwritten[number]


def _failed(one: Served) -> bool:
    return one.finish is None or one.finish.startswith("error")
