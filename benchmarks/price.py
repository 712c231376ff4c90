"""The price of docs/pricing.md a second and a third time: plain Python and NumPy.

For `benchmarks.decision_latency`, and to test the core against. Both take the steps of
the formulas in the order of `csrc/price.h`, so results are equal to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_calrouter._core import TERMS, Costs, Phase
from vllm_calrouter.calibration import load
from vllm_calrouter.placement import core_costs

A40_QWEN_3B = core_costs(load("a40-qwen2.5-3b").costs)

#: Of `Table.hear`, what the price reads.
FIGURES = (
    "prefill_tokens",
    "output_tokens",
    "context_tokens",
    "running",
    "waiting",
    "waiting_remote",
    "kv_total_blocks",
    "kv_free_blocks",
    "block_tokens",
    "step_age_s",
)
#: Sums over unseen bookings, by phase.
UNSEEN = (
    "legs",
    "prompt_tokens",
    "uncached_tokens",
    "uncached_tokens_sq",
    "output_tokens",
)


@dataclass(frozen=True, slots=True)
class Booking:
    rank: int
    phase: Phase
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass
class State:
    """One engine: its last message and this router's unseen bookings."""

    costs: Costs
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    message: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(FIGURES, 0)
    )
    unseen: dict[Phase, dict[str, int]] = field(
        default_factory=lambda: {phase: dict.fromkeys(UNSEEN, 0) for phase in Phase}
    )
    heard_s: float | None = None

    def hear(self, message: Mapping[str, float]) -> None:
        self.message = message
        self.heard_s = message["now_s"]

    def count(self, booking: Booking, sign: int) -> None:
        sums = self.unseen[booking.phase]
        uncached = booking.prompt_tokens - booking.cached_tokens
        sums["legs"] += sign
        sums["prompt_tokens"] += sign * booking.prompt_tokens
        sums["uncached_tokens"] += sign * uncached
        sums["uncached_tokens_sq"] += sign * uncached * uncached
        sums["output_tokens"] += sign * booking.output_tokens


@dataclass(frozen=True, slots=True)
class Request:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    now_s: float = 0.0
    far: bool = False


def excess_s(expected_s: float, target_s: float) -> float:
    return 0.0 if target_s == 0.0 else max(0.0, expected_s - target_s)


def batched_prefill_s(state: State, tokens: float, tokens_sq: float) -> float:
    costs = state.costs
    seconds = costs.prefill_base_s * (tokens / state.max_num_batched_tokens)
    seconds += costs.prefill_per_token_s * tokens
    return seconds + costs.prefill_per_token_sq_s * tokens_sq


