"""What the default has to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.regimes.grid import (
    DEFAULT,
    LEAST_LOADED,
    OWN,
    ROUND_ROBIN,
    SHORT_FIRST,
    Cell,
)
from benchmarks.regimes.outcome import Outcome, Outcomes

#: Where round-robin serves fewer in time, there is something to win: contended.
CONTENDED = 0.95


class Bar(NamedTuple):
    """One thing to reach."""

    what: str
    met: bool
    figures: str


def bars(
    cells: Sequence[Cell],
    setups: Sequence[str],
    found: Outcomes,
    eight: float | None,
) -> Iterator[Bar]:
    """Every bar that these cells can tell of.

    Args:
        cells, setups: what was run.
        found: what came of it.
        eight: goodput of round-robin with eight engines on `mixed`.
    """

    def of(cell: Cell, setup: str) -> Outcome:
        return found[cell.name, setup]

    contended = [c for c in cells if of(c, ROUND_ROBIN).goodput < CONTENDED]
    aimed = [cell for cell in cells if cell.targets]
    if aimed:
        yield _at_most(
            "goodput within .005 of the best setup's in every cell with targets",
            {
                cell.name: max(of(cell, setup).goodput for setup in setups)
                - of(cell, DEFAULT).goodput
                for cell in aimed
            },
            0.005,
        )
    for setup in (OWN, ROUND_ROBIN):
        yield _at_most(
            f"goodput no lower than with {setup} in every cell",
            {
                cell.name: of(cell, setup).goodput - of(cell, DEFAULT).goodput
                for cell in cells
            },
            0.0,
        )
    saturated = [cell for cell in contended if cell.targets]
    if saturated:
        gain = fmean(of(cell, DEFAULT).gain for cell in saturated)
        yield Bar(
            "mean gain over round-robin in contended cells with targets at least .12",
            gain >= 0.12,
            f"{gain:+.3f}",
        )
    if contended:
        yield from _tail({cell.name: of(cell, DEFAULT).p99_ratio for cell in contended})
    yield _at_most(
        f"P99 TTFT of {SHORT_FIRST} no worse than round-robin's in every cell",
        {cell.name: of(cell, SHORT_FIRST).p99_ratio for cell in cells},
        1.0,
    )
    plain = [cell for cell in cells if not cell.targets]
    if plain:
        yield from _mean_ttft(
            {
                cell.name: of(cell, DEFAULT).ttft_mean_s
                / of(cell, LEAST_LOADED).ttft_mean_s
                for cell in plain
            }
        )
    if eight is not None:
        six = found["mixed", DEFAULT].goodput
        yield Bar(
            "round-robin's goodput with 8 engines reached with 6 (mixed)",
            six >= eight,
            f"{six:.3f} against {eight:.3f}",
        )


def _at_most(what: str, values: dict[str, float], most: float) -> Bar:
    worst = max(values, key=lambda name: values[name])
    missed = sum(value > most for value in values.values())
    figures = f"worst {values[worst]:.3f} ({worst})"
    if missed:
        figures = f"missed in {missed} of {len(values)}, {figures}"
    return Bar(what, not missed, figures)


def _tail(ratios: dict[str, float]) -> Iterator[Bar]:
    within = sum(ratio <= 1 for ratio in ratios.values()) / len(ratios)
    yield Bar(
        "P99 TTFT no worse than round-robin's in nine tenths of contended cells",
        within >= 0.9,
        f"in {within:.0%} of {len(ratios)}",
    )
    yield _at_most("P99 TTFT at most 1.35 times round-robin's anywhere", ratios, 1.35)


def _mean_ttft(ratios: dict[str, float]) -> Iterator[Bar]:
    yield _at_most(
        "without targets: mean TTFT no worse than least-loaded's in any cell",
        ratios,
        1.0,
    )
    mean = fmean(ratios.values())
    yield Bar(
        "without targets: mean TTFT a tenth better than least-loaded's in the mean",
        mean <= 0.9,
        f"{mean:.3f} times",
    )
