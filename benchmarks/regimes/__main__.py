"""The router's setups side by side in a grid of regimes, simulated.

    python -m benchmarks.regimes [--quick]      (or: make regimes [QUICK=1])

2 prefill + 4 decode engines in virtual time (vLLM's own scheduler, the profile of the
study's A40). Every setup sees the same requests of each seed, and differences are taken
seed by seed against round-robin as a proxy does it today, the first token from decode.
Runs are kept in a file: one that is there is not made again, so that an interrupted
study goes on, and a finished one prints at once. Uses both cores.

The figures are simulated, not hardware's. The pause between first and second token is
shown beside goodput, where TTFT got what it won from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from benchmarks.regimes import grid
from benchmarks.regimes.bars import Bar, bars
from benchmarks.regimes.outcome import Outcome, Outcomes, outcome
from benchmarks.runs import Runs


class Column(NamedTuple):
    """One figure of every setup: the title of its table, and how it is written."""

    title: str
    show: Callable[[Outcome], str]


FIGURES = (
    Column("Goodput", lambda o: f"{o.goodput:.3f}"),
    Column(
        f"Goodput less that of {grid.ROUND_ROBIN} (± standard error)",
        lambda o: f"{o.gain:+.3f} ± {o.gain_error:.3f}",
    ),
    Column("TTFT P99, s", lambda o: f"{o.ttft_p99_s:.2f}"),
    Column(
        f"TTFT P99, times that of {grid.ROUND_ROBIN}", lambda o: f"{o.p99_ratio:.2f}"
    ),
    Column("TTFT mean, s", lambda o: f"{o.ttft_mean_s:.3f}"),
    Column("TTFT, longest, s", lambda o: f"{o.worst_s:.1f}"),
    Column("Pause after the first token P99, s", lambda o: f"{o.pause_p99_s:.2f}"),
)


class Plan(NamedTuple):
    """Which runs there are."""

    cells: Sequence[grid.Cell]
    setups: Sequence[str]
    seeds: Sequence[int]
    duration_s: float

    def arguments(self) -> Iterator[str]:
        """Command lines, cell by cell, so that what is done so far is whole."""
        for cell in self.cells:
            for seed in self.seeds:
                for setup in self.setups:
                    yield grid.arguments(cell, setup, seed, self.duration_s)
        yield from map(self.eight, self.seeds)

    def eight(self, seed: int) -> str:
        """Round-robin with eight engines."""
        return grid.arguments(grid.EIGHT, grid.ROUND_ROBIN, seed, self.duration_s)

    def outcomes(self, runs: Runs) -> Outcomes:
        """Of all cells and setups; raises KeyError for what was not run."""
        return {
            (cell.name, setup): outcome(
                self._runs(runs, cell, setup), self._runs(runs, cell, grid.ROUND_ROBIN)
            )
            for cell in self.cells
            for setup in self.setups
        }

    def _runs(self, runs: Runs, cell: grid.Cell, setup: str) -> list[dict[str, object]]:
        duration_s = self.duration_s
        return [
            runs[grid.arguments(cell, setup, seed, duration_s)] for seed in self.seeds
        ]

    def goodput_of_eight(self, runs: Runs) -> float | None:
        """Mean over seeds; None where `mixed` is not among the cells."""
        if "mixed" not in {cell.name for cell in self.cells}:
            return None
        values = [runs[self.eight(seed)]["goodput"] for seed in self.seeds]
        return float(sum(values) / len(values))


def rows(plan: Plan, found: Outcomes, column: Column) -> Iterator[list[str]]:
    """The lines of one figure's table, the heading first."""
    yield ["", *plan.setups]
    for cell in plan.cells:
        outcomes = (found[cell.name, setup] for setup in plan.setups)
        yield [cell.name, *map(column.show, outcomes)]


def markdown(lines: Iterator[list[str]]) -> str:
    """A table for a page."""
    heading, *rest = (f"| {' | '.join(line)} |" for line in lines)
    rule = "|---" * (heading.count("|") - 1) + "|"
    return "\n".join([heading, rule, *rest, ""])


def rich_table(title: str, lines: Iterator[list[str]]) -> Table:
    """A table for a terminal."""
    first, *setups = next(lines)
    table = Table(title=f"{title} (simulated)")
    table.add_column(first)
    for setup in setups:
        table.add_column(setup, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


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
@click.option(
    "--workers", type=click.IntRange(1), default=os.cpu_count, help="A core each."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".cache/regimes.jsonl"),
    show_default=True,
    help="Where runs are kept.",
)
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
    seeds = seeds or ((11, 12) if quick else (11, 12, 13, 14))
    setups = grid.QUICK_SETUPS if quick else tuple(grid.SETUPS)
    plan = Plan(cells, setups, seeds, 60.0 if quick else 90.0)
    runs = Runs(results)
    runs.make(plan.arguments(), workers)
    found = plan.outcomes(runs)
    reached = list(bars(cells, setups, found, plan.goodput_of_eight(runs)))
    if form == "json":
        told = {
            "seeds": seeds,
            "cells": {f"{c} / {s}": one._asdict() for (c, s), one in found.items()},
            "bars": [bar._asdict() for bar in reached],
        }
        click.echo(json.dumps(told))
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    for column in FIGURES:
        lines = rows(plan, found, column)
        if form == "markdown":
            click.echo(f"{column.title}:\n\n{markdown(lines)}")
        else:
            console.print(rich_table(column.title, lines))
    for bar in reached:
        click.echo(verdict(bar))


if __name__ == "__main__":
    main()
