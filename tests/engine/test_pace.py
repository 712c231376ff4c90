from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.calibration import load
from vllm_calrouter.engine.pace import Pace

COSTS = load("a40-qwen2.5-3b").costs


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 30.0])
def test_prices_become_what_steps_take(factor: float) -> None:
    pace = Pace(COSTS)
    for _ in range(400):
        pace.note(pace.costs.prefill_s(500), factor * COSTS.prefill_s(500))
    for tokens in (10, 1000):
        expected_s = factor * COSTS.prefill_s(tokens)
        assert pace.costs.prefill_s(tokens) == pytest.approx(expected_s, rel=0.01)
    # Memory and link are what they are.
    assert pace.costs.transfer_s(100) == COSTS.transfer_s(100)
    assert pace.costs.kv_capacity_tokens == COSTS.kv_capacity_tokens


def test_one_step_that_was_held_up_tells_little() -> None:
    pace = Pace(COSTS)
    pace.note(0.1, 60.0)
    assert pace.costs.prefill_s(500) < 1.03 * COSTS.prefill_s(500)


@given(st.lists(st.tuples(st.floats(), st.floats())))
def test_whatever_clocks_say_prices_are_finite(
    steps: list[tuple[float, float]],
) -> None:
    pace = Pace(COSTS)
    for predicted_s, took_s in steps:
        pace.note(predicted_s, took_s)
        assert 0 < pace.costs.prefill_s(500) < math.inf
