from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calibration.steps import timing, traffic
from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.calibration.fit import (
    CONSTANTS,
    as_arrays,
    fit_steps,
    nonnegative,
    predict,
    values_of,
)
from vllm_calrouter.messages import StepTiming

A40 = load("a40-qwen2.5-3b").costs


def off(fitted: EngineCosts, true: EngineCosts) -> dict[str, float]:
    """Relative error of each constant."""
    ratios = values_of(fitted) / values_of(true) - 1.0
    return dict(zip(CONSTANTS, ratios, strict=True))


def worst(fitted: EngineCosts, true: EngineCosts) -> float:
    return max(map(abs, off(fitted, true).values()))


@pytest.mark.parametrize("wrong", [1 / 7.4, 1.0, 7.4])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_constants_come_back_from_noise_and_outliers(
    wrong: float, outliers: float, seed: int
) -> None:
    steps = traffic(A40, 600, seed=seed, noise=0.01, outliers=outliers)
    assert worst(fit_steps(steps, A40.faster(wrong)).costs, A40) < 0.08
    many = traffic(A40, 3000, seed=seed, noise=0.01, outliers=outliers)
    assert worst(fit_steps(many, A40.faster(wrong)).costs, A40) < 0.05


def test_exact_steps_give_exact_constants() -> None:
    fit = fit_steps(traffic(A40, 200, noise=0.0), A40.faster(3))
    assert worst(fit.costs, A40) < 1e-3
    assert fit.median_error < 1e-5


@pytest.mark.parametrize("leader", ["prefill", "decode"])
def test_of_two_bases_the_larger_is_found_in_mixed_steps(leader: str) -> None:
    bases = {"prefill_base_s": 0.004, "decode_base_s": 0.02}
    if leader == "prefill":
        bases = {"prefill_base_s": 0.05, "decode_base_s": 0.01}
    true = A40.changed(**bases)
    fit = fit_steps(traffic(true, 1500, noise=0.005), A40)
    assert worst(fit.costs, true) < 0.05


def test_predictions_are_those_of_the_profile() -> None:
    steps = traffic(A40, 60, noise=0.0)
    work, seconds = as_arrays(steps)
    assert predict(work, values_of(A40)) == pytest.approx(seconds)


def test_standard_errors_are_honest() -> None:
    """Two standard errors hold the truth in about 95 of 100 samples."""
    within = np.zeros(len(CONSTANTS))
    samples = 120
    for seed in range(samples):
        fit = fit_steps(traffic(A40, 240, seed=seed, outliers=0.03), A40.faster(2))
        errors = np.array(list(fit.standard_errors.values()))
        # What was clipped to 0 was not meant to be covered by chance.
        within += np.abs(values_of(fit.costs) - values_of(A40)) <= 2 * errors
    assert within.min() >= 0.87 * samples
    assert within.mean() <= 0.99 * samples


def test_what_was_not_seen_keeps_its_proportion_and_is_said_to_be_uncertain() -> None:
    fit = fit_steps(traffic(A40, 300, kinds="d", noise=0.01), A40.faster(7.4))
    assert off(fit.costs, A40)["prefill_per_token_s"] == pytest.approx(0, abs=0.1)
    errors = fit.standard_errors
    assert errors["decode_base_s"] < 0.02 * A40.decode_base_s
    assert errors["prefill_per_token_s"] > A40.prefill_per_token_s


def test_one_length_does_not_tell_base_from_slope() -> None:
    steps = [timing(A40, (0, 500), factor=f) for f in (0.99, 1.0, 1.01) * 30]
    errors = fit_steps(steps, A40).standard_errors
    assert errors["prefill_base_s"] > 0.3 * A40.prefill_base_s


def test_outliers_are_counted() -> None:
    steps = traffic(A40, 300, noise=0.01)
    steps += traffic(A40.faster(0.1), 20, noise=0.01)
    assert 18 <= fit_steps(steps, A40).outliers <= 30


@pytest.mark.parametrize("steps", [[], [StepTiming(5, 0, 0, 0.0, 25)]])
def test_nothing_timed_is_nothing_to_fit(steps: list[StepTiming]) -> None:
    with pytest.raises(ValueError, match="no step"):
        fit_steps(steps, A40)


rates = st.integers(0, 5000)
any_steps = st.lists(
    st.builds(
        StepTiming, rates, rates, rates, st.floats(0, 1e3), st.integers(0, 10**9)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(any_steps)
def test_whatever_engines_tell_ends_in_constants_that_can_be(
    steps: list[StepTiming],
) -> None:
    steps.append(timing(A40, (0, 100)))
    fit = fit_steps(steps, A40)
    assert np.isfinite(fit.covariance).all()
    assert values_of(fit.costs).min() >= 0


@given(
    st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_the_constrained_solution_is_the_nearest(point: list[float], seed: int) -> None:
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(6, 6))
    metric = root @ root.T + 0.1 * np.eye(6)
    estimate = np.array(point)
    found = nonnegative(metric, estimate)
    assert found.min() >= 0
    least = (found - estimate) @ metric @ (found - estimate)
    for _ in range(50):
        other = np.maximum(found + draw.normal(scale=0.2, size=6), 0)
        assert (other - estimate) @ metric @ (other - estimate) >= least - 1e-9
