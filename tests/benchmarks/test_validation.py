"""What the validation of the simulator makes of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import validation
from benchmarks.validation import POLICIES, Both, Case, cases, disturbed, rows, verdict
from vllm_calrouter.calibration import load


def run(goodput: float, p99_s: float = 0.5, **more: Any) -> dict[str, Any]:
    times = {"p50": p99_s / 4, "p99": p99_s}
    figures = {"goodput": goodput, "ttft_s": times, "tpot_s": times}
    return {**figures, "late": 0, "sent_late_p99_s": 0.0, **more}


def found(**changed: Both) -> dict[Case, Both]:
    """All cases the same on both sides, but for one policy's on docs."""
    same = {case: Both(run(0.8), run(0.8)) for case in cases()}
    return same | {Case("docs", policy): both for policy, both in changed.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_of_every_policy_order_by_costs_on_their_own_clock(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_FOLDER", tmp_path)
    monkeypatch.setattr(validation, "make_tiny_model", lambda path: path)
    monkeypatch.setattr(validation, "Cluster", lambda model, **more: more["arguments"])
    words: Any = validation.a_cluster(policy, 8.0)
    profile = load(words[words.index("--router-config.profile") + 1])
    slow, quick = profile.costs, load(validation.PROFILE).costs
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
    assert not verdict(found(calibrated=both))["passes"]


def test_a_best_policy_by_a_hair_may_be_another() -> None:
    hair = Both(run(0.815), run(0.79))
    assert verdict(found(calibrated=hair))["passes"]


def test_differences_of_opposite_sign_do_not_cancel() -> None:
    up, down = Both(run(0.8), run(0.95)), Both(run(0.8), run(0.65))
    result = verdict(found(calibrated=up, round_robin=down))
    assert result["mean_abs_goodput_residual"] == pytest.approx(0.3 / 9)
    assert not result["passes"]


def test_a_run_is_disturbed_when_its_engines_or_its_client_were_late() -> None:
    assert not disturbed(run(0.8))
    assert disturbed(run(0.8, late=1))
    assert disturbed(run(0.8, sent_late_p99_s=0.01))


def test_a_row_shows_both_and_their_difference() -> None:
    (cells,) = rows({Case("docs", "calibrated"): Both(run(0.8), run(0.75, 0.6))})
    assert cells[:3] == ["docs", "calibrated", "0.800 / 0.750 (-0.050)"]
    assert cells[4] == "500 / 600 (1.20)"
