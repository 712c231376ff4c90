"""A small discrete-event cluster: several routers, and messages that come late."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.price import A40_QWEN_3B
from vllm_calrouter import _core
from vllm_calrouter._core import Costs, Phase, Policy, Table

BLOCK_TOKENS = 16
_KV_BLOCKS = A40_QWEN_3B.kv_capacity_tokens // BLOCK_TOKENS


@dataclass
class Leg:
    router: int
    booking: int
    prompt_tokens: int
    output_tokens: int
    left_tokens: int
    arrived_s: float


@dataclass
class DecodeEngine:
    """Decodes up to `slots` legs, one token each a step; the rest wait in order."""

    costs: Costs
    slots: int
    legs: list[Leg] = field(default_factory=list)
    served: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    sequence: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def accept(self, leg: Leg) -> None:
        self.legs.append(leg)
        self.served += 1
        self.seen[leg.router] = leg.booking

    def step_s(self) -> float:
        return self.costs.decode_base_s + self.costs.decode_per_seq_s * min(
            self.slots, len(self.legs)
        )

    def step(self) -> list[Leg]:
        for leg in self.legs[: self.slots]:
            leg.left_tokens -= 1
        done = [leg for leg in self.legs if leg.left_tokens == 0]
        self.legs = [leg for leg in self.legs if leg.left_tokens > 0]
        return done

    def message(self, router: int) -> dict[str, int]:
        running = self.legs[: self.slots]
        context = sum(
            leg.prompt_tokens + leg.output_tokens - leg.left_tokens for leg in running
        )
        taken = min(_KV_BLOCKS, context // BLOCK_TOKENS)
        return {
            "incarnation": 1,
            "sequence": next(self.sequence),
            "booking_seen": self.seen.get(router, 0),
            "prefill_tokens": 0,
            "output_tokens": sum(leg.left_tokens for leg in self.legs),
            "context_tokens": context,
            "running": len(running),
            "waiting": len(self.legs) - len(running),
            "waiting_remote": 0,
            "kv_total_blocks": _KV_BLOCKS,
            "kv_free_blocks": _KV_BLOCKS - taken,
            "kv_pinned_blocks": 0,
            "block_tokens": BLOCK_TOKENS,
        }


@dataclass
class Router:
    table: Table
    policy: Policy


class Herd:
    """`routers` that share decode engines and hear of them `latest_s` late at most.

    Args:
        engines: what work costs on each.
        policy: name of the policy.
        slots: of each engine.
        believed_routers: how many each router takes to be there; by default the truth.
    """

    def __init__(
        self,
        engines: list[Costs],
        *,
        routers: int,
        policy: str,
        slots: int = 64,
        latest_s: float = 0.25,
        believed_routers: int | None = None,
        seed: int = 0,
    ) -> None:
        self.engines = [DecodeEngine(costs, slots) for costs in engines]
        #: Of every leg, the seconds from its arrival to its first step.
        self.waits_s: list[float] = []
        self._latest_s = latest_s
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._stepping = [False] * len(engines)
        self.routers = [
            self._router(index, routers, policy, slots, believed_routers or routers)
            for index in range(routers)
        ]

    def _router(
        self, index: int, count: int, policy: str, slots: int, believed: int
    ) -> Router:
        pool = len(self.engines)
        table = Table(pool)
        for rank, engine in enumerate(self.engines):
            table.set_costs(rank, engine.costs)
            table.set_limits(rank, max_num_seqs=slots, max_num_batched_tokens=2048)
        made = _core.make_policy(
            policy,
            0,
            pool,
            start=pool * index // count,
            routers=believed,
            serves=Phase.DECODE,
        )
        return Router(table, made)

    def at(self, moment_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment_s, next(self._order), action))

    def run(self) -> None:
        while self._events:
            now_s, _, action = heapq.heappop(self._events)
            action(now_s)

    def request(self, moment_s: float, prompt_tokens: int, output_tokens: int) -> None:
        index = self._random.randrange(len(self.routers))
        router = self.routers[index]

        def arrive(now_s: float) -> None:
            rank = router.policy.pick(
                router.table, prompt_tokens, output_tokens, now_s=now_s
            )
            booking = router.table.book(
                rank, Phase.DECODE, prompt_tokens, output_tokens
            )
            leg = Leg(
                index, booking, prompt_tokens, output_tokens, output_tokens, now_s
            )
            self.engines[rank].accept(leg)
            self._start_step(rank, now_s)

        self.at(moment_s, arrive)

    def _start_step(self, rank: int, now_s: float) -> None:
        engine = self.engines[rank]
        if self._stepping[rank] or not engine.legs:
            return
        self._stepping[rank] = True
        self.waits_s += [
            now_s - leg.arrived_s
            for leg in engine.legs[: engine.slots]
            if leg.left_tokens == leg.output_tokens
        ]
        self.at(now_s + engine.step_s(), functools.partial(self._end_step, rank))

    def _end_step(self, rank: int, now_s: float) -> None:
        self._stepping[rank] = False
        for leg in self.engines[rank].step():
            self.routers[leg.router].table.release(leg.booking)
        self._start_step(rank, now_s)

    def tell(self, until_s: float, every_s: float) -> None:
        """Each engine tells every router; each message takes its own time."""
        for rank in range(len(self.engines)):
            for turn in range(1, int(until_s / every_s) + 1):
                self.at(turn * every_s, functools.partial(self._tell, rank))

    def _tell(self, rank: int, now_s: float) -> None:
        for index, router in enumerate(self.routers):
            message = self.engines[rank].message(index)
            late_s = self._random.uniform(0.0, self._latest_s)

            self.at(now_s + late_s, functools.partial(_hear, router, rank, message))


def _hear(router: Router, rank: int, message: dict[str, int], now_s: float) -> None:
    router.table.hear(rank, **message, now_s=now_s)
