"""The router's placer: which policy, costs and limits each pool gets."""

from __future__ import annotations

import pytest

from benchmarks.price import A40_QWEN_3B
from vllm_calrouter._core import TERMS, Phase
from vllm_calrouter.options import PRICING_POLICIES, RouterOptions, parse
from vllm_calrouter.placement import Choice, Limits, Placer, Pools

SPLIT = Pools(engines=6, prefill=2)


def own_terms(placer: Placer, phase: Phase) -> dict[str, float]:
    """Of an idle engine's price, what is not 0."""
    choice = placer.choose(phase, 512, 100)
    assert choice.terms is not None
    return {name: s for name, s in choice.terms[choice.rank].items() if s > 0}


@pytest.mark.parametrize("policy", PRICING_POLICIES)
def test_each_pool_is_priced_for_what_it_does(policy: str) -> None:
    placer = Placer(RouterOptions(policy=policy), SPLIT, explain=True)
    both = Placer(RouterOptions(policy=policy), Pools(3, 0), explain=True)
    prefill = own_terms(placer, Phase.PREFILL)
    decode = own_terms(placer, Phase.DECODE)
    assert "prefill_own_s" in prefill
    assert "decode_own_s" not in prefill
    assert "decode_own_s" in decode
    assert "prefill_own_s" not in decode
    assert {"prefill_own_s", "decode_own_s"} <= set(own_terms(both, Phase.DECODE))
    assert "transfer_s" not in own_terms(both, Phase.DECODE)


def test_limits_written_for_a_role_are_those_of_its_engines() -> None:
    options = RouterOptions(policy="calibrated", prefill=2, decode_max_num_seqs=4)
    narrow = Placer(options, SPLIT, explain=True)
    wide = Placer(RouterOptions(policy="calibrated", prefill=2), SPLIT, explain=True)
    told = Placer(
        RouterOptions(policy="calibrated", prefill=2),
        SPLIT,
        limits=[Limits(max_num_seqs=4)] * 6,
        explain=True,
    )
    pressure = [
        own_terms(placer, Phase.DECODE)["slot_pressure_s"]
        for placer in (narrow, wide, told)
    ]
    assert pressure[0] == pressure[2] > pressure[1]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_term_of_no_weight_is_none(phase: Phase) -> None:
    plain = {"policy": "calibrated", "prefill": 2}
    without = {**plain, "slot_weight": 0, "kv_weight": 0}
    gone = {"slot_pressure_s", "kv_pressure_s"}
    priced = own_terms(Placer(parse(plain), SPLIT, explain=True), phase)
    assert set(priced) & gone
    priced = own_terms(Placer(parse(without), SPLIT, explain=True), phase)
    assert not set(priced) & gone


def test_costs_are_by_rank_and_one_for_every_engine() -> None:
    with pytest.raises(ValueError, match="zip"):
        Placer(RouterOptions(), SPLIT, costs=[A40_QWEN_3B] * 5)


def test_terms_are_kept_only_where_they_are_asked_for() -> None:
    options = RouterOptions(policy="calibrated")
    assert Placer(options, SPLIT).choose(Phase.DECODE, 1, 1).terms is None
    counted = Placer(RouterOptions(policy="least_loaded"), SPLIT, explain=True)
    assert counted.choose(Phase.DECODE, 1, 1).terms is None


def test_candidates_are_rank_score_and_terms() -> None:
    placer = Placer(RouterOptions(policy="calibrated"), SPLIT, explain=True)
    choice = placer.choose(Phase.DECODE, 512, 100, slo_tpot_s=0.001, now_s=3.0)
    candidates = choice.candidates()
    assert {one["rank"] for one in candidates} == {2, 3, 4, 5}
    for one in candidates:
        assert tuple(one["terms"]) == TERMS
        assert sum(one["terms"].values()) == pytest.approx(one["score"])
        assert one["terms"]["slo_s"] > 0
    plain = Choice(Phase.DECODE, 1, "x", "y", ((1, 2.0),), 0.0)
    assert plain.candidates() == [{"rank": 1, "score": 2.0, "terms": {}}]
