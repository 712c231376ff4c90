"""What came of a setup in a cell: means over seeds, next to round-robin's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from vllm_calrouter.simulation.pool import Figures
from vllm_calrouter.simulation.results import mean_and_error


class Outcome(NamedTuple):
    """Means over seeds; times in seconds.

    Fields:
        goodput: share of requests in time.
        gain, gain_error: goodput less round-robin's, seed by seed, with its standard
            error.
        ttft_mean_s, ttft_p99_s, pause_p99_s: the pause is the one after an early first
            token.
        worst_s: the longest TTFT of all seeds.
        p99_ratio: P99 of TTFT over round-robin's.
    """

    goodput: float
    gain: float
    gain_error: float
    ttft_mean_s: float
    ttft_p99_s: float
    p99_ratio: float
    worst_s: float
    pause_p99_s: float


#: By name of the cell and of the setup.
Outcomes = dict[tuple[str, str], Outcome]


def outcome(runs: Sequence[Figures], base: Sequence[Figures]) -> Outcome:
    """One setup's runs in a cell against round-robin's of the same seeds."""
    goodput = [run["goodput"] for run in runs]
    gains = [one - other["goodput"] for one, other in zip(goodput, base, strict=True)]
    p99_s = fmean(run["ttft_s"]["p99"] for run in runs)
    return Outcome(
        fmean(goodput),
        *mean_and_error(gains),
        fmean(run["ttft_s"]["mean"] for run in runs),
        p99_s,
        p99_s / fmean(run["ttft_s"]["p99"] for run in base),
        max(run["ttft_s"]["max"] for run in runs),
        fmean(run["pause_s"]["p99"] or 0.0 for run in runs),
    )
