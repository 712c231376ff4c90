"""Every engine does both: placement only, and a server whose engine dies."""

from __future__ import annotations

import threading
from collections import Counter

import httpx

from tests.e2e.talk import Server, prompt_ids


def test_round_robin_is_exactly_even(unified: Server) -> None:
    before = len(unified.journal_lines())
    for seed in range(12):
        unified.complete(prompt_ids(5, seed), max_tokens=2)
    lines = unified.journal_lines(before + 12)[before:]
    assert Counter(line["decode_rank"] for line in lines) == {0: 6, 1: 6}
    assert {line["one_leg"] for line in lines} == {"unified"}


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


def test_engine_death_fails_what_runs_and_ends_the_server(unified: Server) -> None:
    """The last test of this server: vLLM stops when an engine dies."""
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": prompt_ids(5), "max_tokens": 4000}
        try:
            answer = unified.http.post(
                "/v1/completions", json={**body, "ignore_eos": True}
            )
            answers.append(answer.status_code)
        except httpx.HTTPError:
            answers.append(0)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    while unified.state()["requests_under_way"] < 4:
        pass
    (engine,) = (
        process
        for process in unified.cluster.processes()
        if "EngineCore_DP1" in process.name() or "DP1" in " ".join(process.cmdline())
    )
    engine.kill()
    for thread in asking:
        thread.join(timeout=60)
    assert len(answers) == 4, "a request hangs"
    assert not any(status == 200 for status in answers)
    unified.cluster.wait_for_exit(60)
    assert "died unexpectedly" in unified.cluster.log.read_text()
