"""An exhibit's runs as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.study.ceiling import ceiling
from benchmarks.study.exhibit import Claim, Results

#: Goodput within which two setups are called level, whatever the noise.
_LEVEL = 0.01

#: Student's t, two-sided 95 %, by the number of traces; of more than 8 the last.
_SURE = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}


def goodput(results: Results) -> str:
    """Mean goodput; what it is more than that of the setup's base, with its error."""

    def cell(point: str, setup: str) -> str:
        mean = f"{results.mean(point, setup, 'goodput'):.3f}"
        base = results.exhibit.base(setup)
        if setup == base:
            return mean
        return f"{mean} ({signed(*results.gain(point, setup, base))})"

    return _grid(results, "goodput", cell)


def tails(results: Results) -> str:
    """P99 of the time to the first token in seconds."""
    return _grid(
        results, "TTFT P99, s", lambda p, s: f"{results.mean(p, s, 'TTFT P99'):.2f}"
    )


def _grid(results: Results, what: str, cell: Callable[[str, str], str]) -> str:
    """Setups down; points across."""
    points = list(results.exhibit.points)
    rows = (
        [f"`{setup}`", *(cell(point, setup) for point in points)]
        for setup in results.exhibit.setups
    )
    head = ["", what] if len(points) == 1 else [what, *points]
    return markdown(head, rows, figures=True)


def engines_saved(results: Results) -> str:
    """Engines with which a setup has the goodput that the first has with 7 and 8.

    Between two shapes goodput is taken to grow in proportion to engines.
    """
    points = results.exhibit.points
    engines = [one["prefill"] + one["decode"] for one in points.values()]
    base, *others = results.exhibit.setups

    def levels(setup: str) -> list[float]:
        return [results.mean(point, setup, "goodput") for point in points]

    of_base = dict(zip(engines, levels(base), strict=True))
    rows = []
    for setup in others:
        row = [f"`{setup}`"]
        for count in (7, 8):
            needed = reached(engines, levels(setup), of_base[count])
            row.append(_needed(needed, count, engines[0]))
        rows.append(row)
    head = [
        f"engines for the goodput that `{base}` has",
        *(f"with {count} ({of_base[count]:.3f})" for count in (7, 8)),
    ]
    return markdown(head, rows, figures=True)


def ceilings(results: Results) -> str:
    """Goodput of requests that never meet another one: no policy has more."""
    points = list(results.exhibit.points)

    def cell(point: str, early: bool) -> str:
        options = results.options(point)
        return f"{fmean(ceiling(one, early=early) for one in options):.3f}"

    rows = [
        [f"first token from {engine}", *(cell(point, early) for point in points)]
        for engine, early in (("decode", False), ("prefill", True))
    ]
    head = ["in time if alone on the cluster", *points]
    return markdown(head, rows, figures=True)


def reached(
    engines: Sequence[int], levels: Sequence[float], level: float
) -> float | None:
    """The number of engines at which `levels`, one for each number in `engines`, first
    come to a level; None where they never do."""
    if levels[0] >= level:
        return float(engines[0])
    known = list(zip(engines, levels, strict=True))
    for (before, low), (after, high) in pairwise(known):
        if high >= level:
            return before + (after - before) * (level - low) / (high - low)
    return None


def _needed(engines: float | None, count: int, least: int) -> str:
    if engines is None:
        return f"more than {count}"
    at_most = "at most " if engines == least else ""
    saved = 1 - engines / count
    return (
        f"{at_most}{engines:.1f} ({abs(saved):.0%} {'fewer' if saved >= 0 else 'more'})"
    )


def printed(results: Results) -> str:
    """The study's figures beside ours."""
    rows = (
        [
            f"{one.point}: `{one.setup}`, {one.metric}",
            _shown(one.value, one.metric),
            _shown(results.mean(one.point, one.setup, one.metric), one.metric),
        ]
        for one in results.exhibit.printed
    )
    return markdown(["", "printed (hardware)", "simulated"], rows, figures=True)


def _shown(value: float, metric: str) -> str:
    return f"{value:.3f}" if "goodput" in metric else f"{value:.2f} s"


def claims(results: Results) -> str:
    """What the study says of setups against each other, and whether it is so here."""
    rows = []
    for claim in results.exhibit.claims:
        gain = results.gain(claim.point, claim.setup, claim.other, claim.other_point)
        said = "" if claim.printed is None else f"{claim.printed:+.3f}"
        agrees = verdict(claim, *gain, traces=len(results.seeds))
        rows.append([claim.says, said, signed(*gain), agrees])
    head = ["the study says", "printed", "simulated", ""]
    return markdown(head, rows, figures=True)


def verdict(claim: Claim, gain: float, error: float, *, traces: int) -> str:
    """Whether a simulated difference says what the study says."""
    if traces < min(_SURE):
        return "one trace"
    if abs(gain) <= _LEVEL:
        return "agrees" if claim.ties else "level"
    if abs(gain) <= _SURE.get(traces, _SURE[max(_SURE)]) * error:
        return "undecided"
    if claim.ties:
        return "does not"
    expected = 1.0 if claim.printed is None else claim.printed
    return "agrees" if gain * expected > 0 else "contrary"


def signed(gain: float, error: float) -> str:
    """A difference with its standard error."""
    return f"{gain:+.3f} ± {error:.3f}"


#: Tables that only some exhibits have.
MORE: dict[str, Callable[[Results], str]] = {
    "ceilings": ceilings,
    "engines_saved": engines_saved,
}
