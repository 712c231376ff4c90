"""One router's view of the pools: what it booked where, and whom it chooses next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_calrouter import _core
from vllm_calrouter._core import Phase
from vllm_calrouter.options import RouterOptions


@dataclass(frozen=True)
class Pools:
    """Which ranks run which phase. `prefill` 0: every engine does both."""

    engines: int
    prefill: int

    def __str__(self) -> str:
        if not self.disaggregated:
            return f"{self.engines} engines that do both"
        return (
            f"{self.prefill} prefill and {self.engines - self.prefill} decode engines"
        )

    @property
    def disaggregated(self) -> bool:
        return self.prefill > 0

    def ranks(self, phase: Phase) -> range:
        if not self.disaggregated:
            return range(self.engines)
        if phase == Phase.PREFILL:
            return range(self.prefill)
        return range(self.prefill, self.engines)


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision: the rank, and the scores (lower is better) it was taken from."""

    phase: Phase
    rank: int
    policy: str
    reason: str
    scores: tuple[tuple[int, float], ...]
    seconds: float


class Placer:
    """Chooses an engine for a leg and keeps the books of what is under way.

    Args:
        options: the router's options.
        pools: which ranks run which phase.
        index, count: which of how many routers (API servers) this one is. Routers
            start at different engines, so that idle ones do not all pick the first.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        options: RouterOptions,
        pools: Pools,
        *,
        index: int = 0,
        count: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pools = pools
        self.table = _core.Table(pools.engines)
        self._clock = clock
        self._reported: Sequence[Sequence[float]] | None = None
        self._policies = self._make_policies(options, index, count)

    def _make_policies(
        self, options: RouterOptions, index: int, count: int
    ) -> dict[Phase, _core.Policy]:
        def make(phase: Phase) -> _core.Policy:
            ranks = self.pools.ranks(phase)
            return _core.make_policy(
                _policy_name(options.policy, phase, self.pools),
                ranks.start,
                ranks.stop,
                start=len(ranks) * index // count,
                routers=count,
                # Neither routers nor phases may draw alike, or pairs always coincide.
                seed=options.seed + 2 * index + phase.value,
                threshold_tokens=options.length_threshold_tokens,
                long_share=options.long_share,
            )

        decode = make(Phase.DECODE)
        # One pool has one turn: both phases must share its policy's state.
        prefill = make(Phase.PREFILL) if self.pools.disaggregated else decode
        return {Phase.PREFILL: prefill, Phase.DECODE: decode}

    def choose(self, phase: Phase, prompt_tokens: int, output_tokens: int) -> Choice:
        """Choose an engine; books nothing.

        Args:
            phase: the pool to choose from.
            prompt_tokens: length of the prompt.
            output_tokens: predicted length of the output.
        """
        began = self._clock()
        policy = self._policies[phase]
        rank = policy.pick(self.table, prompt_tokens, output_tokens)
        seconds = self._clock() - began
        return Choice(
            phase, rank, policy.name, policy.reason(), tuple(policy.scores()), seconds
        )

    def report(self, counts: Sequence[Sequence[float]]) -> None:
        """Take over what engines said of themselves: waiting, running, KV usage."""
        if counts is self._reported:
            return
        self._reported = counts
        for rank, (waiting, running, kv_usage) in enumerate(counts):
            self.table.report(rank, int(waiting), int(running), kv_usage)


def _policy_name(chosen: str, phase: Phase, pools: Pools) -> str:
    """The policy of one pool: an output's length says nothing of a prefill engine."""
    if chosen == "length_threshold" and phase == Phase.PREFILL and pools.disaggregated:
        return "least_loaded"
    return chosen
