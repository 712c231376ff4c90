from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_calrouter.calibration import load
from vllm_calrouter.options import parse
from vllm_calrouter.router import wishes
from vllm_calrouter.router.wishes import About, Rules, Wishes

OPTIONS = {
    "slo_classes": {
        "tight": {"ttft_ms": 175, "tpot_ms": 40},
        "loose": {"ttft_ms": 525},
        "batch": {},
    },
    "default_slo": "loose",
    "defaults": {"small": {"slo": "tight", "output_tokens": 50}},
}
RULES = Rules(parse(OPTIONS))
BARE = Rules(parse({}))


def test_without_wishes_and_defaults_nothing_is_asked() -> None:
    assert BARE.read(None, "any") == BARE.read({"mine": 1}, None) == Wishes()


def test_a_class_gives_both_targets_in_seconds() -> None:
    wanted = RULES.read({"slo": "tight"}, None)
    assert wanted == Wishes(slo="tight", ttft_s=0.175, tpot_s=0.04)


def test_a_figure_beats_its_class_and_leaves_the_other_figure() -> None:
    wanted = RULES.read({"slo": "tight", "slo_tpot_ms": 25}, None)
    assert wanted == Wishes(slo="tight", ttft_s=0.175, tpot_s=0.025)


def test_defaults_go_from_the_model_s_to_everyone_s() -> None:
    assert RULES.read({}, "small").slo == "tight"
    assert RULES.read({}, "other").slo == RULES.read({}, None).slo == "loose"
    assert RULES.read({"slo": "batch"}, "small") == Wishes(slo="batch")


PROMISED = Rules(parse({"profile": "a40-qwen2.5-3b", "default_slo": "loose"}))


def test_a_profile_alone_brings_its_classes() -> None:
    wanted = PROMISED.read({"slo": "tight"}, None)
    assert (wanted.slo, wanted.ttft_s, wanted.tpot_s) == ("tight", 0.175, 0.0397)
    assert PROMISED.read({}, None).slo == "loose"
    with pytest.raises(VLLMValidationError, match="one of loose, tight"):
        PROMISED.read({"slo": "batch"}, None)


def test_of_a_profile_s_class_a_long_prompt_has_longer() -> None:
    profile = load("a40-qwen2.5-3b")
    wanted = PROMISED.read({"slo": "tight"}, None)
    assert PROMISED.for_prompt(wanted, 10).ttft_s == 0.175
    expected_s = profile.slo["tight"].ttft_target_s(4000, profile.costs)
    assert expected_s > 1.0
    assert PROMISED.for_prompt(wanted, 4000).ttft_s == pytest.approx(expected_s)


def test_a_client_s_own_figure_is_the_same_for_every_prompt() -> None:
    wanted = PROMISED.read({"slo": "tight", "slo_ttft_ms": 90}, None)
    assert PROMISED.for_prompt(wanted, 4000).ttft_s == 0.09
    assert wanted.tpot_s == 0.0397


def test_configured_classes_replace_the_profile_s() -> None:
    rules = Rules(parse({**OPTIONS, "profile": "a40-qwen2.5-3b"}))
    wanted = rules.read({"slo": "loose"}, None)
    assert rules.for_prompt(wanted, 4000) == Wishes(slo="loose", ttft_s=0.525)


def test_a_model_s_length_is_where_prediction_starts_not_a_hint() -> None:
    assert RULES.prior_tokens("small") == 50
    assert RULES.prior_tokens("other") == RULES.prior_tokens(None) == 256
    assert RULES.read({"slo": "tight"}, "small").output_tokens is None


@pytest.mark.parametrize("name", [wishes.SLO_TTFT_MS, wishes.SLO_TPOT_MS])
@pytest.mark.parametrize(
    "value",
    [
        *("200", "", True, 0, -1, -0.0, 86_400_001, 1e300, [100], {"ms": 1}),
        *(float("nan"), float("inf"), -float("inf")),
        pytest.param(10**5000, id="longer than Python writes"),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused_by_name(
    name: str, value: Any
) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs.{name} must") as error:
        RULES.read({name: value}, None)
    assert error.value.parameter == name
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", [wishes.OUTPUT_TOKENS, wishes.TRUE_OUTPUT_TOKENS])
@pytest.mark.parametrize(
    "value", ["30", True, 0, -1, 0.5, 10_000_001, float("nan"), float("inf"), [5]]
)
def test_a_length_that_cannot_be_meant_is_refused_by_name(
    name: str, value: Any
) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs.{name} must"):
        RULES.read({name: value}, None)


@pytest.mark.parametrize(("value", "tokens"), [(30, 30), (30.7, 31), (1, 1)])
def test_an_expected_length_need_not_be_whole(value: float, tokens: int) -> None:
    assert RULES.read({"output_tokens": value}, None).output_tokens == tokens


@pytest.mark.parametrize("name", ["Tight", "", 3, ["tight"], {}])
def test_an_unknown_class_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(VLLMValidationError, match="one of batch, loose, tight"):
        RULES.read({"slo": name}, None)
    with pytest.raises(VLLMValidationError, match="has no SLO classes"):
        BARE.read({"slo": name}, None)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from([*sorted(wishes.OURS), "calrouter", "x"]), anything)
)
def test_no_value_ends_in_anything_but_wishes_or_a_refusal(
    extra: dict[str, Any],
) -> None:
    before = dict(extra)
    assert isinstance(wishes.about(extra), About)
    refusal = None
    wanted = Wishes()
    try:
        wanted = RULES.read(extra, None)
    except VLLMValidationError as error:
        refusal = error
    assert wanted.ttft_s is None or 0 < wanted.ttft_s <= 86_400
    assert wanted.output_tokens is None or wanted.output_tokens >= 1
    if refusal is not None:
        assert "\n" not in str(refusal)
        assert refusal.parameter in wishes.OURS
    # Repr, not equality: a NaN does not equal itself.
    assert repr(extra) == repr(before)


def test_what_a_client_writes_in_our_place_is_not_believed() -> None:
    for told in ("x", 3, {"model": 5}, {"user": "u" * 501}, {"tools": "yes"}):
        assert wishes.about({wishes.ABOUT: told}) == About()


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"max_tokens": 7}, None),
        ({"max_tokens": 7, "ignore_eos": True}, 7),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 7, "extra_args": {"true_output_tokens": 5}}, 5),
    ],
)
def test_an_experiment_refuses_what_does_not_tell_its_length(
    params: dict[str, Any], tokens: int | None
) -> None:
    asked = SamplingParams(**params)
    wanted = BARE.read(asked.extra_args, None)
    assert wishes.truth(wanted, asked) == tokens
    BARE.check(asked)
    for predictor in ("oracle", "noisy"):
        rules = Rules(parse({"predictor": predictor}))
        if tokens is None:
            with pytest.raises(VLLMValidationError, match="true_output_tokens"):
                rules.check(asked)
        else:
            rules.check(asked)
