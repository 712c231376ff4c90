from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ordering.jobs import COSTS, job, serve, taken, work_s
from vllm_calrouter.ordering import Deadline, Job
from vllm_calrouter.ordering.deadline import (
    CROWD,
    CROWD_SPARE,
    SPARE_SHARE,
    STEP_TOKENS,
)


def deadline(*jobs: Job, patience: float | None = None) -> Deadline:
    order = Deadline(patience)
    for one in jobs:
        order.add(one)
    return order


def test_the_earliest_deadline_goes_first() -> None:
    later, sooner = job(due_s=2.0), job(due_s=1.0)
    assert taken(deadline(later, sooner)) == [sooner, later]


def test_who_can_no_longer_be_in_time_gives_way_to_who_can() -> None:
    late, feasible = job(1000, due_s=0.05), job(100, due_s=0.2)
    assert late.latest_start_s < 0 < feasible.latest_start_s
    assert taken(deadline(late, feasible))[0] is feasible


def test_a_request_becomes_late_while_it_waits() -> None:
    one = job(500, due_s=1.0)
    other = job(500, due_s=1.5)
    order = deadline(one, other)
    assert taken(order, one.latest_start_s - 0.01, seqs_left=1) == [one]
    order.add(one)
    assert taken(order, one.latest_start_s + 0.01, seqs_left=1) == [other]


def test_late_ones_go_the_cheapest_first_when_nobody_else_waits() -> None:
    long, short = job(900, due_s=-1.0), job(100, due_s=-1.0)
    assert taken(deadline(long, short)) == [short, long]


def test_a_late_one_goes_along_while_all_others_have_time_to_spare() -> None:
    late = job(300, due_s=-1.0)
    enough_s = late.cost_s / SPARE_SHARE
    for spare_s, goes in ((1.1 * enough_s, True), (0.9 * enough_s, False)):
        other = job(100)
        other.deadline_s = other.urgency_s = other.cost_s + spare_s
        assert (late in taken(deadline(late, other))) is goes


def test_no_neighbour_makes_a_step_longer_than_a_deadline_in_it() -> None:
    own_s = COSTS.prefill_s(300)
    tight, loose = job(300, due_s=own_s + 0.01), job(600, due_s=5.0)
    assert taken(deadline(tight, loose)) == [tight]
    small = job(50, due_s=5.0)
    assert taken(deadline(tight, small)) == [tight, small]


def test_a_step_is_cut_at_its_tokens_but_the_first_always_goes() -> None:
    fits, does_not = job(STEP_TOKENS - 10, due_s=8.0), job(20, due_s=9.0)
    assert taken(deadline(fits, does_not)) == [fits]
    huge = job(STEP_TOKENS + 1, due_s=7.0)
    assert taken(deadline(fits, huge)) == [huge]


def test_limits_of_vllm_hold() -> None:
    jobs = [job(10, due_s=9.0) for _ in range(5)]
    assert taken(deadline(*jobs), seqs_left=3) == jobs[:3]
    assert taken(deadline(*jobs), tokens_left=25) == jobs[:3]
    assert taken(deadline(*jobs), tokens_left=0) == []


def test_whose_patience_has_ended_goes_next() -> None:
    late = job(500, due_s=-1.0)
    order = deadline(late, patience=5.0)
    overtaking = []
    while True:
        order.add(fresh := job(200, due_s=0.1))
        (goes, *_) = taken(order, seqs_left=1)
        serve(order, [goes])
        if goes is late:
            break
        assert goes is fresh
        overtaking.append(goes)
    most_s = 5.0 * late.cost_s
    assert most_s < work_s(overtaking) <= most_s + overtaking[-1].cost_s + 1e-9


def test_a_long_prompt_is_patient_for_longer_than_a_short_one() -> None:
    overtaken_s = {}
    for tokens in (100, 2000):
        late = job(tokens, due_s=-1.0)
        order = deadline(late, patience=2.0)
        overtaken_s[tokens] = 0.0
        while late in order.jobs():
            order.add(job(150, due_s=1e6))
            (goes,) = taken(order, seqs_left=1)
            serve(order, [goes])
            overtaken_s[tokens] += goes.cost_s if goes is not late else 0.0
    assert overtaken_s[2000] > 3 * overtaken_s[100]


