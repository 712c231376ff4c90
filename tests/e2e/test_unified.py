"""Every engine does both: placement only."""

from __future__ import annotations

from collections import Counter

import httpx

from tests.e2e.talk import Server, prompt_ids


def test_round_robin_is_exactly_even(unified: Server) -> None:
    before = len(unified.journal_lines())
    for seed in range(12):
        unified.complete(prompt_ids(5, seed), max_tokens=2)
    lines = unified.journal_lines(before + 12)[before:]
    assert Counter(line["decode_rank"] for line in lines) == {0: 6, 1: 6}
    assert {line["one_leg"] for line in lines} == {None}


def test_no_kv_connector_and_no_roles(unified: Server) -> None:
    assert [e["kv_role"] for e in unified.state()["engines"]] == [None, None]


def test_engine_asked_for_is_engine_used(unified: Server) -> None:
    before = len(unified.journal_lines())
    for _ in range(3):
        unified.complete(prompt_ids(5), rank=1, max_tokens=2)
    lines = unified.journal_lines(before + 3)[before:]
    assert [line["decode_rank"] for line in lines] == [1, 1, 1]


def test_state_page_asks_for_the_server_s_key(unified: Server) -> None:
    url = f"{unified.cluster.url}/router/state"
    assert httpx.get(url).status_code == 401
    wrong = {"Authorization": "Bearer wrong"}
    assert httpx.get(url, headers=wrong).status_code == 401


def test_nothing_is_held_afterwards(unified: Server) -> None:
    assert unified.settle() == ""
