"""What engines tell arrives at every router."""

from __future__ import annotations

import time
from typing import Any

from tests.e2e.talk import Server, prompt_ids

ROLES = ["prefill", "prefill", "decode", "decode"]
ROUTERS = 3

#: A failing test's time. Engines tell what changed within milliseconds.
PATIENCE_S = 60.0


def states(server: Server) -> dict[int, dict[str, Any]]:
    """The state page of every API server; each answer is of any one of them."""
    found: dict[int, dict[str, Any]] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < ROUTERS and time.monotonic() < deadline_s:
        state = server.state()
        found[state["router"]] = state
    assert set(found) == set(range(ROUTERS))
    return found


def test_every_router_has_heard_every_engine(split: Server) -> None:
    for seed in range(12):
        split.complete(prompt_ids(40, seed), max_tokens=4)
    for state in states(split).values():
        heard = state["heard"]
        assert [engine["rank"] for engine in heard] == [0, 1, 2, 3]
        assert [engine["role"] for engine in heard] == ROLES
        assert all(engine["age_s"] < PATIENCE_S for engine in heard)


def test_engines_say_of_themselves_what_they_hold(split: Server) -> None:
    assert split.settle() == ""
    state = split.state()
    for told, held in zip(state["heard"], state["engines"], strict=True):
        assert told["kv_total_blocks"] == held["kv_total_blocks"]
        assert told["max_seqs"] == held["max_num_seqs"]
        assert told["block_tokens"] == 32


def test_an_idle_engine_is_heard_to_be_idle(split: Server) -> None:
    split.complete(prompt_ids(40, 77), max_tokens=4)
    deadline_s = time.monotonic() + PATIENCE_S
    while busy := [
        (engine["rank"], name)
        for engine in split.state()["heard"]
        for name in (
            "running",
            "waiting",
            "waiting_remote",
            "prefill_tokens",
            "output_tokens",
            "kv_pinned_blocks",
        )
        if engine[name]
    ]:
        assert time.monotonic() < deadline_s, busy


def test_each_router_s_bookings_are_echoed_to_it(split: Server) -> None:
    # Each router's warm-up alone books on all engines.
    first = states(split)
    assert len({state["uid"] for state in first.values()}) == ROUTERS
    for state in first.values():
        assert all(engine["booking_seen"] > 0 for engine in state["heard"])
    for seed in range(100, 130):
        split.complete(prompt_ids(40, seed), max_tokens=2)
    later = states(split)
    echoed = [
        sum(engine["booking_seen"] for engine in state["heard"])
        for states_now in (first, later)
        for state in states_now.values()
    ]
    assert sum(echoed[ROUTERS:]) > sum(echoed[:ROUTERS])


def test_steps_and_transfers_are_timed(split: Server) -> None:
    split.complete(prompt_ids(300, 5), max_tokens=20)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        heard = split.state()["heard"]
        if all(engine["steps"] for engine in heard) and any(
            engine["transfers"] for engine in heard
        ):
            break
        assert time.monotonic() < deadline_s
    for engine in heard:
        assert all(step["seconds"] > 0 for step in engine["recent_steps"])
    prefill, decode = heard[:2], heard[2:]
    assert all(engine["transfers"] == 0 for engine in prefill)
    assert sum(engine["transfer_bytes"] for engine in decode) > 0
    assert any(
        step["prefill_tokens"] for engine in prefill for step in engine["recent_steps"]
    )
    assert any(
        step["decode_seqs"] for engine in decode for step in engine["recent_steps"]
    )


def test_messages_and_silence_are_in_the_metrics(split: Server) -> None:
    name = "vllm:calrouter_messages_total"
    for rank in range(4):
        assert split.metric(name, engine=str(rank), outcome="heard") > 0
        for outcome in ("garbage", "wrong_version", "wrong_rank"):
            assert split.metric(name, engine=str(rank), outcome=outcome) == 0
    deadline_s = time.monotonic() + PATIENCE_S
    silence = "vllm:calrouter_engine_silence_seconds"
    while max(split.metric(silence, engine=str(rank)) for rank in range(4)) > 5.0:
        assert time.monotonic() < deadline_s
