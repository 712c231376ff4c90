"""The plots of a group, as SVG that takes the page's colours and font."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from vllm_calrouter.report.groups import Group, Setup, per_second

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Legible on white and on near-black.
_COLOURS = ("#3a86d8", "#e07b2f", "#2a9d6f", "#b05fd0", "#c99a06", "#d9527e")

#: Stands for the colour of text until the page is there, which knows it.
_INK = "#010203"

#: A curve looks the same with more.
_MOST_POINTS = 400

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": _INK,
    "legend.frameon": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def available() -> bool:
    """Whether plots can be made here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def distribution(group: Group, of: str, title: str) -> str:
    """Share of requests, of all seeds, by one of their times."""
    from matplotlib.ticker import LogLocator

    def draw(axes: Axes) -> None:
        for setup, colour in _coloured(group.setups):
            times_s = setup.times_s(of)
            if not times_s:
                continue
            step = max(1, len(times_s) // _MOST_POINTS)
            shown = sorted({*range(0, len(times_s), step), len(times_s) - 1})
            axes.plot(
                [1e3 * times_s[index] for index in shown],
                [(index + 1) / len(times_s) for index in shown],
                color=colour,
                label=setup.name,
            )
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(f"{title}, ms")
        axes.set_ylabel("share of requests")
        _legend(axes, group)

    return _svg(draw, f"{group.scenario} {of}")


def timeline(group: Group) -> str:
    """Arrivals of the first seed, and what became of TTFT meanwhile."""
    first, *_ = group.setups
    seed = min(first.runs)

    def draw(axes: Axes) -> None:
        arrivals = per_second(first.requests[seed], "ttft_s")
        axes.bar(
            [second + 0.5 for second, _, _ in arrivals],
            [count for _, count, _ in arrivals],
            width=0.9,
            color=_INK,
            alpha=0.15,
        )
        axes.set_xlabel(f"arrival, s (seed {seed})")
        axes.set_ylabel("arrivals a second")
        over = axes.twinx()
        over.grid(visible=False)
        for setup, colour in _coloured(group.setups):
            points = [
                (second + 0.5, 1e3 * mean_s)
                for second, _, mean_s in per_second(
                    setup.requests.get(seed, ()), "ttft_s"
                )
                if mean_s is not None
            ]
            if points:
                over.plot(*zip(*points, strict=True), color=colour, label=setup.name)
        over.set_ylabel("mean TTFT of these, ms")
        over.set_ylim(bottom=0)
        _legend(over, group)

    return _svg(draw, f"{group.scenario} timeline", width=9.2)


def balance(group: Group, phase: str) -> str:
    """Which share of a phase's legs each engine got; nothing where there are none."""
    shares = {setup.name: setup.share_by_rank(phase) for setup in group.setups}
    ranks = sorted({rank for of in shares.values() for rank in of})
    if not ranks:
        return ""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(shares)
        for place, (setup, colour) in enumerate(_coloured(group.setups)):
            axes.bar(
                [index - 0.4 + (place + 0.5) * width for index in range(len(ranks))],
                [shares[setup.name].get(rank, 0.0) for rank in ranks],
                width=width,
                color=colour,
                label=setup.name,
            )
        axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axes.axhline(1 / len(ranks), color=_INK, alpha=0.4, linestyle=":")
        axes.set_xlabel(f"engine ({phase})")
        axes.set_ylabel("share of legs")
        _legend(axes, group)

    return _svg(draw, f"{group.scenario} balance {phase}")


def _legend(axes: Axes, group: Group) -> None:
    """Above the plot, where it hides nothing."""
    columns = min(3, len(group.setups))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def _coloured(setups: Sequence[Setup]) -> list[tuple[Setup, str]]:
    return list(zip(setups, cycle(_COLOURS), strict=False))


def _svg(draw: Callable[[Axes], None], salt: str, width: float = 4.5) -> str:
    """Markup to put into a page; `salt` keeps its ids apart from other plots'."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure: Figure = Figure(figsize=(width, 2.8), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        nobody: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nobody)
    markup = file.getvalue()
    return markup[markup.index("<svg") :].replace(_INK, "currentColor")
