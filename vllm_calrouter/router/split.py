"""How many of the engines should prefill, for the traffic that was seen.

Measured, not simulated (`calrouter plan` simulates): how much of their time the prefill
engines compute, and how much of their slots or KV blocks the decode engines use, each
as a mean that forgets. If a pool's demand is its use times its engines, the split that
leaves both pools most room is the one whose busier pool is least busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_calrouter._core import Phase
from vllm_calrouter.messages import EngineMessage
from vllm_calrouter.placement import Pools

#: Seconds after which what was seen weighs 1/e.
MEMORY_S = 300.0

#: Seconds of an engine before it is judged.
_LEAST_SEEN_S = 10.0


class _Seen(NamedTuple):
    """The last message's place in an engine's life."""

    incarnation: int
    steps: int
    at_s: float


class _Use:
    """One engine's mean use, 1 when it is full; more where requests wait."""

    def __init__(self) -> None:
        self.last: _Seen | None = None
        self.mean = 0.0
        self.seen_s = 0.0

    def add(self, use: float, seconds: float) -> None:
        self.seen_s += seconds
        # As long as little was seen, a plain mean.
        share = max(seconds / self.seen_s, 1.0 - math.exp(-seconds / MEMORY_S))
        self.mean += share * (use - self.mean)


class Split:
    """Takes in engines' messages and says how they would be split better.

    Args:
        pools: as they are split now.
        clock: seconds; only differences count.
    """

    def __init__(
        self, pools: Pools, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._uses = [_Use() for _ in range(pools.engines)]

    def hear(self, message: EngineMessage) -> None:
        """Take in an engine's message, of any rank in any order."""
        one, now_s = self._uses[message.rank], self._clock()
        before, one.last = (
            one.last,
            _Seen(message.incarnation, message.steps, now_s),
        )
        if before is None or before.incarnation != message.incarnation:
            return
        seconds = now_s - before.at_s
        if seconds <= 0.0:
            return
        if message.rank in self._pools.ranks(Phase.PREFILL):
            one.add(_busy(message, message.steps - before.steps, seconds), seconds)
        else:
            one.add(_full(message), seconds)

    def use(self, phase: Phase) -> float | None:
        """Mean use of a pool's engines; None before each was seen for a while."""
        uses = [self._uses[rank] for rank in self._pools.ranks(phase)]
        if any(one.seen_s < _LEAST_SEEN_S for one in uses):
            return None
        return sum(one.mean for one in uses) / len(uses)

    def suggested_prefill(self) -> int | None:
        """Prefill engines of the best split; None: nothing known, or no pools."""
        pools = self._pools
        if not pools.disaggregated:
            return None
        prefill, decode = self.use(Phase.PREFILL), self.use(Phase.DECODE)
        if prefill is None or decode is None or prefill + decode == 0.0:
            return None
        demand = (prefill * pools.prefill, decode * (pools.engines - pools.prefill))

        def busier(engines: int) -> tuple[float, int]:
            use = max(demand[0] / engines, demand[1] / (pools.engines - engines))
            # Of equal splits, the one there is.
            return use, abs(engines - pools.prefill)

        return min(range(1, pools.engines), key=busier)

    def describe(self) -> dict[str, Any]:
        """All of it as plain data, as the state page shows it."""
        return {
            "prefill_engines": self._pools.prefill,
            "suggested_prefill_engines": self.suggested_prefill(),
            "prefill_use": self.use(Phase.PREFILL),
            "decode_use": self.use(Phase.DECODE),
        }


def _busy(message: EngineMessage, steps: int, seconds: float) -> float:
    """Share of the time that an engine computed; of the steps that the message does not
    tell, their number is known, and their length taken to be as of those it tells."""
    told = message.recent_steps[-steps:] if steps > 0 else []
    if not told:
        return 0.0
    mean_s = sum(step.seconds for step in told) / len(told)
    # A step longer than the time between two messages counts where it ends: more than 1
    # now makes up for 0 before.
    return steps * mean_s / seconds


def _full(message: EngineMessage) -> float:
    """Use of an engine's slots or KV blocks, whichever is scarcer; above 1 where
    requests wait."""
    sequences = message.running + message.waiting + message.waiting_remote
    taken = message.kv_total_blocks - message.kv_free_blocks
    slots = sequences / max(1, message.max_seqs)
    return max(slots, taken / max(1, message.kv_total_blocks))
