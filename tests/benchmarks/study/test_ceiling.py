"""What no policy can do better than."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.study.ceiling import ceiling
from vllm_calrouter.simulation.pool import simulated


def options(target_ms: float, workload: str = "docs") -> dict[str, Any]:
    slo = (f"tight={target_ms}/40", f"loose={target_ms}/40")
    return {"workload": workload, "rate": 5, "duration": 20, "seed": 1, "slo": slo}


def test_nobody_is_in_time_for_less_than_a_step_and_all_for_a_minute() -> None:
    for early in (False, True):
        assert ceiling(options(10), early=early) == 0
        assert ceiling(options(60_000), early=early) == 1


def test_a_token_from_prefill_saves_transfer_and_a_step() -> None:
    late, soon = (ceiling(options(175), early=early) for early in (False, True))
    assert 0 < late < soon < 1


def test_a_simulation_has_no_more() -> None:
    line = "--workload docs --rate 0.5 --duration 40 --seed 3 --prefill 2 --decode 2 "
    line += "--slo tight=175/40 --slo loose=175/40 --policy least_loaded"
    few = {**options(175), "rate": 0.5, "duration": 40, "seed": 3}
    for early, first_token in ((False, "off"), (True, "on")):
        run = simulated(f"{line} --router-config first_token={first_token}")
        assert run["goodput"] <= ceiling(few, early=early)
        assert run["goodput"] == pytest.approx(ceiling(few, early=early), abs=0.15)
