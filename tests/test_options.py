import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter import _core
from vllm_calrouter.options import (
    HELP,
    POLICIES,
    OptionError,
    RouterOptions,
    parse,
    parse_json,
    to_config,
)


def test_every_key_is_explained_and_every_explanation_has_a_key() -> None:
    assert set(HELP) == set(RouterOptions.__struct_fields__)


def test_policies_are_those_of_the_core() -> None:
    assert set(POLICIES) == set(_core.POLICIES)


def test_options_survive_the_way_to_another_process() -> None:
    options = parse(
        {
            "prefill": 2,
            "policy": "round_robin",
            "journal": "x.jsonl",
            "slo_classes": {"tight": {"ttft_ms": 175}},
            "defaults": {"m": {"slo": "tight", "output_tokens": 9}},
        }
    )
    assert parse(to_config(options)) == options


@pytest.mark.parametrize(
    ("word", "value"), [("on", True), ("off", False), (True, True), (False, False)]
)
@pytest.mark.parametrize("key", ["warm_up", "first_token"])
def test_switches_are_on_or_off(key: str, word: object, value: bool) -> None:
    assert getattr(parse({"prefill": 1, key: word}), key) is value


def test_on_and_off_mean_nothing_where_no_switch_is() -> None:
    assert parse({"journal": "on"}).journal == "on"
    with pytest.raises(OptionError, match="prefill"):
        parse({"prefill": "on"})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"prefil": 2}, "did you mean 'prefill'"),
        ({"order": "lifo"}, "--router-config.order with one of fcfs, short_first"),
        ({"decode_order": "short_first"}, "decode_order with one of fcfs, deadline"),
        ({"patience": -1}, "--router-config.patience"),
        ({"zzz": 2}, "known: policy"),
        ({"prefill": "two"}, "--router-config.prefill"),
        ({"prefill": -1}, "--router-config.prefill"),
        ({"prefill": True}, "--router-config.prefill"),
        ({"warm_up": "no"}, "--router-config.warm_up"),
        ({"nixl_sleep_ms": -1}, "--router-config.nixl_sleep_ms"),
        ({"nixl_sleep_ms": 1.5}, "--router-config.nixl_sleep_ms"),
        ({"first_token": "maybe"}, "--router-config.first_token"),
        ({"kv_load_failure": "retry"}, "--router-config.kv_load_failure"),
        ({"long_share": 0}, "--router-config.long_share"),
        ({"decode_max_num_seqs": 0}, "--router-config.decode_max_num_seqs"),
        ({"policy": "best"}, "vllm, round_robin"),
        ({"predictor": "best"}, "hint, constant"),
        ({"online_memory": 0}, "--router-config.online_memory"),
        ({"noise": -1}, "--router-config.noise"),
        ({"slo_classes": {"t": {"ttft_ms": -1}}}, "--router-config.slo_classes"),
        ({"slo_classes": {"t": {"tfft_ms": 1}}}, "unknown field `tfft_ms`"),
        ({"default_slo": "t"}, "'t' that --router-config 'default_slo' names"),
        ({"defaults": {"m\n": {"slo": "t"}}}, "slo_classes (none)"),
        ({"defaults": {"m": {"output_tokens": 0}}}, "--router-config.defaults"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError) as error:
        parse(config)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "3", "[1]", '"x"', "{'prefill': 2}"])
def test_what_is_no_json_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match=r"--router-config\.prefill 2"):
        parse_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(HELP)) | st.text(), json_values))
def test_no_configuration_ends_in_anything_but_options_or_one_line(
    config: dict[str, object],
) -> None:
    try:
        said = repr(parse(config))
    except OptionError as error:
        said = str(error)
    assert "\n" not in said


def test_costs_follow_the_engines_where_nothing_was_measured() -> None:
    assert parse({}).calibrates
    assert not parse({"profile": "a40-qwen2.5-3b"}).calibrates
    assert parse({"profile": "a40-qwen2.5-3b", "calibration": "on"}).calibrates
    assert not parse({"calibration": "off"}).calibrates
