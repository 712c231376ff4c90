"""The price through the policies: its definition, and how it must behave."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.price import A40_QWEN_3B, Booking, Request, State, terms, total_s
from tests.placement.test_ledger import message
from vllm_calrouter import _core
from vllm_calrouter._core import TERMS, Costs, Phase, Policy, Table, make_policy
from vllm_calrouter.options import PRICING_POLICIES

SERVES = (Phase.PREFILL, Phase.DECODE, None)
_NAMES = [name for name in dir(Costs) if not name.startswith("_")]
#: With a slow link between hosts.
A40_FAR = Costs(
    **{name: getattr(A40_QWEN_3B, name) for name in _NAMES if "far" not in name},
    far_transfer_base_s=0.005,
    far_transfer_bytes_per_s=1.25e9,
)
_BLOCKS = A40_QWEN_3B.kv_capacity_tokens // 16


def scaled(costs: Costs, factor: float) -> Costs:
    """An engine on which all takes `factor` times as long."""
    values = {name: getattr(costs, name) for name in _NAMES}
    for name in values:
        if name.endswith("transfer_bytes_per_s"):
            values[name] /= factor
        elif name.endswith("_s"):
            values[name] *= factor
    return Costs(**values)


def a_table(*costs: Costs, slots: int = 64) -> Table:
    table = Table(len(costs))
    for rank, cost in enumerate(costs):
        table.set_costs(rank, cost)
        table.set_limits(rank, max_num_seqs=slots, max_num_batched_tokens=2048)
    return table


def figures(**changed: Any) -> dict[str, Any]:
    """A busy engine's message."""
    busy = message(
        incarnation=1,
        sequence=1,
        prefill_tokens=3000,
        output_tokens=4000,
        context_tokens=20_000,
        running=30,
        waiting=4,
        waiting_remote=2,
        kv_total_blocks=_BLOCKS,
        kv_free_blocks=_BLOCKS // 2,
        block_tokens=16,
    )
    return {**busy, **changed}


def price(
    serves: Phase | None,
    told: dict[str, Any] | None,
    *,
    prompt: int = 800,
    output: int = 200,
    slots: int = 64,
    costs: Costs = A40_QWEN_3B,
    bookings: tuple[Booking, ...] = (),
    **demand: Any,
) -> float:
    """The price of the one engine there is, in seconds."""
    table = a_table(costs, slots=slots)
    if told is not None:
        table.hear(0, **told)
    for one in bookings:
        table.book(0, one.phase, one.prompt_tokens, one.output_tokens)
    policy = make_policy("calibrated", 0, 1, serves=serves)
    policy.pick(table, prompt, output, **demand)
    ((_, seconds),) = policy.scores()
    return seconds


counts = st.integers(0, 300)
tokens = st.integers(0, 200_000)
messages = st.fixed_dictionaries(
    {
        "prefill_tokens": tokens,
        "output_tokens": tokens,
        "context_tokens": tokens,
        "running": counts,
        "waiting": counts,
        "waiting_remote": counts,
        "kv_free_blocks": st.integers(0, 4000),
        "block_tokens": st.sampled_from([16, 128]),
        "now_s": st.floats(0, 8),
        "step_age_s": st.floats(0, 2),
    }
).map(lambda told: message(incarnation=1, sequence=1, kv_total_blocks=4000, **told))
bookings = st.lists(
    st.builds(
        lambda phase, prompt, output, cached: Booking(
            0, phase, prompt, output, min(prompt, cached)
        ),
        st.sampled_from([Phase.PREFILL, Phase.DECODE]),
        st.integers(0, 9000),
        st.integers(0, 2000),
        st.integers(0, 9000),
    ),
    max_size=5,
)
requests = st.builds(
    lambda prompt, output, cached, ttft, tpot, now, far: Request(
        prompt, output, min(prompt, cached), ttft, tpot, now, far
    ),
    st.integers(0, 20_000),
    st.integers(0, 4000),
    st.integers(0, 20_000),
    st.floats(-2, 2),
    st.floats(0, 0.1),
    st.floats(0, 30),
    st.booleans(),
)


