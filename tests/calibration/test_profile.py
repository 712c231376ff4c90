"""Profiles: what a file may say, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.calibration import (
    EngineCosts,
    ProfileError,
    SloClass,
    load,
    save,
    shipped,
)
from vllm_calrouter.calibration.profile import _BOUNDS

A40 = "a40-qwen2.5-3b"


def written(**changes: Any) -> dict[str, Any]:
    """The shipped profile as plain data; a change of None drops a field."""
    data: dict[str, Any] = msgspec.to_builtins(load(A40))
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return data


def refusal(tmp_path: Path, text: bytes) -> str:
    file = tmp_path / "mine.json"
    file.write_bytes(text)
    with pytest.raises(ProfileError) as caught:
        load(file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_shipped_a40_gives_back_the_printed_figures() -> None:
    profile = load(A40)
    costs = profile.costs
    alone = costs.step_s(0, 0, 1, 512)
    assert alone == pytest.approx(13.237e-3, rel=1e-6)
    assert costs.step_s(0, 0, 8, 8 * 512) / alone == pytest.approx(1.029, rel=1e-6)
    assert costs.prefill_s(512) == pytest.approx(66.7e-3, rel=1e-4)
    assert costs.kv_bytes_per_token == 36_864
    assert costs.kv_capacity_tokens == 60_000
    tight, loose = profile.slo["tight"], profile.slo["loose"]
    assert (tight.ttft_s, tight.tpot_s) == (0.175, 0.0397)
    assert loose.ttft_s == pytest.approx(3 * tight.ttft_s)
    assert loose.tpot_s == pytest.approx(3 * tight.tpot_s)
    measured = {name for name in EngineCosts.__struct_fields__ if "far" not in name}
    assert set(profile.notes) == measured


def test_every_shipped_profile_loads() -> None:
    assert A40 in shipped()
    for name in shipped():
        load(name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"costs__prefill_base_s": -1.0}, "prefill_base_s"),
        ({"costs__decode_base_s": 0.0}, "decode_base_s"),
        ({"costs__prefill_per_token_s": 103.0}, "prefill_per_token_s"),
        ({"costs__kv_bytes_per_token": 1.5}, "kv_bytes_per_token"),
        ({"costs__transfer_bytes_per_s": "fast"}, "transfer_bytes_per_s"),
        ({"costs__decode_per_seq_s": None}, "decode_per_seq_s"),
        ({"costs__decode_per_request_s": 1.0}, "decode_per_request_s"),
        ({"speed": 3}, "speed"),
        ({"slo": {}}, "slo"),
        ({"slo__tight__ttft_s": 0}, "ttft_s"),
        ({"slo__tight__tpot_ms": 40}, "tpot_ms"),
        ({"schema": 2}, "schema"),
        ({"date": "yesterday"}, "date"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"standard_errors": {"decode_base": 0.1}}, "standard_errors"),
        ({"standard_errors": {"decode_base_s": -0.1}}, "decode_base_s"),
        ({"role_costs": {"both": {}}}, "role_costs"),
        ({"gpu": None}, "gpu"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    text = json.dumps(written(**changes)).encode()
    assert named in refusal(tmp_path, text)


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity"])
def test_what_is_no_number_is_refused(tmp_path: Path, number: bytes) -> None:
    text = json.dumps(written(costs__decode_base_s=123.456)).encode()
    refusal(tmp_path, text.replace(b"123.456", number))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_constants_are_checked_without_a_file_too(value: float) -> None:
    costs = msgspec.to_builtins(load(A40).costs)
    with pytest.raises(ValueError, match="decode_per_seq_s"):
        EngineCosts(**{**costs, "decode_per_seq_s": value})


def test_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=f"did you mean '{A40}'"):
        load("a40-qwen2.5")
    with pytest.raises(ProfileError, match=A40):
        load(tmp_path / "nothing-alike")


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        load(tmp_path)
    assert "larger" in refusal(tmp_path, b" " * 1_000_001)
    refusal(tmp_path, b"")
    refusal(tmp_path, b"\xff\xfe")
    refusal(tmp_path, b"[" * 100_000)


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be written"):
        save(load(A40), tmp_path / "missing" / "p.json")
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=300))
def test_no_bytes_crash_it(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "p.json"
    file.write_bytes(text)
    with pytest.raises(ProfileError):
        load(file)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=5,
)


@given(st.data())
def test_no_field_s_value_crashes_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    profile = written()
    place = data.draw(st.sampled_from([profile, profile["costs"], profile["slo"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(_JSON)
    file = tmp_path_factory.mktemp("fuzz") / "p.json"
    file.write_text(json.dumps(profile))
    assert outcome(file)


def outcome(file: Path) -> object:
    """The profile, or whether one line says why there is none."""
    try:
        return load(file)
    except ProfileError as error:
        return "\n" not in str(error)


def _constant(name: str) -> st.SearchStrategy[float | int]:
    low, high = _BOUNDS[name]
    if isinstance(low, int):
        return st.integers(low, int(high))
    return st.floats(low, high)


_COSTS = st.builds(EngineCosts, **{name: _constant(name) for name in _BOUNDS})


@given(costs=_COSTS, ttft_s=st.floats(1e-3, 10), note=st.text())
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    costs: EngineCosts,
    ttft_s: float,
    note: str,
) -> None:
    profile = msgspec.structs.replace(
        load(A40),
        costs=costs,
        role_costs={"prefill": costs},
        slo={"any": SloClass(ttft_s, 0.1)},
        notes={"decode_base_s": note},
    )
    file = tmp_path_factory.mktemp("saved") / "p.json"
    save(profile, file)
    assert load(file) == profile


def test_a_role_s_costs_take_the_place_of_the_common_ones() -> None:
    profile = load(A40)
    fast = profile.costs.faster(2)
    profile = msgspec.structs.replace(profile, role_costs={"prefill": fast})
    assert profile.costs_of(prefill=True) == fast
    assert profile.costs_of(prefill=False) == profile.costs


def test_chunks_cost_their_prompt_but_for_the_bases() -> None:
    costs = load(A40).costs
    first = costs.step_s(300, 300**2, 0, 0)
    second = costs.step_s(200, 500**2 - 300**2, 0, 0)
    whole = costs.prefill_s(500)
    assert first + second - costs.prefill_base_s == pytest.approx(whole)


def test_a_mixed_step_reads_the_weights_once() -> None:
    costs = load(A40).costs
    apart = costs.prefill_s(100) + costs.step_s(0, 0, 4, 2_000)
    base = min(costs.prefill_base_s, costs.decode_base_s)
    mixed = costs.step_s(100, 100**2, 4, 2_000)
    assert mixed == pytest.approx(apart - base)


def test_a_faster_engine_has_the_same_memory_and_link() -> None:
    costs = load(A40).costs
    fast = costs.faster(2)
    assert fast.prefill_s(512) == pytest.approx(costs.prefill_s(512) / 2)
    assert fast.step_s(0, 0, 8, 4_000) == pytest.approx(
        costs.step_s(0, 0, 8, 4_000) / 2
    )
    assert fast.transfer_s(512) == costs.transfer_s(512)
    with pytest.raises(ValueError, match="speed"):
        costs.faster(0)


def test_a_transfer_takes_its_base_and_its_bytes() -> None:
    costs = load(A40).costs
    moved = costs.transfer_s(1_000) - costs.transfer_s(0)
    assert moved == pytest.approx(1_000 * 36_864 / costs.transfer_bytes_per_s)
    assert costs.transfer_s(0) == costs.transfer_base_s


def test_a_long_prompt_is_promised_a_multiple_of_its_own_prefill() -> None:
    costs = load(A40).costs
    flat, scaled = SloClass(0.175, 0.04), SloClass(0.175, 0.04, 2.62)
    assert flat.ttft_target_s(8_000, costs) == 0.175
    assert scaled.ttft_target_s(10, costs) == 0.175
    assert scaled.ttft_target_s(8_000, costs) == 2.62 * costs.prefill_s(8_000)


SERVED = {
    "model": "Qwen/Qwen2.5-3B",
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "tensor_parallel": 1,
    "gpu": "NVIDIA A40",
}


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-3B", "/models/Qwen2.5-3B"])
def test_a_profile_of_what_is_served_differs_in_nothing(model: str) -> None:
    assert load(A40).unlike({**SERVED, "model": model}) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "Qwen/Qwen2.5-7B"),
        ("dtype", "float16"),
        ("kv_dtype", "fp8"),
        ("tensor_parallel", 2),
        ("gpu", "NVIDIA H100"),
    ],
)
def test_a_profile_of_something_else_says_in_what(name: str, value: Any) -> None:
    here = {**SERVED, name: value}
    its = SERVED[name]
    assert load(A40).unlike(here) == f"{name} {its}, here {value}"
