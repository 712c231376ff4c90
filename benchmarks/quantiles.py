"""What the benchmarks print of many times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

Quantiles = dict[str, float]


def quantiles_us(times_s: Iterable[float]) -> Quantiles:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(times_s)
    return {
        "p50": round(statistics.median(ordered) * 1e6, 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 2),
    }
