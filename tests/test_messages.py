from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.messages import message
from vllm_calrouter import messages
from vllm_calrouter.messages import (
    MOST_BYTES,
    MOST_ROUTERS,
    MOST_TIMINGS,
    VERSION,
    EngineMessage,
    MessageError,
    StepTiming,
    Transfer,
    VersionError,
    decode,
    encode,
)

counts = st.integers(0, (1 << 48) - 1)
numbers = st.integers(0, (1 << 63) - 1)
seconds = st.floats(0, 1e9, exclude_max=True)
NUMBERS = {"incarnation", "sequence", "transfer_bytes"}
OTHERS: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(["prefill", "decode", "both"]),
    "block_tokens": st.integers(1, 1 << 20),
    "transfer_s": seconds,
    "step_age_s": seconds,
    "recent_transfers": st.lists(
        st.builds(Transfer, seconds, counts), max_size=MOST_TIMINGS
    ),
    "recent_steps": st.lists(
        st.builds(StepTiming, counts, counts, counts, seconds, counts),
        max_size=MOST_TIMINGS,
    ),
    "seen": st.dictionaries(st.text(min_size=1, max_size=64), numbers, max_size=9),
}
made = st.builds(
    EngineMessage,
    **{
        name: OTHERS.get(name, numbers if name in NUMBERS else counts)
        for name in EngineMessage.__struct_fields__
    },
)


@given(made)
def test_every_message_survives_the_wire(sent: EngineMessage) -> None:
    assert decode(encode(sent)) == sent


@given(st.binary(max_size=300))
def test_no_bytes_end_in_anything_but_a_message_or_the_error(data: bytes) -> None:
    with suppress(MessageError):
        assert isinstance(decode(data), EngineMessage)


@given(made, st.data())
def test_a_message_with_bytes_changed_is_one_or_the_error(
    sent: EngineMessage, data: st.DataObject
) -> None:
    spoilt = bytearray(encode(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(spoilt) - 1))
        spoilt[place] = data.draw(st.integers(0, 255))
    spoilt = spoilt[: data.draw(st.integers(0, len(spoilt)))]
    with suppress(MessageError):
        assert isinstance(decode(bytes(spoilt)), EngineMessage)


def fields(**changes: Any) -> list[Any]:
    """A message as the plain array that is on the wire."""
    sent = message()
    for name, value in changes.items():
        setattr(sent, name, value)
    array: list[Any] = msgspec.msgpack.decode(encode(sent))
    return array


def test_fields_a_newer_engine_appends_are_ignored() -> None:
    longer = [*fields(), {"new": [1, 2]}, None, 3.5]
    assert decode(msgspec.msgpack.encode(longer)) == message()


@pytest.mark.parametrize("version", [0, VERSION + 1, -1, 1 << 40])
def test_another_version_is_told_from_garbage(version: int) -> None:
    other = [version, *fields()[1:]]
    with pytest.raises(VersionError, match=str(version)):
        decode(msgspec.msgpack.encode(other))


def test_another_version_may_look_quite_different() -> None:
    with pytest.raises(VersionError):
        decode(msgspec.msgpack.encode([VERSION + 1]))


WRONG = [
    {"rank": -1},
    {"rank": "0"},
    {"role": "idle"},
    {"running": 1 << 62},
    {"sequence": 1 << 63},
    {"block_tokens": 0},
    {"step_age_s": math.nan},
    {"step_age_s": math.inf},
    {"transfer_s": -1.0},
    {"recent_steps": [[1, 2, 3, 0.5]]},
    {"recent_steps": [[0, 0, 0, 0.0, 0]] * (MOST_TIMINGS + 1)},
    {"seen": {"r": -1}},
    {"seen": {"": 1}},
    {"seen": {str(n): 1 for n in range(MOST_ROUTERS + 1)}},
]


@pytest.mark.parametrize("changes", WRONG, ids=lambda c: next(iter(c)))
def test_figures_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as error:
        decode(msgspec.msgpack.encode(fields(**changes)))
    assert not isinstance(error.value, VersionError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        encode(message())[:-1],
        encode(message()) + b"\x00",
        b"\x91" * 60_000,
        # Arrays and maps that say they hold 2**32 - 1 entries.
        b"\xdd\xff\xff\xff\xff",
        encode(message()).replace(
            msgspec.msgpack.encode([[0, 0, 0, 0.0, 0]]), b"\xdd\xff\xff\xff\xff"
        ),
        encode(message()) + bytes(MOST_BYTES),
    ],
    ids=["empty", "nil", "short", "long", "deep", "huge", "huge list", "too big"],
)
def test_garbage_is_the_error(data: bytes) -> None:
    with pytest.raises(MessageError) as error:
        decode(data)
    assert not isinstance(error.value, VersionError)


def test_a_message_is_data_only_and_short() -> None:
    sent = message(seen={f"{n:016x}": 1 << 40 for n in range(6)})
    assert len(encode(sent)) < 1000
    assert struct.unpack_from(">B", encode(sent))[0] >> 4 in (0x9, 0xD)
    assert "pickle" not in vars(messages)
