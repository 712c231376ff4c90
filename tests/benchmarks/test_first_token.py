"""The benchmark's arithmetic, without servers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.first_token import (
    ASIDE,
    KINDS,
    Answer,
    Pair,
    arguments,
    joined,
    phase,
    requests,
    summary,
)


def event(text: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    choice = {"text": text, "token_ids": ids, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice]}


def answer(ttft_s: float, pause_s: float, ids: tuple[int, ...] = (1, 2)) -> Answer:
    got = Answer()
    got.take(event("a", [ids[0]]), ttft_s)
    got.take(event("b", [ids[1]], "stop"), ttft_s + pause_s)
    return got


def pair(kind: str, on: Answer, off: Answer) -> Pair:
    return Pair(kind, {}, on, off)


def test_every_kind_is_asked_and_two_sendings_are_the_same() -> None:
    asked = requests(2 * len(KINDS), seed=1)
    assert [each.kind for each in asked] == list(KINDS) * 2
    again = requests(2 * len(KINDS), seed=1)
    assert [each.body for each in asked] == [each.body for each in again]
    assert set(ASIDE) < set(KINDS)


def test_no_request_asks_for_more_than_it_may() -> None:
    for each in requests(500, seed=2):
        assert each.body.get("min_tokens", 0) <= each.body["max_tokens"]
        assert 1 <= len(each.body["prompt"]) <= 400


def test_prompts_are_as_long_as_asked_for() -> None:
    assert min(len(each.body["prompt"]) for each in requests(99, 1, 150)) >= 150


def test_pieces_do_not_matter_but_tokens_do() -> None:
    whole, parts = Answer(), answer(0.1, 0.1)
    whole.take(event("ab", [1, 2], "stop"), 0.2)
    assert joined(whole.output) == joined(parts.output)
    for other in (answer(0.1, 0.1, ids=(1, 3)), Answer()):
        assert joined(other.output) != joined(parts.output)


def test_a_finish_in_an_event_of_its_own_counts() -> None:
    late = Answer()
    late.take(event("ab", [1, 2]), 0.2)
    late.take(event("", [], "stop"), 0.3)
    assert joined(late.output) == joined(answer(0.1, 0.1).output)


def test_ratios_leave_out_what_steps_aside() -> None:
    pairs = [pair("plain", answer(1.0, 2.0), answer(4.0, 0.1)) for _ in range(3)]
    aside = pair(ASIDE[0], answer(100.0, 0.1), answer(100.0, 0.1))
    result = phase([*pairs, aside])
    assert result["ttft_ratio"] == 0.25
    assert result["pause_ms"] == {"p50": 2000.0, "p99": 2000.0}


def test_a_difference_is_counted() -> None:
    same = pair("plain", answer(1.0, 2.0), answer(4.0, 0.1))
    other = copy.deepcopy(same)
    other.off = answer(4.0, 0.1, ids=(1, 3))
    result = summary([same], [other], preempted=2)
    assert (result["identical"], result["requests"]) == (1, 2)


def test_too_few_to_hold_every_kind_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        arguments(["--low", "3"])
    assert "must be at least" in capsys.readouterr().err
