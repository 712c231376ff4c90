from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest

from vllm_calrouter.predictors import Features
from vllm_calrouter.predictors.online import Online


def about(**known: Any) -> Features:
    settings = {"prior_tokens": 256, "prompt_tokens": 100, "model": "m", **known}
    return Features(**settings)


def taught(*lessons: tuple[Features, int], rounds: int = 400) -> Online:
    online = Online(500, 1000)
    for _ in range(rounds):
        for features, tokens in lessons:
            online.finished(features, tokens, "stop")
    return online


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "a"}, {"model": "b"}),
        ({"adapter": "x"}, {}),
        ({"route": "chat"}, {"route": "completions"}),
        ({"tools": True}, {}),
        ({"reasoning": "high"}, {"reasoning": "low"}),
        ({"structured": True}, {}),
        ({"prompt_tokens": 10}, {"prompt_tokens": 5000}),
        ({"user": "u"}, {"user": "v"}),
    ],
)
def test_kinds_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    online = taught((about(**one), 20), (about(**other), 900))
    assert online.predict(about(**one)) == pytest.approx(20, rel=0.4)
    assert online.predict(about(**other)) == pytest.approx(900, rel=0.1)


def test_a_new_kind_starts_from_the_nearest_wider_one() -> None:
    chat = about(route="chat")
    online = taught((chat, 40), (about(route="completions"), 800))
    assert online.predict(about(route="chat", user="new")) == online.predict(chat)
    # Prompts of another size: the same use; another use: the same model.
    assert online.predict(about(route="chat", prompt_tokens=9000)) == pytest.approx(
        40, rel=0.25
    )
    assert 100 < online.predict(about(route="responses")) < 700
    assert online.predict(about(model="other")) == pytest.approx(256, rel=0.01)


def test_it_follows_a_change() -> None:
    online = Online(100, 1000)
    for tokens in [800] * 500 + [50] * 500:
        online.finished(about(), tokens, "stop")
    assert online.predict(about()) == pytest.approx(50, rel=0.3)


@pytest.mark.parametrize("finish", ["abort", "length"])
def test_outputs_cut_off_are_no_lessons_of_shortness(finish: str) -> None:
    online = Online(500, 1000)
    for _ in range(200):
        online.finished(about(), 1000, "stop")
        online.finished(about(), 10, finish)
    assert online.predict(about()) == pytest.approx(1000, rel=0.05)


def test_an_abort_after_stop_strings_is_an_end() -> None:
    online = Online(500, 1000)
    for _ in range(500):
        online.finished(about(stops=True), 10, "abort")
    assert online.predict(about(stops=True)) == pytest.approx(10, rel=0.3)


def test_outputs_that_always_fill_their_limit_are_expected_to() -> None:
    online = Online(500, 1000)
    for _ in range(500):
        online.finished(about(max_tokens=128), 128, "length")
    assert online.predict(about(max_tokens=128)) == pytest.approx(128, rel=0.03)


def test_an_error_or_nothing_teaches_nothing() -> None:
    online = Online(500, 1000)
    online.finished(about(), 10, "error")
    online.finished(about(), 0, "abort")
    assert len(online) == 0


def test_memory_is_bounded_and_the_wide_kinds_stay() -> None:
    online = Online(500, 50)
    for number in range(5000):
        online.finished(about(user=f"u{number}"), 30, "stop")
        assert len(online) <= 50
    assert online.predict(about()) == pytest.approx(30, rel=0.25)


def test_it_beats_a_constant_where_kinds_differ() -> None:
    draw = random.Random(3)

    def request() -> tuple[Features, int]:
        user = draw.randrange(8)
        tokens = 1 + int(draw.lognormvariate(3 + user / 2, 0.5))
        return about(user=str(user)), tokens

    online = Online(500, 1000)
    for _ in range(4000):
        online.finished(*request(), "stop")
    fresh = [request() for _ in range(2000)]
    mean = fmean(tokens for _, tokens in fresh)
    error = fmean(abs(online.predict(f) - tokens) for f, tokens in fresh)
    # The constant is even given the true mean.
    assert error < 0.6 * fmean(abs(mean - tokens) for _, tokens in fresh)