def terms(
    state: State,
    request: Request,
    serves: Phase | None,
    *,
    routers: int = 1,
    silent_s: float = 0.3,
    stale_s: float = 1.0,
) -> dict[str, float]:
    """The terms of one engine's price, in seconds; weights are 1."""
    costs, m = state.costs, state.message
    prefill, decode = state.unseen[Phase.PREFILL], state.unseen[Phase.DECODE]
    prompt, output = float(request.prompt_tokens), float(request.output_tokens)
    uncached = prompt - request.cached_tokens

    unseen = float(prefill["uncached_tokens"])
    unseen_sq = float(prefill["uncached_tokens_sq"])
    if serves is None:
        unseen += decode["uncached_tokens"]
        unseen_sq += decode["uncached_tokens_sq"]
    told = float(m["prefill_tokens"])
    told_sq = told * told / max(1.0, m["running"] + m["waiting"])
    since_s = 0.0 if state.heard_s is None else request.now_s - state.heard_s
    since_s = max(0.0, since_s)
    quiet_s = since_s + m.get("step_age_s", 0.0)
    worked_s = min(quiet_s, stale_s)
    told_s = batched_prefill_s(state, told, told_sq)
    backlog = max(0.0, told_s - worked_s)
    backlog += batched_prefill_s(state, routers * unseen, routers * unseen_sq)

    sequences = m["running"] + m["waiting"] + m["waiting_remote"]
    sequences += routers * (prefill["legs"] + decode["legs"])
    taken = m["kv_total_blocks"] - m["kv_free_blocks"]
    kv_tokens = taken * m["block_tokens"] + told
    if serves == Phase.DECODE and m["running"] > 0:
        kv_tokens += m["waiting"] * m["context_tokens"] / m["running"]
    kv_tokens += routers * (prefill["prompt_tokens"] + decode["prompt_tokens"])
    capacity = m["kv_total_blocks"] * m["block_tokens"] or costs.kv_capacity_tokens
    kv_use = (kv_tokens + prompt) * (1.0 / capacity)

    price = {"prefill_backlog_s": backlog}
    price["silence_s"] = max(0.0, since_s - silent_s, quiet_s - stale_s)
    own = (
        costs.prefill_base_s
        + costs.prefill_per_token_s * uncached
        + costs.prefill_per_token_sq_s * uncached * uncached
    )
    if serves == Phase.PREFILL:
        overflow_tokens = max(0.0, kv_use - 1.0) / (1.0 / capacity)
        price["prefill_own_s"] = own
        price["kv_pressure_s"] = (
            own * kv_use * kv_use + overflow_tokens * costs.prefill_per_token_s
        )
        price["slo_s"] = excess_s(backlog + own, request.slo_ttft_s)
        return price
    if serves == Phase.DECODE:
        transfers = m["waiting_remote"] + routers * decode["legs"]
        base_s, bytes_per_s = costs.transfer_base_s, costs.transfer_bytes_per_s
        if request.far:
            base_s, bytes_per_s = (
                costs.far_transfer_base_s,
                costs.far_transfer_bytes_per_s,
            )
        per_token = costs.kv_bytes_per_token / bytes_per_s
        before = base_s + per_token * (1.0 + transfers) * prompt
        price["transfer_s"] = before
    else:
        before = own
        price["prefill_own_s"] = own

    slots = state.max_num_seqs
    batch = min(sequences + 1.0, slots)
    slot_use = (sequences + 1.0) / slots
    context = m["context_tokens"] + routers * decode["prompt_tokens"]
    context = (context + prompt + 0.5 * output) * (batch / (sequences + 1.0))
    step = costs.decode_base_s + costs.decode_per_seq_s * batch
    step += costs.decode_per_context_token_s * context
    left = float(m["output_tokens"] + routers * decode["output_tokens"])
    mean_left = left / sequences if sequences > 0 and left > 0 else output
    wait = max(0.0, max(slot_use, kv_use) - 1.0) * mean_left * step
    price["decode_wait_s"] = wait
    price["decode_own_s"] = output * step
    price["slot_pressure_s"] = output * step * slot_use * slot_use
    price["kv_pressure_s"] = output * step * kv_use * kv_use
    price["slo_s"] = excess_s(
        backlog + before + wait + step, request.slo_ttft_s
    ) + output * excess_s(step, request.slo_tpot_s)
    return price


def total_s(price: Mapping[str, float]) -> float:
    """The sum, taken in the order of the core's."""
    seconds = 0.0
    for name in TERMS:
        seconds += price.get(name, 0.0)
    return seconds


@dataclass
class Pool:
    """The ranks [begin, end) that run one phase, and whose turn it is among equals."""

    begin: int
    end: int
    phase: Phase
    turn: int = 0

    def ranks(self) -> list[int]:
        """As the core looks at them, the one whose turn it is first."""
        first = self.begin + self.turn % (self.end - self.begin)
        return [*range(first, self.end), *range(self.begin, first)]

    def took(self, rank: int) -> int:
        self.turn = rank - self.begin + 1
        return rank


