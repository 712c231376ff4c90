"""Placement for engines that serve by deadline: misses first, then the wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.placement.test_price import A40_FAR, a_table, figures, messages
from vllm_calrouter._core import Phase, Policy, Table, make_policy
from vllm_calrouter.ordering.deadline import STEP_TOKENS
from vllm_calrouter.ordering.short_first import WEIGHT

NOW_S = 100.0
_MISS_S = 1000.0
#: More than the step under way is taken to have.
_LIMIT_TOKENS = 4 * STEP_TOKENS


def cost_s(tokens: int) -> float:
    return (
        A40_FAR.prefill_base_s
        + A40_FAR.prefill_per_token_s * tokens
        + A40_FAR.prefill_per_token_sq_s * tokens**2
    )


@dataclass(frozen=True)
class Leg:
    """A prompt that was sent, or comes."""

    tokens: int
    left_s: float = math.inf
    since_s: float = NOW_S

    @property
    def due_s(self) -> float:
        return NOW_S + self.left_s

    @property
    def urgency_s(self) -> float:
        if self.left_s == math.inf:
            return self.since_s + WEIGHT * cost_s(self.tokens)
        return self.due_s


def served(
    legs: list[Leg], start_s: float, share: float, newcomer: Leg | None
) -> tuple[int, float]:
    """Deadlines missed, and when the newcomer begins; by the words of the docs."""
    queue = sorted(
        [*legs, *([newcomer] if newcomer else [])], key=lambda g: g.urgency_s
    )
    time_s, late, begins_s = start_s, [], math.nan
    for leg in queue:
        cost = cost_s(leg.tokens) * (1.0 if leg is newcomer else share)
        if time_s + cost > leg.due_s:
            late.append((leg, cost))
            continue
        if leg is newcomer:
            begins_s = time_s
        time_s += cost
    # Of equals the newcomer comes last.
    for leg, cost in sorted(late, key=lambda one: (one[0].tokens, one[0] is newcomer)):
        if leg is newcomer:
            begins_s = time_s
        time_s += cost
    return len(late), begins_s


def a_policy(engines: int, serves: Phase | None = Phase.PREFILL) -> Policy:
    return make_policy("deadline", 0, engines, serves=serves)


def book(table: Table, rank: int, leg: Leg) -> None:
    table.book(rank, Phase.PREFILL, leg.tokens, 1, now_s=leg.since_s, due_s=leg.due_s)


def pick(policy: Policy, table: Table, leg: Leg) -> int:
    return policy.pick(table, leg.tokens, 100, now_s=NOW_S, due_s=leg.due_s)


lengths = st.integers(1, 6000)
targets = st.just(math.inf) | st.floats(-1, 5)
newcomers = st.builds(Leg, lengths, targets)
legs = st.builds(Leg, lengths, targets, st.floats(NOW_S - 5, NOW_S))
queues = st.lists(legs, max_size=6)


def a_prefill_table(engines: int = 1) -> Table:
    table = a_table(*[A40_FAR] * engines)
    for rank in range(engines):
        table.set_limits(rank, max_num_seqs=64, max_num_batched_tokens=_LIMIT_TOKENS)
    return table


@given(queues, newcomers)
def test_the_price_is_what_the_docs_define(queue: list[Leg], newcomer: Leg) -> None:
    table = a_prefill_table()
    for leg in queue:
        book(table, 0, leg)
    policy, plain = a_policy(1), make_policy("calibrated", 0, 1, serves=Phase.PREFILL)
    pick(policy, table, newcomer)
    pick(plain, table, newcomer)
    got, before = policy.terms()[0], plain.terms()[0]

    backlog_s = before["prefill_backlog_s"]
    under_way_s = 0.5 * min(backlog_s, cost_s(STEP_TOKENS))
    known_s = sum(cost_s(leg.tokens) for leg in queue)
    rest_s = backlog_s - under_way_s
    share = min(1.0, rest_s / known_s) if queue else 1.0
    start_s = NOW_S + under_way_s + 0.5 * max(0.0, rest_s - known_s)
    without, _ = served(queue, start_s, share, None)
    with_it, begins_s = served(queue, start_s, share, newcomer)
    assert got["prefill_backlog_s"] == pytest.approx(begins_s - NOW_S, abs=1e-9)
    assert got["slo_s"] == _MISS_S * max(0, with_it - without)
    for name in ("prefill_own_s", "kv_pressure_s", "silence_s"):
        assert got[name] == before[name]


def test_who_is_urgent_waits_for_the_step_under_way_only() -> None:
    table = a_table(A40_FAR)
    for _ in range(10):
        book(table, 0, Leg(2000, left_s=60.0))
    policy = a_policy(1)
    pick(policy, table, Leg(100, left_s=1.0))
    assert policy.terms()[0]["prefill_backlog_s"] == pytest.approx(
        0.5 * cost_s(STEP_TOKENS)
    )
    pick(policy, table, Leg(100, left_s=100.0))
    assert policy.terms()[0]["prefill_backlog_s"] > 5 * cost_s(2000)


def test_a_deadline_outweighs_any_wait() -> None:
    table = a_table(A40_FAR, A40_FAR)
    # Little to do here, and all of it is due before the newcomer ...
    book(table, 0, Leg(4000, left_s=1.2 * cost_s(4000)))
    # ... and much there, that can wait.
    for _ in range(10):
        book(table, 1, Leg(4000, left_s=60.0))
    newcomer = Leg(3000, left_s=1.4 * cost_s(3000))
    policy = a_policy(2)
    assert pick(policy, table, newcomer) == 1
    assert policy.terms()[0]["slo_s"] == _MISS_S
    assert policy.terms()[1]["slo_s"] == 0.0
    # Counting seconds of backlog, the other one is the cheaper.
    plain = make_policy("calibrated", 0, 2, serves=Phase.PREFILL)
    assert pick(plain, table, newcomer) == 0


def test_nobody_is_made_late_where_another_engine_is_as_good() -> None:
    table = a_table(A40_FAR, A40_FAR)
    book(table, 0, Leg(2000, left_s=1.15 * cost_s(2000)))
    book(table, 1, Leg(2000, left_s=60.0))
    policy = a_policy(2)
    assert pick(policy, table, Leg(500, left_s=cost_s(2000))) == 1
    assert policy.terms()[0]["slo_s"] == _MISS_S
    assert policy.terms()[1]["slo_s"] == 0.0


@given(messages, newcomers)
def test_other_pools_are_priced_as_by_calibrated(
    told: dict[str, Any], leg: Leg
) -> None:
    for serves in (Phase.DECODE, None):
        table = a_table(A40_FAR)
        table.hear(0, **told)
        book(table, 0, Leg(500, left_s=1.0))
        policies = [
            make_policy(name, 0, 1, serves=serves)
            for name in ("calibrated", "deadline")
        ]
        for policy in policies:
            pick(policy, table, leg)
        assert policies[0].terms() == policies[1].terms()


def test_work_of_other_routers_lengthens_what_is_known() -> None:
    def wait_s(prefill_tokens: int) -> float:
        table = a_table(A40_FAR)
        book(table, 0, Leg(1000, left_s=1.0))
        told = figures(prefill_tokens=prefill_tokens, booking_seen=1, now_s=NOW_S)
        table.hear(0, **told)
        policy = a_policy(1)
        pick(policy, table, Leg(1000, left_s=50.0))
        return policy.terms()[0]["prefill_backlog_s"]

    assert wait_s(10_000) > 3 * wait_s(1000)


def test_a_small_leg_of_its_own_changes_little() -> None:
    """Work of other routers counts alike, whether this one has a leg there or not."""
    table = a_prefill_table(2)
    for rank in range(2):
        table.hear(rank, **figures(prefill_tokens=10_000, now_s=NOW_S))
    book(table, 0, Leg(1, left_s=50.0))
    policy = a_policy(2)
    pick(policy, table, Leg(1000, left_s=0.5))
    with_leg, without = (policy.terms()[rank]["prefill_backlog_s"] for rank in range(2))
    assert with_leg == pytest.approx(without, rel=0.05)


def test_of_equal_urgency_the_earlier_goes_first() -> None:
    table = a_prefill_table()
    book(table, 0, Leg(1000, left_s=5.0))
    policy = a_policy(1)
    pick(policy, table, Leg(1000, left_s=5.0))
    after = policy.terms()[0]["prefill_backlog_s"]
    pick(policy, table, Leg(1000, left_s=4.999))
    assert after > policy.terms()[0]["prefill_backlog_s"]


def test_who_is_silent_begins_later() -> None:
    table = a_table(A40_FAR, A40_FAR)
    for rank, heard_s in enumerate((NOW_S - 5, NOW_S)):
        table.hear(rank, **figures(prefill_tokens=0, now_s=heard_s))
    policy = a_policy(2)
    assert pick(policy, table, Leg(1000, left_s=2.0)) == 1
    assert policy.terms()[0]["slo_s"] == _MISS_S


def test_a_date_must_be_a_number() -> None:
    table = a_table(A40_FAR)
    with pytest.raises(ValueError, match="due_s"):
        table.book(0, Phase.PREFILL, 1, 1, due_s=math.nan)
    assert table.is_idle()
    with pytest.raises(ValueError, match="due_s"):
        a_policy(1).pick(table, 1, 1, due_s=math.nan)
