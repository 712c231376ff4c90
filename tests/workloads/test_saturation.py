from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.workloads import WorkloadError
from vllm_calrouter.workloads.saturation import find_rate


@given(knee=st.floats(0.5, 100), first=st.floats(1, 20), aim=st.floats(0.1, 0.9))
def test_the_rate_is_found_from_either_side(
    knee: float, first: float, aim: float
) -> None:
    def goodput_at(rate: float) -> float:
        return 1 / (1 + (rate / knee) ** 4)

    found = find_rate(goodput_at, first, aim)
    true = knee * (1 / aim - 1) ** 0.25
    assert abs(math.log(found / true)) <= math.log(1.03)


def test_a_collapse_at_one_rate_is_found_too() -> None:
    found = find_rate(lambda rate: float(rate < 7), 1.0, 0.5)
    assert found == pytest.approx(7, rel=0.03)


@pytest.mark.parametrize(("goodput", "side"), [(1.0, "above"), (0.0, "below")])
def test_goodput_that_never_passes_the_aim_is_told(goodput: float, side: str) -> None:
    rates: list[float] = []

    def goodput_at(rate: float) -> float:
        rates.append(rate)
        return goodput

    with pytest.raises(WorkloadError, match=f"stays {side} 0.7"):
        find_rate(goodput_at, 4.0, 0.7)
    assert len(rates) < 15
