"""The study of regimes: its store and its arithmetic, without a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regimes
from benchmarks.regimes import SETUPS, Run, cells, make, stored, tables

FIRST, SECOND = list(SETUPS)[:2]


def result(goodput: float) -> dict[str, Any]:
    return {"goodput": goodput, "ttft_s": {"p99": 1.0}, "pause_s": {"p99": 0.1}}


def test_a_run_made_before_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Run] = []

    def simulate(run: Run) -> Any:
        made.append(run)
        return result(0.5)

    monkeypatch.setattr(regimes, "simulate", simulate)
    store = tmp_path / "runs.jsonl"
    first, second = Run("mixed", FIRST, 1), Run("chat", SECOND, 2)
    make([first], store, 1)
    # As a kill leaves it.
    with store.open("a") as file:
        file.write('{"key": "half a li')
        file.write("\n")
    assert make([first, second], store, 1).keys() == {first, second}
    assert made == [first, second]


def test_a_run_of_other_code_is_made_again(tmp_path: Path) -> None:
    store = tmp_path / "runs.jsonl"
    run = Run("mixed", FIRST, 1)
    store.write_text(json.dumps({"key": run.key("other"), "run": result(0.1)}) + "\n")
    assert run.key(regimes.code_version()) not in stored(store)


def test_gains_are_paired_by_seed() -> None:
    by_seed = {1: (0.5, 0.6), 2: (0.9, 1.0)}
    results = {
        Run("mixed", setup, seed): result(by_seed[seed][setup != FIRST])
        for setup in SETUPS
        for seed in by_seed
    }
    found = cells(results, ["mixed"], list(by_seed))
    cell = found["mixed", SECOND]
    assert cell.goodput == pytest.approx(0.8)
    assert cell.gain == pytest.approx(0.1)
    assert cell.gain_error == pytest.approx(0.0, abs=1e-12)
    assert len(list(tables(found, ["mixed"]))) == 4


@pytest.mark.parametrize("setup", SETUPS)
def test_every_setup_is_one_that_the_command_takes(setup: str) -> None:
    from vllm_calrouter.options import parse

    policy, *config = SETUPS[setup]
    pairs = dict(pair.split("=") for pair in config)
    assert parse({"policy": policy, "prefill": 2, **pairs}).policy == policy