@given(
    st.sampled_from(SERVES),
    st.none() | messages,
    bookings,
    requests,
    st.integers(1, 6),
    st.integers(1, 256),
)
def test_the_price_is_what_the_docs_define(
    serves: Phase | None,
    told: dict[str, Any] | None,
    booked: list[Booking],
    request: Request,
    routers: int,
    slots: int,
) -> None:
    table = a_table(A40_FAR, A40_FAR, slots=slots)
    table.set_host(1, 1)
    state = State(A40_FAR, max_num_seqs=slots)
    if told is not None:
        table.hear(0, **told)
        state.hear(told)
    for one in booked:
        table.book(
            0,
            one.phase,
            one.prompt_tokens,
            one.output_tokens,
            cached_tokens=one.cached_tokens,
        )
        state.count(one, +1)
    policy = make_policy("calibrated", 0, 1, serves=serves, routers=routers)
    policy.pick(
        table,
        request.prompt_tokens,
        request.output_tokens,
        cached_tokens=request.cached_tokens,
        slo_ttft_s=request.slo_ttft_s,
        slo_tpot_s=request.slo_tpot_s,
        now_s=request.now_s,
        source_rank=1 if request.far else 0,
    )
    defined = terms(state, request, serves, routers=routers)
    got = policy.terms()[0]
    assert tuple(got) == TERMS
    assert got == {name: defined.get(name, 0.0) for name in TERMS}
    assert policy.scores() == ((0, total_s(defined)),)


def test_of_equal_engines_the_one_on_the_same_host_reads_sooner() -> None:
    table = a_table(*[A40_FAR] * 4)
    for rank in (1, 3):
        table.set_host(rank, 1)
    policy = make_policy("calibrated", 2, 4, serves=Phase.DECODE)
    for source in (0, 1):
        assert policy.pick(table, 2000, 100, source_rank=source) == 2 + source
    # Nowhere to read from, and nothing to tell them apart.
    assert {policy.pick(table, 2000, 100) for _ in range(2)} == {2, 3}


def test_one_candidate_s_price_is_its_terms() -> None:
    table = a_table(A40_QWEN_3B, A40_QWEN_3B, A40_QWEN_3B)
    policy = make_policy("calibrated", 1, 3)
    rank = policy.pick(table, 100, 10)
    assert policy.price(rank) == policy.terms()[rank]
    with pytest.raises(KeyError, match="rank 0"):
        policy.price(0)


@pytest.mark.parametrize("rank", [-2, 2])
def test_the_source_of_a_kv_cache_must_be_an_engine(rank: int) -> None:
    policy = make_policy("calibrated", 0, 2)
    with pytest.raises(IndexError, match="source_rank"):
        policy.pick(a_table(A40_FAR, A40_FAR), 10, 10, source_rank=rank)


def test_without_constants_of_its_own_far_is_as_near() -> None:
    assert A40_QWEN_3B.far_transfer_base_s == A40_QWEN_3B.transfer_base_s
    assert A40_QWEN_3B.far_transfer_bytes_per_s == A40_QWEN_3B.transfer_bytes_per_s


@given(
    st.sampled_from(SERVES),
    messages,
    st.sampled_from(["prefill_tokens", "output_tokens", "context_tokens"]),
    st.integers(1, 5000),
)
def test_more_to_do_first_never_costs_less(
    serves: Phase | None, told: dict[str, Any], figure: str, more: int
) -> None:
    # What nobody was told of is unknown, and taken to be as much as the request's own.
    told = {
        **told,
        "running": max(1, told["running"]),
        "output_tokens": max(1, told["output_tokens"]),
    }
    fuller = {**told, figure: told[figure] + more}
    assert price(serves, fuller) >= price(serves, told)


@given(st.sampled_from(SERVES), messages, st.integers(1, 4000))
def test_a_fuller_kv_cache_never_costs_less(
    serves: Phase | None, told: dict[str, Any], blocks: int
) -> None:
    fuller = {**told, "kv_free_blocks": max(0, told["kv_free_blocks"] - blocks)}
    assert price(serves, fuller) >= price(serves, told)


@given(st.sampled_from(SERVES), messages, st.integers(0, 9000), st.integers(1, 9000))
def test_a_longer_request_never_costs_less(
    serves: Phase | None, told: dict[str, Any], size: int, more: int
) -> None:
    def cost(prompt: int, output: int) -> float:
        return price(serves, told, prompt=prompt, output=output)

    assert cost(size + more, 100) > cost(size, 100)
    assert cost(100, size + more) >= cost(100, size)


