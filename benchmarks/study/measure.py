"""One simulated run with what the plots need of its single requests."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_calrouter.simulation.pool import Figures, simulated
from vllm_calrouter.simulation.results import percentile

#: Shares of requests at which the distribution of TTFT is kept.
SHARES = (*(n / 100 for n in range(100)), 0.995, 0.999, 1.0)

#: Seconds of arrivals that share a point of the timeline, and seconds between points.
WINDOW_S = 5.0
STEP_S = 1.0


def measured(arguments: str) -> Figures:
    """A run of `calrouter simulate`, by its command line, with TTFT in seconds at
    `SHARES` of its requests and a timeline; raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.jsonl"
        figures = simulated(f"{arguments} --requests-file {shlex.quote(str(file))}")
        requests = [json.loads(line) for line in file.read_text().splitlines()]
    waits = sorted(one["ttft_s"] for one in requests)
    figures["ttft_at_shares_s"] = [percentile(waits, share) for share in SHARES]
    figures["timeline"] = timeline(requests)
    return figures


def timeline(requests: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """What became of those who came within `WINDOW_S` of each point of time.

    Returns lists of equal length: `at_s`, `rate` in requests a second, `goodput`, and
    `ttft_p95_s`; None where nobody came.
    """
    end_s = max(one["arrival_s"] for one in requests)
    points: dict[str, list[float | None]] = {
        name: [] for name in ("at_s", "rate", "goodput", "ttft_p95_s")
    }
    at_s = WINDOW_S
    while at_s <= end_s:
        here = [r for r in requests if at_s - WINDOW_S < r["arrival_s"] <= at_s]
        waits = sorted(one["ttft_s"] for one in here)
        points["at_s"].append(at_s)
        points["rate"].append(len(here) / WINDOW_S)
        points["goodput"].append(
            sum(one["good"] for one in here) / len(here) if here else None
        )
        points["ttft_p95_s"].append(percentile(waits, 0.95))
        at_s += STEP_S
    return points
