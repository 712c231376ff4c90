"""What an engine tells the routers: one message, msgpack, data only.

On the wire a message is an array: its version, then the fields in the order written
here. A newer engine may append fields, which an older router ignores; a field that
changes its meaning takes a new version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

VERSION = 2

#: Under this key a leg's `extra_args` say whose it is: {"router": uid, "booking":
#: number, "output_tokens": predicted length}. Its engine echoes the highest booking.
#: Where engines order what waits also "sent_s", the router's monotonic clock, and
#: "deadline_s", the seconds that were left then to the first token, below 0 if overdue.
BOOKING = "calrouter"

#: No message is near this; a longer one is refused unread.
MOST_BYTES = 1 << 16

#: Routers whose bookings an engine echoes, and timings that one message carries.
MOST_ROUTERS = 256
MOST_TIMINGS = 8

#: All counts fit the signed 64 bits that the load table keeps them in.
_Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: Not infinite and not "not a number", for neither compares as asked here.
_Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
_Uid = Annotated[str, Meta(min_length=1, max_length=64)]

Role = Literal["prefill", "decode", "both"]


class MessageError(ValueError):
    """Bytes that are no message of this version."""


class VersionError(MessageError):
    """A message of another version."""


class StepTiming(Struct, array_like=True, frozen=True, gc=False):
    """One engine step and what it cost.

    `prefill_tokens` were computed for prompts; `decode_seqs` sequences got their next
    token, attending to `context_tokens` tokens of KV in sum. `seconds` is the time by
    which the step made its results later: from the end of the step before where the
    engine was busy, else from its own scheduling.
    """

    prefill_tokens: _Count
    decode_seqs: _Count
    context_tokens: _Count
    seconds: _Seconds
    prefill_squares: _Count


class Transfer(Struct, array_like=True, frozen=True, gc=False):
    """One KV transfer that this engine read, as its connector measured it."""

    seconds: _Seconds
    size_bytes: _Count


class EngineMessage(Struct, array_like=True, tag=VERSION, kw_only=True, gc=False):
    """What one engine holds at the start of a step, and what its last steps cost.

    Sizes are facts: tokens, sequences, blocks. Work of a step under way counts as
    still to be done.

    Fields:
        incarnation: another one after each start of the engine.
        sequence: grows with every message of an incarnation.
        prefill_tokens: prompt tokens still to compute, waiting and running; not those
            that the prefix cache or another engine's KV cache is known to hold.
        output_tokens: predicted output tokens still to come, waiting and running, of
            requests that carry a prediction.
        context_tokens: tokens of KV in the running batch.
        running, waiting, waiting_remote: sequences, each in one of them. The last have
            their KV blocks and wait for another engine's KV cache to go in.
        kv_pinned_blocks: blocks of finished requests held for a reader; a block that
            several of them share counts for each.
        block_tokens: tokens a block holds.
        max_seqs, max_batched_tokens: what one step may hold.
        preemptions: since the start, cumulative.
        transfers_in_flight: KV caches being read from other engines now; those of
            `waiting_remote` that have not arrived.
        transfers, transfer_bytes, transfer_s: finished ones since the start.
        recent_transfers, recent_steps: the last ones, oldest first. How many are new
            to a reader follows from the growth of `transfers` and `steps`, so messages
            may be lost, or be told twice.
        steps: with work, timed, since the start.
        step_age_s: how long the step under way had been running when the message was
            sent; 0 when there was none.
        seen: by router uid, the highest booking that the figures include.
    """

    rank: _Count
    role: Role
    incarnation: _Number
    sequence: _Number
    prefill_tokens: _Count
    output_tokens: _Count
    context_tokens: _Count
    running: _Count
    waiting: _Count
    waiting_remote: _Count
    kv_total_blocks: _Count
    kv_free_blocks: _Count
    kv_pinned_blocks: _Count
    block_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    max_seqs: _Count
    max_batched_tokens: _Count
    preemptions: _Count
    transfers_in_flight: _Count
    transfers: _Count
    transfer_bytes: _Number
    transfer_s: _Seconds
    recent_transfers: Annotated[list[Transfer], Meta(max_length=MOST_TIMINGS)]
    steps: _Count
    recent_steps: Annotated[list[StepTiming], Meta(max_length=MOST_TIMINGS)]
    step_age_s: _Seconds
    seen: Annotated[dict[_Uid, _Number], Meta(max_length=MOST_ROUTERS)]


class _Head(Struct, array_like=True):
    version: Any


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineMessage)
_head = msgspec.msgpack.Decoder(_Head)


def encode(message: EngineMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> EngineMessage:
    """Read a message.

    Raises:
        VersionError: a message of another version.
        MessageError: anything else that is not a message.
    """
    if len(data) > MOST_BYTES:
        raise MessageError(f"{len(data)} bytes are no message")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        _check_version(data)
        raise MessageError(f"not a message: {error}") from None


def _check_version(data: bytes) -> None:
    try:
        version = _head.decode(data).version
    except (msgspec.MsgspecError, RecursionError):
        return
    if type(version) is int and version != VERSION:
        raise VersionError(f"a message of version {version}, not {VERSION}")
