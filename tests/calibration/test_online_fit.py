from __future__ import annotations

import math
import random
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.calibration.steps import traffic
from tests.calibration.test_fit import any_steps, off, worst
from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.calibration.fit import CONSTANTS, as_arrays, predict, values_of
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


def absurd(seed: int, count: int, kinds: str, how: str) -> list[StepTiming]:
    """Steps of 42 to 303 s, or all too slow or too fast by one factor."""
    draw = random.Random(seed)
    factor = {"slow": 3000.0, "odd": 20.0, "fast": 0.01}
    return [
        msgspec.structs.replace(
            step,
            seconds=step.seconds * factor[how]
            if how in factor
            else draw.uniform(42, 303),
        )
        for step in traffic(A40, count, seed=seed, kinds=kinds)
    ]


def off_by(fit: OnlineFit, kinds: str) -> float:
    """The largest relative error of predictions of ordinary steps."""
    steps = traffic(A40, 60, seed=9, kinds=kinds, noise=0.0)
    work, seconds = as_arrays(steps)
    return float(np.abs(predict(work, values_of(fit.costs)) / seconds - 1).max())


@pytest.mark.parametrize("how", ["seconds", "slow", "odd", "fast"])
@pytest.mark.parametrize("count", [8, 12, 24])
@pytest.mark.parametrize("heard", [10, 300])
@pytest.mark.parametrize("kinds", ["d", "dddp"])
def test_a_burst_of_absurd_steps_is_survived(
    how: str, count: int, heard: int, kinds: str
) -> None:
    fit = fed(
        A40.faster(7.4),
        traffic(A40, heard, kinds=kinds, noise=0.005),
        absurd(count + heard, count, kinds, how),
        traffic(A40, 80, seed=1, kinds=kinds, noise=0.005),
    )
    assert fit.settled
    assert off_by(fit, kinds) < 0.05
    assert off(fit.costs, A40)["decode_base_s"] == pytest.approx(0, abs=0.02)


def test_steps_that_do_not_agree_are_no_other_engine() -> None:
    fit = fed(A40, traffic(A40, 300, noise=0.01))
    before = fit.costs
    for step in absurd(1, 40, "pdm", "seconds"):
        fit.observe(step)
        assert fit.costs == before


def test_an_engine_that_is_again_what_it_was_is_known_at_once() -> None:
    fit = fed(A40.faster(7.4), traffic(A40, 400, noise=0.005))
    before = fit.costs
    for step in absurd(2, 16, "d", "odd"):
        fit.observe(step)
    assert fit.costs.decode_base_s > 10 * A40.decode_base_s
    for step in traffic(A40, 12, seed=3, kinds="d", noise=0.005):
        fit.observe(step)
    assert fit.settled
    assert fit.costs.prefill_per_token_s == pytest.approx(
        before.prefill_per_token_s, rel=0.01
    )
    assert fit.standard_errors["prefill_per_token_s"] < 0.02 * A40.prefill_per_token_s
    assert worst(fit.costs, A40) < 0.05


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