@given(st.sampled_from(SERVES), messages, st.integers(0, 800), st.integers(0, 800))
def test_a_cached_prompt_costs_less_where_it_is_prefilled(
    serves: Phase | None, told: dict[str, Any], one: int, other: int
) -> None:
    fewer, more = sorted((one, other))
    dear = price(serves, told, cached_tokens=fewer)
    cheap = price(serves, told, cached_tokens=more)
    if serves == Phase.DECODE or fewer == more:
        assert cheap == dear
    else:
        assert cheap < dear


@given(
    st.sampled_from(SERVES),
    st.lists(messages, min_size=2, max_size=5),
    st.sampled_from([0.125, 0.5, 2.0, 8.0]),
)
def test_the_scale_of_all_costs_does_not_move_the_choice_among_equals(
    serves: Phase | None, told: list[dict[str, Any]], factor: float
) -> None:
    def choice(costs: Costs) -> tuple[int, tuple[tuple[int, float], ...]]:
        table = a_table(*[costs] * len(told))
        for rank, figures_told in enumerate(told):
            # The clock does not run faster where work is cheaper.
            table.hear(rank, **{**figures_told, "step_age_s": 0.0})
        policy = make_policy("calibrated", 0, len(told), serves=serves)
        rank, _, scores = policy.decide(table, 800, 200)
        return rank, scores

    rank, scores = choice(A40_QWEN_3B)
    other, scaled_scores = choice(scaled(A40_QWEN_3B, factor))
    assert other == rank
    # Powers of two: exact to the last bit.
    assert scaled_scores == tuple((r, seconds * factor) for r, seconds in scores)


@pytest.mark.parametrize("serves", SERVES)
def test_a_slower_engine_gets_less(serves: Phase | None) -> None:
    def shares(factor: float) -> Counter[int]:
        table = a_table(A40_QWEN_3B, scaled(A40_QWEN_3B, factor))
        policy = make_policy("calibrated", 0, 2, serves=serves)
        phase = Phase.DECODE if serves is None else serves
        picks: Counter[int] = Counter()
        for _ in range(100):
            rank = policy.pick(table, 300, 100)
            table.book(rank, phase, 300, 100)
            picks[rank] += 1
        return picks

    assert shares(1.0)[1] == 50
    assert 50 > shares(1.3)[1] > shares(3.0)[1] > 0


def test_a_hundred_short_ones_in_the_slots_cost_more_than_nineteen_long_ones() -> None:
    short = figures(running=64, waiting=36, waiting_remote=0, output_tokens=100 * 20)
    long = figures(running=19, waiting=0, waiting_remote=0, output_tokens=19 * 600)
    both = {"prefill_tokens": 0, "context_tokens": 15_000}
    wait = price(Phase.DECODE, {**short, **both})
    assert wait > price(Phase.DECODE, {**long, **both})


def test_what_is_seen_costs_what_it_cost_unseen() -> None:
    """A message that takes a booking in must not move the price by itself."""
    empty = figures(
        prefill_tokens=0,
        output_tokens=0,
        context_tokens=0,
        running=0,
        waiting=0,
        waiting_remote=0,
        kv_free_blocks=_BLOCKS,
    )
    unseen = price(
        Phase.DECODE, empty, bookings=(Booking(0, Phase.DECODE, 1600, 300),) * 8
    )
    seen = {
        **empty,
        "running": 8,
        "output_tokens": 8 * 300,
        "context_tokens": 8 * 1600,
        "kv_free_blocks": _BLOCKS - 8 * 100,
    }
    # All but the transfers, which are done when the legs run.
    expected = price(Phase.DECODE, seen)
    transfers = 8 * 800 * 36_864 / A40_QWEN_3B.transfer_bytes_per_s
    assert unseen - transfers == pytest.approx(expected, rel=1e-12)


def test_missing_a_target_counts_once_more() -> None:
    told = figures()
    for serves in SERVES:
        free = price(serves, told)
        assert price(serves, told, slo_ttft_s=1e6, slo_tpot_s=1e6) == free
        late = price(serves, told, slo_ttft_s=1e-9)
        later = price(serves, told, slo_ttft_s=-1.0)
        assert free < late < later
        assert later - late == pytest.approx(1.0)
    step_s = A40_QWEN_3B.decode_base_s
    assert price(Phase.DECODE, told, slo_tpot_s=step_s) > price(Phase.DECODE, told)


