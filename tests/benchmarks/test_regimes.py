"""The study of regimes, on made-up runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.regimes import __main__ as command
from benchmarks.regimes import frontier, grid
from benchmarks.regimes.bars import bars
from benchmarks.regimes.grid import (
    DEFAULT,
    LEAST_LOADED,
    OWN,
    ROUND_ROBIN,
    SHORT_FIRST,
    UNBOUNDED,
    Cell,
)
from benchmarks.regimes.outcome import Outcome, Outcomes, outcome
from benchmarks.regimes.plan import FULL, QUICK, Span
from vllm_calrouter.simulation.command import (
    Setup,
    believed_costs,
    promised,
    router_options,
    simulate,
)
from vllm_calrouter.workloads.options import Traffic, make_arrivals

CELLS = [Cell("mixed", ""), Cell("mixed, no targets", "", targets=False)]


def run(goodput: float, p99_s: float = 1.0) -> dict[str, Any]:
    spread = {"mean": 0.2, "p99": p99_s, "max": 2 * p99_s}
    return {"goodput": goodput, "ttft_s": spread, "pause_s": {"p99": None}}


def test_gains_are_paired_by_seed() -> None:
    made = outcome([run(0.6, 3.0), run(1.0, 3.0)], [run(0.5, 2.0), run(0.9, 2.0)])
    assert made.goodput == pytest.approx(0.8)
    assert made.gain == pytest.approx(0.1)
    assert made.gain_error == pytest.approx(0.0, abs=1e-12)
    assert made.p99_ratio == pytest.approx(1.5)
    assert made.worst_s == 6.0


def found(**changes: dict[str, float]) -> Outcomes:
    """Round-robin is bad, the default good; a change is `setup={field: value}`."""
    base = Outcome(0.80, 0.0, 0.0, 0.20, 1.0, 1.0, 2.0, 0.0)
    good = Outcome(0.95, 0.15, 0.01, 0.15, 0.9, 0.9, 2.5, 0.1)
    setups = {
        ROUND_ROBIN: base,
        OWN: base,
        LEAST_LOADED: base,
        SHORT_FIRST: base,
        DEFAULT: good,
        UNBOUNDED: good,
    }
    for setup, fields in changes.items():
        setups[setup] = setups[setup]._replace(**fields)
    return {(cell.name, s): one for cell in CELLS for s, one in setups.items()}


def missed(outcomes: Outcomes, eight: float = 0.9) -> list[str]:
    reached = bars(CELLS, grid.QUICK_SETUPS, outcomes, eight)
    return [bar.what for bar in reached if not bar.met]


def test_a_default_that_is_better_everywhere_meets_every_bar() -> None:
    assert missed(found()) == []


@pytest.mark.parametrize(
    ("changes", "eight", "what"),
    [
        ({SHORT_FIRST: {"goodput": 0.956}}, 0.9, "best setup's"),
        ({DEFAULT: {"goodput": 0.79}}, 0.9, "vLLM's own choice"),
        ({DEFAULT: {"gain": 0.11}}, 0.9, "at least .12"),
        ({DEFAULT: {"p99_ratio": 1.2}}, 0.9, "nine tenths"),
        ({DEFAULT: {"p99_ratio": 1.4}}, 0.9, "1.35 times"),
        ({SHORT_FIRST: {"p99_ratio": 1.01}}, 0.9, "P99 TTFT of short_first"),
        ({DEFAULT: {"ttft_mean_s": 0.19}}, 0.9, "a tenth better"),
        ({DEFAULT: {"ttft_mean_s": 0.21}}, 0.9, "no worse than least-loaded"),
        ({}, 0.96, "8 engines reached with 6"),
    ],
)
def test_a_bar_that_is_missed_is_told(
    changes: dict[str, dict[str, float]], eight: float, what: str
) -> None:
    assert any(what in told for told in missed(found(**changes), eight))


def parsed(arguments: str) -> tuple[str, Setup, Traffic]:
    """The policy of a command line, its cluster and its traffic."""
    written = simulate.make_context("simulate", shlex.split(arguments)).params
    (policy,) = written["policies"]
    setup = {name: written[name] for name in Setup.__struct_fields__}
    traffic = {name: written[name] for name in Traffic.__struct_fields__}
    return policy, Setup(**setup), Traffic(**traffic)


def test_every_cell_and_setup_is_one_that_the_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_calrouter.calibration import load

    monkeypatch.chdir(tmp_path)
    for name in grid.TRACES:
        rows = "".join(f"{second},100,10\n" for second in range(700))
        header = "arrival_s,input_tokens,output_tokens\n"
        (tmp_path / f"{name}.csv").write_text(header + rows)
    cells = grid.cells(folder=tmp_path)
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.name for cell in grid.cells(quick=True)} < {c.name for c in cells}
    span = Span((1,), 5.0)
    for cell in (*cells, grid.EIGHT):
        for words in grid.SETUPS.values():
            (arguments,) = span.arguments(cell, words)
            policy, setup, traffic = parsed(arguments)
            assert router_options(setup, policy, 1).policy == policy
        profile = promised(setup, load(setup.profile))
        assert make_arrivals(traffic, profile, 1, setup.max_model_len)
        believed_costs(setup)


def test_cells_of_any_kind_have_their_bars() -> None:
    for cells in (CELLS[:1], CELLS[1:]):
        assert list(bars(cells, grid.QUICK_SETUPS, found(), None))


def made_up(arguments: str) -> dict[str, Any]:
    return run(0.8 if "fcfs" in arguments else 0.97)


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_the_command_tells_every_cell_and_every_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Runs", lambda path: _Made())
    words = ["--quick", "--only", "starved", "--only", "chat", "--format", form]
    told = CliRunner().invoke(command.main, words)
    assert told.exit_code == 0, told.output
    assert "mixed, starved 1 + 2" in told.output
    assert "0.97" in told.output
    assert "nine tenths" in told.output
    nobody = CliRunner().invoke(command.main, ["--only", "nobody"])
    assert nobody.exit_code == 1
    assert "no cell has nobody" in nobody.output


class _Made:
    """A store in which every run is there."""

    def make(self, wanted: Any, workers: int) -> None: ...

    def __getitem__(self, arguments: str) -> dict[str, Any]:
        return made_up(arguments)


def test_the_frontier_is_drawn_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "Runs", lambda path: _Made())
    drawn = []
    for name in ("a.svg", "b.svg"):
        words = ["--quick", "--plot", str(tmp_path / name)]
        told = CliRunner().invoke(frontier.main, words)
        assert told.exit_code == 0, told.output
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert told.output.count("0.970 / 1.00 / 2.0") == 16


def test_the_quick_frontier_shares_its_runs_with_the_quick_grid() -> None:
    cell = next(cell for cell in grid.cells(quick=True) if cell.name == "chat")
    own = QUICK.arguments(cell, frontier.words(f"{grid.DEFAULT_PATIENCE:g}"))
    assert own == QUICK.arguments(cell, grid.SETUPS[DEFAULT])
    assert set(QUICK.seeds) < set(FULL.seeds)
