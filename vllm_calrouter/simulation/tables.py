"""Runs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vllm_calrouter.simulation.results import mean_and_error

Run = dict[str, Any]

#: Times a table shows, by column: the figure and its part.
_TIMES = {
    "TTFT P50": ("ttft_s", "p50"),
    "TTFT P99": ("ttft_s", "p99"),
    "TPOT P99": ("tpot_s", "p99"),
    "pause P99": ("pause_s", "p99"),
}


def show(runs: Sequence[Run], console: Console | None = None) -> None:
    """Print the runs, and how the policies compare where there are several."""
    console = console or Console()
    console.print(_figures(runs))
    if len({run["policy"] for run in runs}) > 1:
        console.print(_comparison(runs))


def _figures(runs: Sequence[Run]) -> Table:
    first = runs[0]
    classes = list(first["goodput_by_class"])
    speed = sum(run["virtual_s"] for run in runs) / sum(run["wall_s"] for run in runs)
    table = Table(
        title=f"{first['workload']}, {first['prefill']} prefill + {first['decode']} "
        f"decode engines, {first['profile']}",
        caption="goodput: share of requests in time; times in ms of virtual time,"
        f" which passed {speed:.0f} times faster than real time",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("policy", no_wrap=True)
    for name in ("seed", "reqs", "goodput", *classes, *_TIMES):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run["policy"],
            str(run["seed"]),
            str(run["requests"]),
            f"{run['goodput']:.3f}",
            *(f"{run['goodput_by_class'].get(name, 0):.3f}" for name in classes),
            *(_ms(run[key][part]) for key, part in _TIMES.values()),
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f}"


def _comparison(runs: Sequence[Run]) -> Table:
    """Differences in goodput, taken on the same requests."""
    by_policy: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], {})[run["seed"]] = run
    base, *_ = by_policy
    table = Table(
        title=f"Paired with {base}, seed by seed",
        caption="mean and its standard error over seeds",
        box=SIMPLE,
    )
    for name in ("policy", "goodput", f"less {base}'s", "TTFT P99, ms"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, of in by_policy.items():
        goodput = [run["goodput"] for run in of.values()]
        gain = [
            run["goodput"] - by_policy[base][seed]["goodput"]
            for seed, run in of.items()
        ]
        tail = [1e3 * (run["ttft_s"]["p99"] or 0.0) for run in of.values()]
        table.add_row(
            policy,
            _mean(goodput, ".3f"),
            "" if policy == base else _mean(gain, "+.3f"),
            _mean(tail, ",.0f"),
        )
    return table


def _mean(values: Sequence[float], form: str) -> str:
    mean, error = mean_and_error(values)
    shown = f"{mean:{form}}"
    return shown if len(values) < 2 else f"{shown} ± {error:{form.lstrip('+')}}"