def test_silence_costs_a_second_a_second_and_then_the_engine() -> None:
    table = a_table(A40_QWEN_3B, A40_QWEN_3B)
    policy = make_policy("calibrated", 0, 2)
    for rank in (0, 1):
        table.hear(rank, **figures(now_s=0.0))
    table.hear(1, **figures(sequence=2, now_s=6.0))
    for _ in range(2):
        assert policy.pick(table, 10, 10, now_s=6.0) == 1
    silence = {rank: priced["silence_s"] for rank, priced in policy.terms().items()}
    assert silence == {0: 5.7, 1: 0.0}
    assert policy.pick(table, 10, 10, now_s=10.5) == 1
    assert set(policy.terms()) == {1}
    assert "silent" in policy.reason()
    # Back, as another one: its figures are as good as any.
    table.hear(0, **message(incarnation=2, sequence=1, now_s=10.5))
    assert policy.pick(table, 10, 10, now_s=10.5) == 0
    # All silent: chosen among all the same.
    policy.pick(table, 10, 10, now_s=99.0)
    assert set(policy.terms()) == {0, 1}


def test_engines_never_heard_are_chosen_by_own_bookings_alone() -> None:
    table = a_table(*[A40_QWEN_3B] * 3)
    policy = make_policy("calibrated", 0, 3, serves=Phase.DECODE)
    for _ in range(30):
        rank = policy.pick(table, 100, 100, now_s=1e6)
        table.book(rank, Phase.DECODE, 100, 100)
    assert [table.in_flight(rank) for rank in range(3)] == [10, 10, 10]


def test_costs_may_change_while_serving() -> None:
    table = a_table(A40_QWEN_3B, A40_QWEN_3B)
    policy = make_policy("calibrated", 0, 2)
    assert {policy.pick(table, 500, 100) for _ in range(4)} == {0, 1}
    table.set_costs(0, scaled(A40_QWEN_3B, 2.0))
    assert {policy.pick(table, 500, 100) for _ in range(4)} == {1}


def the_paper(serves: Phase | None, **weights: float) -> Policy:
    return make_policy("paper", 0, 1, serves=serves, **weights)


def test_the_studys_score_is_its_documented_reading() -> None:
    table = a_table(A40_QWEN_3B)
    c = A40_QWEN_3B
    for _ in range(3):
        table.book(0, Phase.PREFILL, 1000, 1, cached_tokens=200)
        table.book(0, Phase.DECODE, 500, 300)
    # Nobody else's work, and all of its own, seen or not.
    table.hear(0, **figures(booking_seen=4))

    def prefill_s(size: int) -> float:
        return (
            c.prefill_base_s
            + c.prefill_per_token_s * size
            + c.prefill_per_token_sq_s * size * size
        )

    tau = c.decode_base_s + c.decode_per_seq_s
    taken = _BLOCKS // 2 * 16
    prefill = the_paper(Phase.PREFILL)
    prefill.pick(table, 600, 100, cached_tokens=100, slo_ttft_s=0.5)
    backlog = 3 * prefill_s(800)
    assert prefill.terms()[0] == pytest.approx(
        {
            **dict.fromkeys(TERMS, 0.0),
            "prefill_backlog_s": backlog,
            "prefill_own_s": prefill_s(500),
            "kv_pressure_s": (taken + 600) / 60_000,
            "slo_s": backlog * prefill_s(500) / 0.5,
        }
    )
    decode = the_paper(Phase.DECODE, slo_weight=2.0, kv_weight=3.0)
    decode.pick(table, 600, 100, slo_tpot_s=0.04)
    assert decode.terms()[0] == pytest.approx(
        {
            **dict.fromkeys(TERMS, 0.0),
            "decode_wait_s": 900 * tau,
            "decode_own_s": 100 * tau,
            "kv_pressure_s": 3 * (taken + 600 + 100) / 60_000,
            "slo_s": 2 * 900 * tau * tau / 0.04,
        }
    )


def test_the_studys_score_does_not_see_slots_and_ours_does() -> None:
    def choice(name: str) -> int:
        table = a_table(A40_QWEN_3B, A40_QWEN_3B, slots=16)
        for _ in range(24):
            table.book(0, Phase.DECODE, 50, 20)
        for _ in range(4):
            table.book(1, Phase.DECODE, 50, 200)
        return make_policy(name, 0, 2, serves=Phase.DECODE).pick(table, 50, 50)

    assert choice("paper") == 0
    assert choice("calibrated") == 1


