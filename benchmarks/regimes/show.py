"""Tables of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.table import Table

from benchmarks.regimes import grid
from benchmarks.regimes.outcome import Outcome, Outcomes
from benchmarks.regimes.plan import Plan


class Column(NamedTuple):
    """One figure of every setup: the title of its table, and how it is written."""

    title: str
    show: Callable[[Outcome], str]


#: What docs/policies.md shows.
SUMMARY = Column(
    "Goodput / P99 of TTFT, times round-robin's / longest TTFT, s",
    lambda o: f"{o.goodput:.3f} / {o.p99_ratio:.2f} / {o.worst_s:.1f}",
)
FIGURES = (
    SUMMARY,
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


def rows(plan: Plan, found: Outcomes, column: Column) -> Iterator[list[str]]:
    """The lines of one figure's table, the heading first."""
    yield ["", *plan.setups]
    for cell in plan.cells:
        outcomes = (found[cell.name, setup] for setup in plan.setups)
        yield [cell.name, *map(column.show, outcomes)]


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
