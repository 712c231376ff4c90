"""Which runs a study makes, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.regimes import grid
from benchmarks.regimes.outcome import Outcomes, outcome
from benchmarks.runs import Runs
from vllm_calrouter.simulation.pool import Figures


class Span(NamedTuple):
    """How long and how often each is run."""

    seeds: Sequence[int]
    duration_s: float

    def arguments(self, cell: grid.Cell, setup: str) -> list[str]:
        """Command lines of a setup in a cell, one a seed."""
        words = cell.arguments(setup)
        if "--trace" not in cell.words:
            words += f" --duration {self.duration_s:g}"
        return [f"{words} --seed {seed}" for seed in self.seeds]


# No constant was chosen on these seeds.
FULL = Span((11, 12, 13, 14), 90.0)
QUICK = Span((11, 12), 60.0)


class Plan(NamedTuple):
    """Setups by name in cells."""

    cells: Sequence[grid.Cell]
    setups: Sequence[str]
    span: Span

    def arguments(self) -> Iterator[str]:
        """Command lines, cell by cell, so that what is done so far is whole."""
        for cell in self.cells:
            for setup in self.setups:
                yield from self._arguments(cell, setup)
        if self._has_mixed():
            yield from self._arguments(grid.EIGHT, grid.ROUND_ROBIN)

    def outcomes(self, runs: Runs) -> Outcomes:
        """Of all cells and setups; raises KeyError for what was not run."""
        return {
            (cell.name, setup): outcome(
                self._runs(runs, cell, setup), self._runs(runs, cell, grid.ROUND_ROBIN)
            )
            for cell in self.cells
            for setup in self.setups
        }

    def goodput_of_eight(self, runs: Runs) -> float | None:
        """Round-robin's on eight engines; None where `mixed` is not among the cells."""
        if not self._has_mixed():
            return None
        eight = self._runs(runs, grid.EIGHT, grid.ROUND_ROBIN)
        return fmean(run["goodput"] for run in eight)

    def _has_mixed(self) -> bool:
        return "mixed" in {cell.name for cell in self.cells}

    def _runs(self, runs: Runs, cell: grid.Cell, setup: str) -> list[Figures]:
        return [runs[one] for one in self._arguments(cell, setup)]

    def _arguments(self, cell: grid.Cell, setup: str) -> list[str]:
        return self.span.arguments(cell, grid.SETUPS[setup])