class Books(ABC):
    """A router's ledger; what is read for a choice is the subclass's."""

    def __init__(self, engines: int) -> None:
        self._last = 0
        self._open: dict[int, Booking] = {}
        self._unseen: list[dict[int, Booking]] = [{} for _ in range(engines)]

    @abstractmethod
    def pick(self, pool: Pool, request: Request) -> int: ...
    @abstractmethod
    def told(self, rank: int, message: Mapping[str, Any]) -> None: ...
    @abstractmethod
    def count(self, booking: Booking, sign: int) -> None: ...

    def hear(self, message: Mapping[str, Any]) -> None:
        self.told(message["rank"], message)
        unseen = self._unseen[message["rank"]]
        for number in [n for n in unseen if n <= message["booking_seen"]]:
            self.count(unseen.pop(number), -1)

    def book(self, booking: Booking) -> int:
        self._last += 1
        self._open[self._last] = booking
        self._unseen[booking.rank][self._last] = booking
        self.count(booking, +1)
        return self._last

    def release(self, number: int) -> None:
        booking = self._open.pop(number)
        if self._unseen[booking.rank].pop(number, None):
            self.count(booking, -1)


class PlainRouter(Books):
    """Plain Python: one engine after the other."""

    def __init__(self, costs: Sequence[Costs]) -> None:
        super().__init__(len(costs))
        self.states = [State(cost) for cost in costs]

    def told(self, rank: int, message: Mapping[str, Any]) -> None:
        self.states[rank].hear(message)

    def count(self, booking: Booking, sign: int) -> None:
        self.states[booking.rank].count(booking, sign)

    def pick(self, pool: Pool, request: Request) -> int:
        best, least_s = pool.begin, float("inf")
        for rank in pool.ranks():
            seconds = total_s(terms(self.states[rank], request, pool.phase))
            if seconds < least_s:
                best, least_s = rank, seconds
        return pool.took(best)


Column = npt.NDArray[np.float64]


