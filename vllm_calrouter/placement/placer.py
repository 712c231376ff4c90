"""One router's view of the pools: what it booked where, and whom it chooses next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_calrouter import _core
from vllm_calrouter._core import Costs, Phase
from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.options import PRICING_POLICIES, RouterOptions
from vllm_calrouter.placement.costs import (
    Limits,
    core_costs,
    engine_costs,
    engine_limits,
)


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


class Prompt(NamedTuple):
    """What prefix caches know a prompt by: its token ids, and one number for what else
    tells two apart (adapter, the client's salt)."""

    token_ids: list[int]
    salt: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision: the rank, and the scores (lower is better) it was taken from.

    `terms` has the seconds each score is the sum of, by rank and name, where the placer
    explains and the policy prices.
    """

    phase: Phase
    rank: int
    policy: str
    reason: str
    scores: tuple[tuple[int, float], ...]
    seconds: float
    terms: Mapping[int, Mapping[str, float]] | None = None
    #: Of the prompt, expected to be in the engine's prefix cache.
    cached_tokens: int = 0

    def price(self) -> Mapping[str, float] | None:
        """The terms of the chosen engine, in seconds; None where nobody priced."""
        return None if self.terms is None else self.terms.get(self.rank)

    def candidates(self) -> list[dict[str, Any]]:
        """The scores and their terms as plain data, as journal and pages show them."""
        terms = self.terms or {}
        return [
            {"rank": rank, "score": score, "terms": terms.get(rank, {})}
            for rank, score in self.scores
        ]


class Placer:
    """Chooses an engine for a leg and keeps the books of what is under way.

    Args:
        options: the router's options.
        pools: which ranks run which phase.
        index, count: which of how many routers (API servers) this one is. Routers
            start at different engines, so that idle ones do not all pick the first.
        costs: what work costs on each engine, by rank, for the policies that price; by
            default what the profile of `options` says.
        limits: each engine's scheduler limits, by rank; by default vLLM's own defaults,
            or what `options` says for the engine's role.
        prefix_caching: whether the engines cache prompts.
        explain: keep the terms of every decision.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        options: RouterOptions,
        pools: Pools,
        *,
        index: int = 0,
        count: int = 1,
        costs: Sequence[EngineCosts | Costs] | None = None,
        limits: Sequence[Limits] | None = None,
        prefix_caching: bool = True,
        explain: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pools = pools
        self.table = _core.Table(pools.engines)
        self._price_engines(options, costs, limits)
        self._explain = explain
        self._clock = clock
        #: Called before each choice, to make the table as fresh as can be.
        self.refresh: Callable[[], None] | None = None
        self._reported: Sequence[Sequence[float]] | None = None
        self._policies = self._make_policies(options, index, count)
        prices = options.policy in PRICING_POLICIES
        knows = options.prefix_aware and prefix_caching and prices
        self._prefixes = _core.Prefixes(pools.engines) if knows else None

    def _price_engines(
        self,
        options: RouterOptions,
        costs: Sequence[EngineCosts | Costs] | None,
        limits: Sequence[Limits] | None,
    ) -> None:
        engines = self.pools.engines
        costs = costs or engine_costs(options, engines)
        limits = limits or engine_limits(options, engines)
        engines_of = zip(costs, limits, strict=True)
        for rank, (cost, limit) in enumerate(engines_of):
            self.table.set_costs(rank, core_costs(cost))
            self.table.set_limits(
                rank,
                max_num_seqs=limit.max_num_seqs,
                max_num_batched_tokens=limit.max_num_batched_tokens,
            )

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
                serves=phase if self.pools.disaggregated else None,
                slot_weight=options.slot_weight,
                kv_weight=options.kv_weight,
                slo_weight=options.slo_weight,
            )

        decode = make(Phase.DECODE)
        # One pool has one turn: both phases must share its policy's state.
        prefill = make(Phase.PREFILL) if self.pools.disaggregated else decode
        return {Phase.PREFILL: prefill, Phase.DECODE: decode}

    def choose(
        self,
        phase: Phase,
        prompt_tokens: int,
        output_tokens: int,
        *,
        prompt: Prompt | None = None,
        slo_ttft_s: float = 0.0,
        slo_tpot_s: float = 0.0,
        now_s: float = 0.0,
        source_rank: int | None = None,
        due_s: float = math.inf,
    ) -> Choice:
        """Choose an engine; books nothing.

        Args:
            phase: the pool to choose from.
            prompt_tokens: length of the prompt.
            output_tokens: predicted length of the output.
            prompt: the prompt itself, where the engine will compute it; the one chosen
                is expected to have it from then on.
            slo_ttft_s: seconds from now to the first token; 0: no target, below 0:
                overdue.
            slo_tpot_s: seconds between tokens; 0: no target.
            now_s: on the clock by which `table` hears messages.
            source_rank: the engine that has the request's KV cache.
            due_s: when this leg should have ended, on the clock of `now_s`; infinite:
                whenever.
        """
        began = self._clock()
        if self.refresh is not None:
            self.refresh()
        policy = self._policies[phase]
        prefixes = self._look_up(phase, prompt)
        rank, reason, scores = policy.decide(
            self.table,
            prompt_tokens,
            output_tokens,
            slo_ttft_s=slo_ttft_s,
            slo_tpot_s=slo_tpot_s,
            now_s=now_s,
            source_rank=-1 if source_rank is None else source_rank,
            prefixes=prefixes,
            due_s=due_s,
        )
        cached_tokens = self._keep(prefixes, rank)
        return Choice(
            phase,
            rank,
            policy.name,
            reason,
            scores,
            seconds=self._clock() - began,
            terms=(policy.terms() or None) if self._explain else None,
            cached_tokens=cached_tokens,
        )

    def given(
        self, by: str, phase: Phase, rank: int, prompt: Prompt | None = None
    ) -> Choice:
        """A choice that somebody else has made; the engine will have the prompt, too.

        Args: as of `choose`.
        """
        cached_tokens = self._keep(self._look_up(phase, prompt), rank)
        return Choice(phase, rank, by, "given", (), 0.0, cached_tokens=cached_tokens)

    def _keep(self, prefixes: _core.Prefixes | None, rank: int) -> int:
        """What an engine has of the prompt looked up last; from now on it has all."""
        if prefixes is None:
            return 0
        cached_tokens = prefixes.cached_tokens(rank)
        prefixes.keep(self.table, rank)
        return cached_tokens

    def _look_up(self, phase: Phase, prompt: Prompt | None) -> _core.Prefixes | None:
        """What engines have of a prompt; None where it is not known or not asked."""
        computes = phase == Phase.PREFILL or not self.pools.disaggregated
        if self._prefixes is None or prompt is None or not computes:
            return None
        self._prefixes.look(self.table, prompt.salt, prompt.token_ids)
        return self._prefixes

    def forget_prefixes(self) -> None:
        """The engines' prefix caches were emptied."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def place_on(self, hosts: Sequence[str]) -> None:
        """Say on which host each engine runs, by rank: a KV cache that moves between
        two is priced as far."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        for rank, host in enumerate(hosts):
            self.table.set_host(rank, numbers[host])

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