@pytest.mark.parametrize("name", _core.POLICIES)
def test_decide_is_pick_reason_and_scores(name: str) -> None:
    tables = [a_table(A40_QWEN_3B, A40_QWEN_3B) for _ in range(2)]
    one, other = (make_policy(name, 0, 2) for _ in range(2))
    rank, reason, scores = one.decide(tables[0], 100, 100, now_s=1.0)
    assert rank == other.pick(tables[1], 100, 100, now_s=1.0)
    assert (reason, scores) == (other.reason(), other.scores())
    assert bool(one.terms()) == (name in PRICING_POLICIES)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"decode_base_s": math.nan}, "decode_base_s must be finite"),
        ({"prefill_base_s": -1.0}, "prefill_base_s"),
        ({"prefill_per_token_s": math.inf}, "prefill_per_token_s"),
        ({"transfer_bytes_per_s": 0.0}, "transfer_bytes_per_s"),
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens"),
        (
            {
                "prefill_base_s": 0.0,
                "prefill_per_token_s": 0.0,
                "prefill_per_token_sq_s": 0.0,
            },
            "the prefill of one token",
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, Any], says: str) -> None:
    values = {name: getattr(A40_QWEN_3B, name) for name in _NAMES}
    with pytest.raises(ValueError, match=says):
        Costs(**{**values, **wrong})


def test_what_cannot_be_priced_is_refused() -> None:
    table = Table(1)
    policy = make_policy("calibrated", 0, 1)
    with pytest.raises(RuntimeError, match="no costs were set for rank 0"):
        policy.pick(table, 1, 1)
    table.set_costs(0, A40_QWEN_3B)
    for prompt, output, cached in ((10, 1, 11), (10, -1, 0), (-1, 1, 0), (10, 1, -1)):
        with pytest.raises(ValueError, match="tokens"):
            policy.pick(table, prompt, output, cached_tokens=cached)
    with pytest.raises(ValueError, match="max_num_seqs"):
        table.set_limits(0, max_num_seqs=0, max_num_batched_tokens=1)
    with pytest.raises(ValueError, match="weights"):
        make_policy("calibrated", 0, 1, kv_weight=math.nan)
    with pytest.raises(ValueError, match="routers"):
        make_policy("calibrated", 0, 1, routers=0)


@pytest.mark.parametrize("serves", [Phase.PREFILL, None])
def test_what_was_told_is_worked_off_by_the_clock(serves: Phase | None) -> None:
    told = figures(prefill_tokens=6000, running=0, now_s=5.0)
    fresh = price(serves, told, now_s=5.0)
    assert price(serves, told, now_s=5.3) == pytest.approx(fresh - 0.3)
    stepping = {**told, "step_age_s": 0.1}
    assert price(serves, stepping, now_s=5.3) == pytest.approx(fresh - 0.4)
    # Nobody works off more than there is, nor what came after the message.
    idle = price(serves, figures(prefill_tokens=0, running=0, now_s=5.0), now_s=5.3)
    booked = (Booking(0, Phase.PREFILL, 900, 1),)
    more = price(serves, {**told, "prefill_tokens": 0}, now_s=5.9, bookings=booked)
    assert more > idle


def test_a_long_step_is_no_silence_as_long_as_it_is_heard() -> None:
    table = a_table(A40_QWEN_3B, A40_QWEN_3B, A40_QWEN_3B)
    table.hear(0, **figures(now_s=5.0, step_age_s=0.8))
    table.hear(1, **figures(now_s=5.0, step_age_s=1.5))
    # Not a word for as long as the first one's step has been under way.
    table.hear(2, **figures(now_s=4.2))
    policy = make_policy("calibrated", 0, 3)
    policy.pick(table, 10, 10, now_s=5.0)
    silence = {rank: priced["silence_s"] for rank, priced in policy.terms().items()}
    assert silence == {0: 0.0, 1: 0.5, 2: pytest.approx(0.5)}


def test_a_silent_engine_is_not_taken_to_work_on() -> None:
    told = figures(prefill_tokens=60_000, running=0, now_s=5.0)
    quiet = price(Phase.PREFILL, told, now_s=6.0)
    assert price(Phase.PREFILL, told, now_s=8.0) == pytest.approx(quiet + 2.0)


@pytest.mark.parametrize("serves", SERVES)
def test_an_engine_stuck_in_a_step_is_not_taken_to_work_on(
    serves: Phase | None,
) -> None:
    told = figures(prefill_tokens=16_000, now_s=5.0)
    stuck = price(serves, {**told, "step_age_s": 60.0}, now_s=5.0)
    assert stuck > price(serves, told, now_s=5.0) + 50