class NumpyRouter(Books):
    """NumPy: one array operation for all engines of a pool. Without SLO and cache."""

    def __init__(
        self, costs: Sequence[Costs], *, silent_s: float = 0.3, stale_s: float = 1.0
    ) -> None:
        engines = len(costs)
        super().__init__(engines)
        self._silent_s = silent_s
        self._stale_s = stale_s
        self._figures = {name: np.zeros(engines) for name in FIGURES}
        self._heard_s = np.full(engines, np.inf)
        self._unseen_sums = {
            phase: {name: np.zeros(engines) for name in UNSEEN} for phase in Phase
        }
        names = [name for name in dir(Costs) if not name.startswith("_")]
        self._costs = {
            name: np.array([getattr(cost, name) for cost in costs], dtype=float)
            for name in names
        }
        limits = State(costs[0])
        self._slots = float(limits.max_num_seqs)
        self._batched = float(limits.max_num_batched_tokens)

    def told(self, rank: int, message: Mapping[str, Any]) -> None:
        for name, column in self._figures.items():
            column[rank] = message.get(name, 0.0)
        self._heard_s[rank] = message["now_s"]

    def count(self, booking: Booking, sign: int) -> None:
        sums, rank = self._unseen_sums[booking.phase], booking.rank
        prompt = booking.prompt_tokens
        sums["legs"][rank] += sign
        sums["prompt_tokens"][rank] += sign * prompt
        sums["uncached_tokens"][rank] += sign * prompt
        sums["uncached_tokens_sq"][rank] += sign * prompt * prompt
        sums["output_tokens"][rank] += sign * booking.output_tokens

    def pick(self, pool: Pool, request: Request) -> int:
        seconds = self._seconds(pool, request)
        first = pool.turn % len(seconds)
        in_turn = np.concatenate((seconds[first:], seconds[:first]))
        offset = (first + int(np.argmin(in_turn))) % len(seconds)
        return pool.took(pool.begin + offset)

    def _batched_prefill_s(
        self, cost: Mapping[str, Column], tokens: Column, tokens_sq: Column
    ) -> Column:
        seconds: Column = cost["prefill_base_s"] * (tokens / self._batched)
        seconds = seconds + cost["prefill_per_token_s"] * tokens
        return seconds + cost["prefill_per_token_sq_s"] * tokens_sq

    def _seconds(self, pool: Pool, request: Request) -> Column:
        total: Column
        part = slice(pool.begin, pool.end)
        m = {name: column[part] for name, column in self._figures.items()}
        cost = {name: column[part] for name, column in self._costs.items()}
        prefill, decode = (
            {name: column[part] for name, column in self._unseen_sums[phase].items()}
            for phase in Phase
        )
        prompt, output = float(request.prompt_tokens), float(request.output_tokens)
        told = m["prefill_tokens"]
        told_sq = told * told / np.maximum(1.0, m["running"] + m["waiting"])
        since_s = np.maximum(0.0, request.now_s - self._heard_s[part])
        quiet_s = since_s + m["step_age_s"]
        worked_s = np.minimum(quiet_s, self._stale_s)
        told_s = self._batched_prefill_s(cost, told, told_sq)
        backlog = np.maximum(0.0, told_s - worked_s)
        backlog = backlog + self._batched_prefill_s(
            cost, prefill["uncached_tokens"], prefill["uncached_tokens_sq"]
        )
        kv_tokens = (m["kv_total_blocks"] - m["kv_free_blocks"]) * m["block_tokens"]
        kv_tokens += told
        if pool.phase == Phase.DECODE:
            kv_tokens += np.where(
                m["running"] > 0,
                m["waiting"] * m["context_tokens"] / np.maximum(1.0, m["running"]),
                0.0,
            )
        kv_tokens += prefill["prompt_tokens"] + decode["prompt_tokens"]
        told_capacity = m["kv_total_blocks"] * m["block_tokens"]
        per_token = 1.0 / np.where(
            told_capacity > 0.0, told_capacity, cost["kv_capacity_tokens"]
        )
        kv_use = (kv_tokens + prompt) * per_token
        silence = np.maximum(0.0, quiet_s - self._stale_s)
        silence = np.maximum(silence, since_s - self._silent_s)
        if pool.phase == Phase.PREFILL:
            own = cost["prefill_base_s"] + cost["prefill_per_token_s"] * prompt
            own = own + cost["prefill_per_token_sq_s"] * prompt * prompt
            overflow = np.maximum(0.0, kv_use - 1.0) / per_token
            pressure = own * kv_use * kv_use + overflow * cost["prefill_per_token_s"]
            total = backlog + own + pressure + silence
            return total
        transfers = 1.0 + (m["waiting_remote"] + decode["legs"])
        per_byte = cost["kv_bytes_per_token"] / cost["transfer_bytes_per_s"]
        transfer = cost["transfer_base_s"] + per_byte * transfers * prompt
        sequences = m["running"] + m["waiting"] + m["waiting_remote"]
        sequences = sequences + (prefill["legs"] + decode["legs"])
        batch = np.minimum(sequences + 1.0, self._slots)
        slot_use = (sequences + 1.0) / self._slots
        context = m["context_tokens"] + decode["prompt_tokens"]
        context = (context + prompt + 0.5 * output) * (batch / (sequences + 1.0))
        step = cost["decode_base_s"] + cost["decode_per_seq_s"] * batch
        step = step + cost["decode_per_context_token_s"] * context
        left = m["output_tokens"] + decode["output_tokens"]
        mean_left = np.where(
            (sequences > 0) & (left > 0), left / np.maximum(1.0, sequences), output
        )
        wait = np.maximum(0.0, np.maximum(slot_use, kv_use) - 1.0) * mean_left * step
        own = output * step
        seconds = backlog + transfer + wait + own
        seconds = seconds + own * slot_use * slot_use
        total = seconds + own * kv_use * kv_use + silence
        return total
