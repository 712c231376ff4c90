"""The study of regimes: its arithmetic, without a simulation."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.regimes import SETUPS, Run, cells, tables

FIRST, SECOND = list(SETUPS)[:2]


def result(goodput: float) -> dict[str, Any]:
    return {"goodput": goodput, "ttft_s": {"p99": 1.0}, "pause_s": {"p99": 0.1}}


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
