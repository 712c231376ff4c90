"""What became of a request, and of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.calibration import SloClass, load
from vllm_calrouter.simulation.results import (
    Served,
    mean_and_error,
    percentile,
    summary,
)
from vllm_calrouter.workloads import Arrival

COSTS = load("a40-qwen2.5-3b").costs


def served(*times_s: float, slo: str = "tight", asked: int | None = None) -> Served:
    """A request that arrived at 1 s and got a token at each of the times."""
    arrival = Arrival(1.0, 100, asked or len(times_s), slo)
    one = Served(0, arrival, SloClass(ttft_s=0.2, tpot_s=0.05), COSTS)
    for time_s in times_s:
        one.delivered(1, time_s)
    one.finish = "length"
    return one


def test_times_are_taken_from_arrival_first_and_last_token() -> None:
    one = served(1.1, 1.4, 1.5)
    assert one.ttft_s == pytest.approx(0.1)
    assert one.pause_s == pytest.approx(0.3)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.e2e_s == pytest.approx(0.5)


def test_a_message_without_tokens_is_no_first_token() -> None:
    one = served()
    one.delivered(0, 1.1)
    assert one.ttft_s is None
    one.delivered(1, 1.2)
    assert one.ttft_s == pytest.approx(0.2)


def test_two_tokens_at_once_leave_no_pause() -> None:
    one = served()
    one.delivered(2, 1.3)
    assert one.pause_s == 0


def test_one_token_has_neither_tpot_nor_pause() -> None:
    one = served(1.1)
    assert one.tpot_s is None
    assert one.pause_s is None
    assert one.good


def test_good_is_all_of_it_in_time() -> None:
    assert served(1.1, 1.14, 1.18).good
    assert not served(1.3, 1.34).good, "late first token"
    assert not served(1.1, 1.2, 1.3).good, "slow tokens"
    assert not served(1.1, 1.14, asked=3).good, "a token is missing"
    assert not served().good


def test_goodput_is_a_share_by_class_too() -> None:
    runs = [served(1.1), served(1.1, slo="loose"), served(1.9, slo="loose")]
    figures = summary(runs)
    assert figures["goodput"] == pytest.approx(2 / 3)
    assert figures["goodput_by_class"] == {"loose": 0.5, "tight": 1.0}
    assert figures["goodput_rps"] == pytest.approx(2.0)
    assert figures["ttft_s"]["max"] == pytest.approx(0.9)
    assert figures["tpot_s"]["p99"] is None
    assert figures["failed"] == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_lie_among_the_values(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert found is not None
    slack = 1e-9 * max(1.0, abs(ordered[0]), abs(ordered[-1]))
    assert ordered[0] - slack <= found <= ordered[-1] + slack


def test_percentiles_are_interpolated() -> None:
    assert percentile([0, 1, 2, 3], 0.5) == 1.5
    assert percentile([5.0], 0.99) == 5
    assert percentile([], 0.5) is None


def test_an_error_needs_two_values() -> None:
    assert mean_and_error([0.5]) == (0.5, 0.0)
    mean, error = mean_and_error([0.4, 0.6])
    assert (mean, error) == (pytest.approx(0.5), pytest.approx(0.1))
