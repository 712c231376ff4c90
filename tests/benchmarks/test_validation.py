"""What the validation of the simulator makes of runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import validation
from benchmarks.regimes.grid import DEFAULT, ROUND_ROBIN
from benchmarks.validation import (
    CELLS,
    SETUPS,
    Both,
    Case,
    cases,
    disturbed,
    rows,
    verdict,
)
from vllm_calrouter.calibration import load
from vllm_calrouter.launch import check_effect
from vllm_calrouter.options import parse


def run(goodput: float, p99_s: float = 0.5, **more: Any) -> dict[str, Any]:
    times = {"p50": p99_s / 4, "p99": p99_s}
    figures = {"goodput": goodput, "ttft_s": times, "tpot_s": times}
    return {**figures, "late": 0, "sent_late_p99_s": 0.0, **more}


DOCS = next(cell for cell in CELLS if cell.workload == "docs")


def found(changed: dict[str, Both] | None = None) -> dict[Case, Both]:
    """All cases the same on both sides, but for some setups' on docs."""
    same = {case: Both(run(0.8), run(0.8)) for case in cases()}
    return same | {Case(DOCS, setup): both for setup, both in (changed or {}).items()}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_server_is_told_its_setup_and_costs_on_its_own_clock(
    setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_FOLDER", tmp_path)
    monkeypatch.setattr(validation, "make_tiny_model", lambda path: path)
    monkeypatch.setattr(validation, "Cluster", lambda model, **more: more["arguments"])
    words: Any = validation.a_cluster(setup, 2, 4, 8.0)
    told = dict(pairwise(words))
    config = {
        key.removeprefix("--router-config."): yaml.safe_load(value)
        for key, value in told.items()
        if key.startswith("--router-config.")
    }
    config |= {"policy": told["--router-policy"], "prefill": 2}
    check_effect(config, parse(config))
    assert ("--router-config.first_token" in told) == (setup == ROUND_ROBIN)
    if setup != DEFAULT:
        assert told["--router-config.order"] == "fcfs"
        assert "profile" not in config
        return
    assert "--router-config.order" not in told
    slow = load(told["--router-config.profile"]).costs
    quick = load(validation.PROFILE).costs
    assert slow.decode_base_s == pytest.approx(8 * quick.decode_base_s)


def test_equal_figures_pass() -> None:
    result = verdict(found())
    assert result["passes"]
    assert result["mean_abs_goodput_residual"] == 0
    assert result["ttft_p99_ratio_least"] == result["ttft_p99_ratio_most"] == 1


@pytest.mark.parametrize(
    "both",
    [
        Both(run(0.8), run(0.4)),
        Both(run(0.8), run(0.8, p99_s=0.39)),
        Both(run(0.8), run(0.8, p99_s=0.63)),
        # Better than the others by more than 0.02, and the simulator says worse.
        Both(run(0.83), run(0.79)),
        Both(run(0.8, late=1), run(0.8)),
        Both(run(0.8, sent_late_p99_s=0.1), run(0.8)),
    ],
)
def test_each_of_the_checks_can_fail(both: Both) -> None:
    assert not verdict(found({DEFAULT: both}))["passes"]


def test_a_best_setup_by_a_hair_may_be_another() -> None:
    hair = Both(run(0.815), run(0.79))
    assert verdict(found({DEFAULT: hair}))["passes"]


def test_differences_of_opposite_sign_do_not_cancel() -> None:
    up, down = Both(run(0.7), run(0.9)), Both(run(0.7), run(0.5))
    result = verdict(found({DEFAULT: up, ROUND_ROBIN: down}))
    assert result["mean_abs_goodput_residual"] == pytest.approx(0.4 / len(cases()))
    assert not result["passes"]


def test_a_run_is_disturbed_when_its_engines_or_its_client_were_late() -> None:
    assert not disturbed(run(0.8))
    assert disturbed(run(0.8, late=1))
    assert disturbed(run(0.8, sent_late_p99_s=0.01))


def test_a_row_shows_both_and_their_difference() -> None:
    (cells,) = rows({Case(DOCS, DEFAULT): Both(run(0.8), run(0.75, 0.6))})
    assert cells[:3] == [DOCS.name, DEFAULT, "0.800 / 0.750 (-0.050)"]
    assert cells[4] == "500 / 600 (1.20)"