def test_in_a_crowd_nobody_goes_alone_because_of_little_to_spare() -> None:
    alone_s = COSTS.prefill_s(200)
    spare_s = 0.5 * CROWD_SPARE * COSTS.prefill_base_s
    for others in (CROWD - 1, CROWD):
        tight = job(200, due_s=alone_s + spare_s)
        crowd = [job(200, due_s=1.0) for _ in range(others)]
        first = taken(deadline(tight, *crowd))
        if others < CROWD:
            assert first == [tight]
        else:
            assert first[:others] == crowd


def test_no_step_is_cut_where_nobody_has_a_deadline() -> None:
    jobs = [job(1500) for _ in range(4)]
    assert taken(deadline(*jobs), tokens_left=8192) == jobs


def test_without_a_bound_a_late_one_may_wait_for_ever() -> None:
    late = job(500, due_s=-1.0)
    order = deadline(late)
    for _ in range(1000):
        order.add(job(200, due_s=0.1))
        (goes,) = taken(order, seqs_left=1)
        assert goes is not late
        serve(order, [goes])


@pytest.mark.parametrize("patience", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_waits_much_longer_than_in_the_order_of_arrival(
    seed: int, patience: float
) -> None:
    """Arrivals made to starve: overload, and each late one meets fresh tight ones."""
    rng = random.Random(seed)
    order = Deadline(patience)
    now_s, next_s = 0.0, 0.0
    behind: dict[int, float] = {}
    longest_step_s = COSTS.prefill_s(4000)
    waiting = 0
    for _ in range(1200):
        while next_s <= now_s:
            tokens = rng.choice((30, 200, 900, 4000))
            tight_s = COSTS.prefill_s(tokens) * rng.choice((0.5, 1.2, 3.0))
            fresh = job(tokens, arrived_s=next_s, due_s=next_s + tight_s)
            order.add(fresh)
            waiting += 1
            ahead_s = math.fsum(o.cost_s for o in order.jobs() if o is not fresh)
            behind[fresh.number] = ahead_s
            # 1.5 times what the engine can do, until a backlog has built up.
            next_s += fresh.cost_s / (1.5 if waiting < 60 else 0.7)
        jobs = taken(order, now_s, tokens_left=8192)
        if not jobs:
            now_s = next_s
            continue
        for one in jobs:
            # The work that went first: what was there, and at most so much more.
            waited_s = now_s - one.arrived_s
            # The step under way when it came, and the one that exceeded the bound.
            slack_s = 2 * longest_step_s
            overtaken_s = patience * (one.cost_s + longest_step_s)
            assert waited_s <= behind[one.number] + overtaken_s + slack_s
        serve(order, jobs)
        waiting -= len(jobs)
        tokens = sum(one.tokens for one in jobs)
        now_s += COSTS.step_s(tokens, sum(one.squares for one in jobs), 0, 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.one_of(st.none(), st.floats(-1, 3))),
        min_size=1,
        max_size=40,
    ),
    st.one_of(st.none(), st.floats(0, 10)),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_everybody_is_served_once(
    arrivals: list[tuple[int, float | None]],
    patience: float | None,
    seqs: int,
    rng: random.Random,
) -> None:
    jobs = [job(tokens, due_s=due_s) for tokens, due_s in arrivals]
    order = deadline(*jobs, patience=patience)
    served: list[Job] = []
    now_s = 0.0
    while order.jobs():
        chosen = taken(order, now_s, seqs_left=seqs)
        assert chosen
        # vLLM may leave the last ones where they are: no KV blocks, say.
        run = chosen[: rng.randint(1, len(chosen))]
        for one in chosen[len(run) :]:
            order.add(one)
        serve(order, run)
        served += run
        now_s += 0.05
    assert sorted(one.number for one in served) == [one.number for one in jobs]


def test_who_left_costs_no_memory() -> None:
    order = Deadline(None)
    order.add(stays := job(8000, due_s=-1.0))
    for _ in range(5000):
        order.add(goes := job(10, due_s=1e6))
        order.remove(goes)
        order.left(goes)
    heaps = (
        order._by_deadline,
        order._by_latest_start,
        order._late_by_cost,
        order._by_end_of_patience,
    )
    assert sum(len(heap._entries) for heap in heaps) < 500
    assert order.jobs() == [stays]
