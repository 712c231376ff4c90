from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from tests.calibration.steps import traffic
from tests.calibration.test_fit import any_steps, off, worst
from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.calibration.fit import CONSTANTS, values_of
from vllm_calrouter.calibration.online import OnlineFit
from vllm_calrouter.messages import StepTiming

A40 = load("a40-qwen2.5-3b").costs


def fed(prior: EngineCosts, *parts: list[StepTiming]) -> OnlineFit:
    fit = OnlineFit(prior)
    for part in parts:
        for step in part:
            fit.observe(step)
    return fit


@pytest.mark.parametrize("wrong", [1 / 7.4, 1.0, 7.4])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_a_wrong_prior_is_put_right_within_a_few_hundred_steps(
    wrong: float, outliers: float
) -> None:
    steps = traffic(A40, 400, seed=3, noise=0.005, outliers=outliers)
    fit = fed(A40.faster(wrong), steps)
    assert fit.settled
    assert worst(fit.costs, A40) < 0.05


@pytest.mark.parametrize("kinds", ["p", "d", "pdm"])
def test_a_hundred_steps_are_enough_to_predict_steps(kinds: str) -> None:
    fit = fed(A40.faster(7.4), traffic(A40, 100, kinds=kinds))
    assert fit.settled
    for step in traffic(A40, 60, seed=9, kinds=kinds, noise=0.0):
        predicted_s = fit.costs.step_s(
            step.prefill_tokens,
            step.prefill_squares,
            step.decode_seqs,
            step.context_tokens,
        )
        assert predicted_s == pytest.approx(step.seconds, rel=0.06)


@pytest.mark.parametrize("first", [1, 3, 6])
def test_a_first_compilation_spoils_nothing(first: int) -> None:
    slow = traffic(A40.faster(1e-3), first, seed=7)
    fit = fed(A40, slow, traffic(A40, 300, seed=1, noise=0.005))
    assert worst(fit.costs, A40) < 0.06


@pytest.mark.parametrize("factor", [0.5, 1 / 1.5, 1.5, 3.0])
def test_an_engine_that_becomes_another_is_followed_within_100_steps(
    factor: float,
) -> None:
    other = A40.faster(factor)
    fit = fed(A40, traffic(A40, 800, noise=0.01), traffic(other, 100, noise=0.01))
    for name in ("prefill_per_token_s", "decode_base_s"):
        assert off(fit.costs, other)[name] == pytest.approx(0, abs=0.05)


def test_what_drifts_slowly_is_followed() -> None:
    fit = fed(A40, traffic(A40, 500, noise=0.01))
    for number in range(20):
        now = A40.faster(1 / (1 + 0.01 * number))
        for step in traffic(now, 300, seed=number, noise=0.01):
            fit.observe(step)
        for work in ((512, 512**2, 0, 0), (0, 0, 16, 8000), (512, 512**2, 16, 8000)):
            expected_s = pytest.approx(now.step_s(*work), rel=0.03)
            assert fit.costs.step_s(*work) == expected_s


def test_an_hour_of_decoding_does_not_forget_prefill() -> None:
    fit = fed(
        A40.faster(7.4),
        traffic(A40, 400, noise=0.01),
        traffic(A40, 6000, kinds="d", noise=0.01),
    )
    assert worst(fit.costs, A40) < 0.06
    assert fit.standard_errors["prefill_per_token_s"] < 0.02 * A40.prefill_per_token_s


def test_standard_errors_are_honest() -> None:
    within = np.zeros(len(CONSTANTS))
    samples = 60
    for seed in range(samples):
        fit = fed(A40.faster(2), traffic(A40, 300, seed=seed, outliers=0.02))
        errors = np.array(list(fit.standard_errors.values()))
        within += np.abs(values_of(fit.costs) - values_of(A40)) <= 2 * errors
    assert within.mean() >= 0.88 * samples
    assert within.min() >= 0.75 * samples


def test_before_anything_was_heard_the_prior_counts_and_is_not_trusted() -> None:
    fit = OnlineFit(A40)
    assert fit.costs == A40
    assert not fit.settled
    assert set(fit.standard_errors.values()) == {math.inf}


def test_memory_is_bounded() -> None:
    def size(fit: OnlineFit) -> int:
        kept = [*fit._prefill.steps, *fit._decode.steps]
        return len(kept) * sys.getsizeof(kept[0])

    few, many = fed(A40, traffic(A40, 300)), fed(A40, traffic(A40, 3000))
    assert size(many) == size(few)


@settings(max_examples=60, deadline=None)
@given(any_steps)
def test_whatever_engines_tell_the_constants_can_be(steps: list[StepTiming]) -> None:
    fit = fed(A40, steps, steps, steps)
    assert np.isfinite(values_of(fit.costs)).all()
    assert values_of(fit.costs).min() >= 0
