from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.ordering.jobs import job, serve
from vllm_calrouter.ordering import Job, ShortFirst
from vllm_calrouter.ordering.short_first import WEIGHT


def order_of(*jobs: Job) -> list[Job]:
    order = ShortFirst()
    for one in jobs:
        order.add(one)
    served = []
    while (first := order.first()) is not None:
        served.append(first)
        serve(order, [first])
    return served


def test_of_two_that_come_together_the_shorter_goes_first() -> None:
    long, short = job(2000), job(100)
    assert order_of(long, short) == [short, long]


def test_equals_go_in_the_order_in_which_they_came() -> None:
    jobs = [job(100) for _ in range(5)]
    assert order_of(*jobs) == jobs


def test_a_long_one_gives_way_for_as_long_as_its_cost_says_and_no_longer() -> None:
    long, short = job(2000), job(100)
    head_start_s = WEIGHT * (long.cost_s - short.cost_s)
    just_in_time = job(100, arrived_s=0.99 * head_start_s)
    too_late = job(100, arrived_s=1.01 * head_start_s)
    assert order_of(long, just_in_time, too_late) == [just_in_time, long, too_late]


@given(
    st.lists(st.tuples(st.integers(1, 8000), st.floats(0, 10)), min_size=1, max_size=40)
)
def test_nobody_is_overtaken_by_who_comes_later_than_the_bound(
    arrivals: list[tuple[int, float]],
) -> None:
    jobs = [job(tokens, arrived_s=at_s) for tokens, at_s in arrivals]
    served = order_of(*jobs)
    assert {id(one) for one in served} == {id(one) for one in jobs}
    for place, one in enumerate(served):
        for ahead in served[:place]:
            assert ahead.arrived_s <= one.arrived_s + WEIGHT * one.cost_s


def test_who_leaves_is_not_served_and_who_returns_keeps_its_place() -> None:
    order = ShortFirst()
    first, second, third = jobs = [job(tokens) for tokens in (100, 200, 300)]
    for one in jobs:
        order.add(one)
    order.remove(second)
    order.remove(first)
    order.add(first)
    assert order.jobs() == [first, third]
    assert order.first() is first
