"""The C++ core through its Python face."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.price import A40_QWEN_3B
from vllm_calrouter import _core
from vllm_calrouter._core import Phase, Table, make_policy

phases = st.sampled_from([Phase.PREFILL, Phase.DECODE])


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), phases, st.integers(0, 9), st.booleans())),
    st.randoms(use_true_random=False),
)
def test_load_is_zero_exactly_when_all_is_released(
    engines: int, actions: list[tuple[int, Phase, int, bool]], draw: object
) -> None:
    table = Table(engines)
    open_bookings: list[int] = []
    for rank, phase, tokens, release in actions:
        open_bookings.append(table.book(rank % engines, phase, tokens, tokens + 1))
        if release:
            number = open_bookings.pop(draw.randrange(len(open_bookings)))  # type: ignore[attr-defined]
            assert table.release(number)
            assert not table.release(number)
        assert table.open_bookings() == len(open_bookings)
        assert table.is_idle() == (not open_bookings)
    for number in open_bookings:
        assert table.release(number)
    assert table.is_idle()
    assert [table.in_flight(rank) for rank in range(engines)] == [0] * engines


@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 60))
def test_round_robin_is_exactly_even(engines: int, start: int, turns: int) -> None:
    table = Table(engines)
    policy = make_policy("round_robin", 0, engines, start=start)
    picks = Counter(policy.pick(table, 1, 1) for _ in range(turns * engines))
    assert set(picks.values()) == {turns}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 9))
def test_least_loaded_picks_exactly_the_fewest(loads: list[int], turn: int) -> None:
    table = Table(len(loads))
    for rank, load in enumerate(loads):
        for _ in range(load):
            table.book(rank, Phase.DECODE, 1, 1)
    policy = make_policy("least_loaded", 0, len(loads), start=turn)
    assert loads[policy.pick(table, 1, 1)] == min(loads)
    assert dict(policy.scores()) == dict(enumerate(map(float, loads)))


def test_least_loaded_shares_equal_engines_equally() -> None:
    table = Table(4)
    policy = make_policy("least_loaded", 0, 4)
    picks = Counter(policy.pick(table, 1, 1) for _ in range(400))
    assert set(picks.values()) == {100}


def test_power_of_two_of_two_never_takes_the_fuller() -> None:
    table = Table(2)
    table.book(0, Phase.DECODE, 1, 1)
    policy = make_policy("power_of_two", 0, 2)
    assert {policy.pick(table, 1, 1) for _ in range(50)} == {1}


def test_power_of_two_draws_evenly_among_equals() -> None:
    table = Table(4)
    policy = make_policy("power_of_two", 0, 4, seed=3)
    picks = Counter(policy.pick(table, 1, 1) for _ in range(4000))
    assert all(800 < picks[rank] < 1200 for rank in range(4))


@pytest.mark.parametrize(
    ("share", "long_set"), [(0.1, {3}), (0.5, {2, 3}), (1, {1, 2, 3})]
)
def test_length_threshold_keeps_long_and_short_apart(
    share: float, long_set: set[int]
) -> None:
    table = Table(4)
    policy = make_policy(
        "length_threshold", 0, 4, threshold_tokens=100, long_share=share
    )
    assert {policy.pick(table, 1, 101) for _ in range(12)} == long_set
    assert {policy.pick(table, 1, 100) for _ in range(12)} == {0, 1, 2, 3} - long_set


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_vllm_rule_equals_its_definition(
    engines: list[tuple[int, int, int, float]], routers: int
) -> None:
    table = Table(len(engines))
    costs = []
    for rank, (legs, waiting, running, kv_usage) in enumerate(engines):
        for _ in range(legs):
            table.book(rank, Phase.DECODE, 1, 1)
        table.report(rank, waiting, running, kv_usage)
        cost = float(max(routers * legs, waiting + running))
        costs.append(cost + waiting * 6.0 * max(0.0, kv_usage - 0.5))
    policy = make_policy("vllm", 0, len(engines), routers=routers)
    assert policy.pick(table, 1, 1) == costs.index(min(costs))


def test_a_pool_is_all_a_policy_sees() -> None:
    table = Table(6)
    for rank in range(6):
        table.set_costs(rank, A40_QWEN_3B)
    for name in _core.POLICIES:
        policy = make_policy(name, 2, 5)
        picks = {policy.pick(table, 10, 10_000 * (i % 2)) for i in range(60)}
        assert picks == {2, 3, 4}, name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("best", 0, 2), "unknown policy 'best'"),
        (("round_robin", 2, 2), "at least one engine"),
    ],
)
def test_what_cannot_be_made_is_refused(
    arguments: tuple[str, int, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy(*arguments)


def test_ranks_out_of_range_are_refused() -> None:
    table = Table(2)
    with pytest.raises(IndexError, match="rank 2 of 2 engines"):
        table.book(2, Phase.DECODE, 1, 1)
    with pytest.raises(IndexError):
        make_policy("round_robin", 0, 3).pick(table, 1, 1)
    with pytest.raises(ValueError, match="at least one engine"):
        Table(0)
