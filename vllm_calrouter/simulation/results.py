"""What became of each request, and of a run as a whole."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_calrouter.calibration import EngineCosts, SloClass
    from vllm_calrouter.workloads import Arrival


class Served:
    """One request in a run; seconds of virtual time, None until it came to that.

    Args:
        number: of the request in its run.
        arrival: as the workload has it.
        slo: the class it belongs to.
        costs: what its own prefill is priced with, where the class asks.
    """

    __slots__ = (
        "arrival",
        "decode_rank",
        "finish",
        "first_s",
        "last_s",
        "number",
        "preemptions",
        "prefill_rank",
        "second_s",
        "tokens",
        "tpot_target_s",
        "ttft_target_s",
    )

    def __init__(
        self, number: int, arrival: Arrival, slo: SloClass, costs: EngineCosts
    ) -> None:
        self.number = number
        self.arrival = arrival
        self.ttft_target_s = slo.ttft_target_s(arrival.prompt_tokens, costs)
        self.tpot_target_s = slo.tpot_s
        self.prefill_rank: int | None = None
        self.decode_rank: int | None = None
        self.first_s: float | None = None
        self.second_s: float | None = None
        self.last_s: float | None = None
        self.tokens = 0
        self.preemptions = 0
        self.finish: str | None = None

    def sent_to(self, rank: int, *, prefill: bool) -> None:
        """A leg of it goes to an engine."""
        if prefill:
            self.prefill_rank = rank
        else:
            self.decode_rank = rank

    def delivered(self, tokens: int, now_s: float) -> None:
        """Its client sees this many more tokens."""
        if self.second_s is None and tokens:
            if self.first_s is None:
                self.first_s = now_s
            if self.tokens + tokens > 1:
                self.second_s = now_s
        self.tokens += tokens
        self.last_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.arrival.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token."""
        return None if self.last_s is None else self.last_s - self.arrival.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def pause_s(self) -> float | None:
        """Time between the first and the second token."""
        if self.first_s is None or self.second_s is None:
            return None
        return self.second_s - self.first_s

    @property
    def good(self) -> bool:
        """Whether all of it arrived, in the time that was promised."""
        if self.ttft_s is None or self.tokens < self.arrival.output_tokens:
            return False
        in_time = self.ttft_s <= self.ttft_target_s
        return in_time and (self.tpot_s or 0.0) <= self.tpot_target_s

    def record(self) -> dict[str, Any]:
        """All of it, for a file."""
        arrival = self.arrival
        return {
            "request": self.number,
            "arrival_s": arrival.arrival_s,
            "prompt_tokens": arrival.prompt_tokens,
            "output_tokens": self.tokens,
            "slo": arrival.slo,
            "prefill_rank": self.prefill_rank,
            "decode_rank": self.decode_rank,
            "ttft_s": self.ttft_s,
            "ttft_target_s": self.ttft_target_s,
            "tpot_s": self.tpot_s,
            "tpot_target_s": self.tpot_target_s,
            "pause_s": self.pause_s,
            "e2e_s": self.e2e_s,
            "preemptions": self.preemptions,
            "finish": self.finish,
            "good": self.good,
        }


def summary(served: Sequence[Served]) -> dict[str, Any]:
    """Figures of a run.

    Goodput is the share of requests that were good (`Served.good`); `goodput_rps` the
    number of them per second of arrivals. A time nobody has is None. Legs count what
    was sent to an engine, by rank; a request that one engine serves whole has one.
    """
    classes = sorted({one.arrival.slo for one in served})
    span_s = max((one.arrival.arrival_s for one in served), default=0.0)
    good = sum(one.good for one in served)
    return {
        "requests": len(served),
        "goodput": _share(served),
        "goodput_rps": good / span_s if span_s else None,
        "goodput_by_class": {
            name: _share([one for one in served if one.arrival.slo == name])
            for name in classes
        },
        "ttft_s": _spread(served, lambda one: one.ttft_s),
        "tpot_s": _spread(served, lambda one: one.tpot_s),
        "e2e_s": _spread(served, lambda one: one.e2e_s),
        "pause_s": _spread(served, lambda one: one.pause_s),
        "preemptions": sum(one.preemptions for one in served),
        "refused": sum(one.finish == "refused" for one in served),
        "failed": sum(
            one.finish not in ("length", "stop", "refused") for one in served
        ),
        "legs_by_engine": {
            "prefill": _counted(one.prefill_rank for one in served),
            "decode": _counted(one.decode_rank for one in served),
        },
    }


def _counted(ranks: Iterable[int | None]) -> dict[str, int]:
    """How often each rank comes, by its name."""
    counts = Counter(rank for rank in ranks if rank is not None)
    return {str(rank): counts[rank] for rank in sorted(counts)}


def _share(served: Sequence[Served]) -> float:
    return sum(one.good for one in served) / len(served) if served else 0.0


def _spread(
    served: Iterable[Served], value: Callable[[Served], float | None]
) -> dict[str, float | None]:
    values = sorted(v for one in served if (v := value(one)) is not None)
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: percentile(values, share) for name, share in shares.items()}


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which a share of the ordered values lies, interpolated between
    neighbours; None of nothing."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 where there is only one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, statistics.stdev(values) / len(values) ** 0.5
