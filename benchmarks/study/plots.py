"""An exhibit's runs as SVG, the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.study.exhibits import SETUPS
from benchmarks.study.measure import SHARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.study.exhibit import Results

#: Ids inside the file come from this and not from chance; text stays text.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "study",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}

#: Of the seeds, whose arrivals the timeline shows.
_SHOWN_SEED = 0


def draw(results: Results, name: str, folder: Path) -> Path:
    """Make one of `PLOTS` of an exhibit; returns its file."""
    file = folder / f"{results.exhibit.name}-{name}.svg"
    with matplotlib.rc_context(_STYLE):
        PLOTS[name](results).savefig(file, metadata={"Date": None, "Creator": None})
    return file


def by_point(results: Results) -> Figure:
    """Goodput, and the study's where it prints one, over a quantity that is varied."""
    return _goodput(results, "o-")


def by_kind(results: Results) -> Figure:
    """The same over things that have no order."""
    return _goodput(results, "o")


def _goodput(results: Results, mark: str) -> Figure:
    figure, (axes,) = _panels(1)
    points = list(results.exhibit.points)
    for setup in results.exhibit.setups:
        colour = _colour(setup)
        values = [results.mean(point, setup, "goodput") for point in points]
        axes.plot(points, values, mark, color=colour, label=setup, markersize=4)
        printed = [
            (one.point, one.value)
            for one in results.exhibit.printed
            if one.setup == setup and one.metric == "goodput"
        ]
        if printed:
            at, value = zip(*printed, strict=True)
            label = f"{setup}, printed"
            axes.plot(at, value, "x", color=colour, label=label, markersize=7)
    axes.set_ylabel("goodput")
    _legend(axes)
    return figure


def tail(results: Results) -> Figure:
    """How many first tokens took longer than a time; the axis shows the rare ones."""
    figure, (axes,) = _panels(1)
    (point,) = results.exhibit.points
    for setup in results.exhibit.setups:
        runs = results.of(point, setup)
        waits = [
            fmean(values)
            for values in zip(*(run["ttft_at_shares_s"] for run in runs), strict=True)
        ]
        longer = [1 - share for share in SHARES[:-1]]
        axes.plot(waits[:-1], longer, color=_colour(setup), label=setup)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of requests that waited longer")
    _legend(axes)
    return figure


def timeline(results: Results) -> Figure:
    """One seed's arrivals, and what became of them as time went by."""
    figure, (rate, goodput, ttft) = _panels(3)
    (point,) = results.exhibit.points
    for setup in results.exhibit.setups:
        line = results.of(point, setup)[_SHOWN_SEED]["timeline"]
        goodput.plot(line["at_s"], line["goodput"], color=_colour(setup), label=setup)
        ttft.plot(line["at_s"], line["ttft_p95_s"], color=_colour(setup))
    rate.plot(line["at_s"], line["rate"], color="black")
    rate.set_ylabel("req/s")
    goodput.set_ylabel("goodput")
    ttft.set_ylabel("TTFT P95, s")
    ttft.set_xlabel(f"s (seed {results.seeds[_SHOWN_SEED]}, windows of 5 s)")
    _legend(goodput)
    return figure


def _colour(setup: str) -> str:
    """The same for a setup in every plot."""
    return f"C{list(SETUPS).index(setup)}"


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(7.2, 1.8 * count + 1.6), layout="constrained")
    panels = figure.subplots(count, 1, sharex=count > 1, squeeze=False)
    return figure, list(panels[:, 0])


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


PLOTS: dict[str, Callable[[Results], Figure]] = {
    "by_point": by_point,
    "by_kind": by_kind,
    "tail": tail,
    "timeline": timeline,
}
