"""Runs as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vllm_calrouter.simulation.results import mean_and_error

Run = dict[str, Any]

#: Times a table shows, by column: the figure and its part.
_TIMES = {
    "TTFT\nP50": ("ttft_s", "p50"),
    "TTFT\nP99": ("ttft_s", "p99"),
    "TPOT\nP99": ("tpot_s", "p99"),
    "pause\nP99": ("pause_s", "p99"),
}

#: A router's options may make a name long; figures need the rest of a line.
_NAME_WIDTH = 24


def show(runs: Sequence[Run], console: Console | None = None) -> None:
    """Print the runs, and how they compare where they have several names."""
    console = console or Console()
    console.print(_figures(runs))
    if len({run["name"] for run in runs}) > 1:
        console.print(_comparison(runs))


def _speed(runs: Sequence[Run]) -> str:
    """How fast virtual time went; nothing is said of runs in real time."""
    if not all("virtual_s" in run for run in runs):
        return ""
    speed = sum(run["virtual_s"] for run in runs) / sum(run["wall_s"] for run in runs)
    return f"; {speed:.0f} times faster than real time"


def _figures(runs: Sequence[Run]) -> Table:
    first = runs[0]
    classes = list(first["goodput_by_class"])
    table = Table(
        title=f"{first['scenario']} ({first['kind']})",
        caption="goodput: share of requests in time; times in ms" + _speed(runs),
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("policy", max_width=_NAME_WIDTH)
    for name in ("seed", "reqs", "goodput", *classes, *_TIMES):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run["name"],
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
    by_name: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_name.setdefault(run["name"], {})[run["seed"]] = run
    base, *_ = by_name
    table = Table(
        title=f"Paired with {base}, seed by seed",
        caption="mean and its standard error over seeds",
        box=SIMPLE,
    )
    table.add_column("policy", max_width=_NAME_WIDTH)
    for name in ("goodput", "less the\nfirst's", "TTFT P99,\nms"):
        table.add_column(name, justify="right")
    for name, of in by_name.items():
        goodput = [run["goodput"] for run in of.values()]
        gain = paired(of, by_name[base])
        tail = [1e3 * (run["ttft_s"]["p99"] or 0.0) for run in of.values()]
        table.add_row(
            name,
            _mean(goodput, ".3f"),
            "" if name == base or not gain else _mean(gain, "+.3f"),
            _mean(tail, ",.0f"),
        )
    return table


def paired(runs: Mapping[int, Run], base: Mapping[int, Run]) -> list[float]:
    """Differences in goodput to the base's run of each seed that both have."""
    return [
        run["goodput"] - base[seed]["goodput"]
        for seed, run in runs.items()
        if seed in base
    ]


def _mean(values: Sequence[float], form: str) -> str:
    mean, error = mean_and_error(values)
    shown = f"{mean:{form}}"
    return shown if len(values) < 2 else f"{shown} ± {error:{form.lstrip('+')}}"
