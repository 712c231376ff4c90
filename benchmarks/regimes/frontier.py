"""What patience buys: goodput against the tail, simulated.

    python -m benchmarks.regimes.frontier [--quick] [--plot FILE.svg]

Runs the default under several `patience` in the workloads where prefill is contended,
and prints goodput and P99 of TTFT next to round-robin's. Runs are kept in a file and
shared with `python -m benchmarks.regimes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.markdown import markdown
from benchmarks.regimes import grid
from benchmarks.regimes.outcome import Outcome, outcome
from benchmarks.regimes.plan import FULL, QUICK, Span
from benchmarks.regimes.show import SUMMARY
from benchmarks.runs import Runs, keeps_runs

WORKLOADS = ("mixed", "mixed_long", "chat", "docs")
PATIENCE = ("0", "2", "6", "null")

#: By workload, then by patience.
Curves = dict[str, dict[str, Outcome]]


def words(patience: str) -> str:
    """The setup of one point; the default's own is the default's."""
    if patience == f"{grid.DEFAULT_PATIENCE:g}":
        return grid.SETUPS[grid.DEFAULT]
    if patience == "null":
        return grid.SETUPS[grid.UNBOUNDED]
    return f"{grid.SETUPS[grid.DEFAULT]} --router-config patience={patience}"


def curves(runs: Runs, span: Span, workers: int) -> Curves:
    """Every point, run where it was not."""
    cells = [cell for cell in grid.cells() if cell.name in WORKLOADS]
    setups = {p: words(p) for p in PATIENCE}
    base = grid.SETUPS[grid.ROUND_ROBIN]
    runs.make(
        (
            arguments
            for cell in cells
            for setup in (base, *setups.values())
            for arguments in span.arguments(cell, setup)
        ),
        workers,
    )

    def made(cell: grid.Cell, setup: str) -> Outcome:
        return outcome(
            *([runs[a] for a in span.arguments(cell, s)] for s in (setup, base))
        )

    return {
        cell.name: {p: made(cell, setup) for p, setup in setups.items()}
        for cell in cells
    }


def lines(found: Curves) -> Iterator[list[str]]:
    """The table: a line for each patience, a column for each workload."""
    yield ["`patience`", *found]
    for patience in PATIENCE:
        points = (curve[patience] for curve in found.values())
        yield [patience, *map(SUMMARY.show, points)]


def plot(found: Curves, path: Path) -> None:
    """The curves as an SVG that is the same for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "frontier"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    for name, curve in found.items():
        ratios = [curve[p].p99_ratio for p in PATIENCE]
        goodput = [curve[p].goodput for p in PATIENCE]
        axes.plot(ratios, goodput, marker="o", label=name)
        for patience, at in zip(
            PATIENCE, zip(ratios, goodput, strict=True), strict=True
        ):
            axes.annotate(patience, at, (4, -10), textcoords="offset points", size=8)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("P99 of TTFT, times round-robin's (simulated)")
    axes.set_ylabel("goodput")
    axes.set_title("patience, from 0 to unbounded")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two seeds, 60 s each.")
@click.option("--plot", "drawing", type=click.Path(path_type=Path), help="SVG file.")
@keeps_runs(".cache/regimes.jsonl")
def main(quick: bool, drawing: Path | None, workers: int, results: Path) -> None:
    found = curves(Runs(results), QUICK if quick else FULL, workers)
    click.echo(f"{SUMMARY.title}:\n")
    table = lines(found)
    click.echo(markdown(next(table), table) + "\n")
    if drawing is not None:
        plot(found, drawing)


if __name__ == "__main__":
    main()
