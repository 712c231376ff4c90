"""The router's setups side by side in a grid of regimes, simulated.

    python -m benchmarks.regimes [--quick]      (or: make regimes [QUICK=1])

2 prefill + 4 decode engines in virtual time (vLLM's own scheduler, the profile of the
study's A40). Every setup sees the same requests of each seed, and differences are taken
seed by seed against round-robin as a proxy does it today, the first token from decode.
Runs are kept in a file: one that is there is not made again, so that an interrupted
study goes on, and a finished one prints at once.

The figures are simulated, not hardware's. The pause between first and second token is
shown beside goodput, where TTFT got what it won from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks.markdown import markdown
from benchmarks.regimes import grid
from benchmarks.regimes.bars import Bar, bars
from benchmarks.regimes.plan import FULL, QUICK, Plan
from benchmarks.regimes.show import FIGURES, rich_table, rows
from benchmarks.runs import Runs, keeps_runs


def verdict(bar: Bar) -> str:
    return f"{'met   ' if bar.met else 'missed'} {bar.what}: {bar.figures}"


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A part of the grid: two seeds, 60 s each.")
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    type=int,
    metavar="N",
    help="11 to 14 without it; constants were chosen on 1 to 4. Several times.",
)
@click.option(
    "--only",
    metavar="WORD",
    multiple=True,
    help="Only cells with this in their name. Several times.",
)
@click.option(
    "--traces",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=f"Folder with recorded traces to replay: {', '.join(grid.TRACES)} (.csv.gz).",
)
@keeps_runs(".cache/regimes.jsonl")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
)
def main(
    quick: bool,
    seeds: tuple[int, ...],
    only: tuple[str, ...],
    folder: Path | None,
    workers: int,
    results: Path,
    form: str,
) -> None:
    cells = grid.cells(quick=quick, folder=folder)
    if only:
        cells = [cell for cell in cells if any(word in cell.name for word in only)]
    if not cells:
        raise click.ClickException(f"no cell has {' or '.join(only)} in its name")
    setups = grid.QUICK_SETUPS if quick else tuple(grid.SETUPS)
    span = QUICK if quick else FULL
    if seeds:
        span = span._replace(seeds=seeds)
    plan = Plan(cells, setups, span)
    runs = Runs(results)
    runs.make(plan.arguments(), workers)
    found = plan.outcomes(runs)
    reached = list(bars(cells, setups, found, plan.goodput_of_eight(runs)))
    if form == "json":
        told = {
            "seeds": span.seeds,
            "cells": {f"{c} / {s}": one._asdict() for (c, s), one in found.items()},
            "bars": [bar._asdict() for bar in reached],
        }
        click.echo(json.dumps(told))
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    for column in FIGURES:
        lines = rows(plan, found, column)
        if form == "markdown":
            click.echo(f"{column.title}:\n\n{markdown(next(lines), lines)}\n")
        else:
            console.print(rich_table(column.title, lines))
    for bar in reached:
        click.echo(verdict(bar))


if __name__ == "__main__":
    main()
