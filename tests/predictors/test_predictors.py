"""Every predictor by its name, as a router makes it."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.options import PREDICTORS as NAMES
from vllm_calrouter.options import parse
from vllm_calrouter.predictors import PREDICTORS, Features, Predictor, make_predictor

EXPERIMENTS = ("constant", "oracle", "noisy")


def named(name: str, **options: Any) -> Predictor:
    return make_predictor(parse({"predictor": name, **options}))


def about(**known: Any) -> Features:
    return Features(**{"prior_tokens": 256, "prompt_tokens": 100, **known})


def test_the_names_are_those_of_the_options() -> None:
    assert set(NAMES) == set(PREDICTORS)
    for name in NAMES:
        assert named(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_client_s_figure_wins_except_in_experiments(name: str) -> None:
    predictor = named(name)
    hinted = about(hint_tokens=77, true_tokens=1000)
    said = predictor.predict(hinted)
    if name in EXPERIMENTS:
        assert (said != 77, predictor.source(hinted)) == (True, name)
    else:
        assert (said, predictor.source(hinted)) == (77, "hint")
        assert predictor.source(about()) == name


@pytest.mark.parametrize("name", NAMES)
def test_limits_of_the_request_hold(name: str) -> None:
    predictor = named(name)
    assert predictor.predict(about(hint_tokens=500, true_tokens=500, max_tokens=9)) <= 9
    low = about(hint_tokens=2, true_tokens=2, min_tokens=3000, max_tokens=4000)
    assert predictor.predict(low) >= 3000
    assert predictor.remaining(low, 10) >= 2990


@pytest.mark.parametrize("name", ["hint", "constant", "online"])
def test_without_anything_known_it_is_the_configured_length(name: str) -> None:
    assert named(name).predict(about()) == pytest.approx(256, rel=0.01)


def test_max_tokens_is_what_the_request_allows() -> None:
    assert named("max_tokens").predict(about(max_tokens=999)) == 999
    assert named("max_tokens").predict(about()) == 256


def test_the_oracle_is_right_all_the_way() -> None:
    oracle = named("oracle")
    asked = about(true_tokens=123)
    assert oracle.predict(asked) == 123
    assert oracle.remaining(asked, 100) == 23


def test_a_figure_that_was_outgrown_says_nothing_more() -> None:
    hint = named("hint")
    asked = about(hint_tokens=10)
    assert hint.remaining(asked, 4) == 6
    assert hint.remaining(asked, 10) == 246
    online = named("online")
    for _ in range(2000):
        online.finished(about(), 300, "stop")
    assert online.remaining(asked, 10) == pytest.approx(290, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0])
def test_noise_has_the_size_asked_for_and_no_bias(noise: float) -> None:
    noisy = named("noisy", noise=noise)
    said = [
        noisy.predict(about(true_tokens=100_000, number=number)) / 100_000
        for number in range(20_000)
    ]
    assert statistics.fmean(said) == pytest.approx(1, abs=0.03)
    assert statistics.pstdev(said) == pytest.approx(noise, rel=0.1)


def test_noise_comes_again_with_its_seed_and_in_any_order() -> None:
    def draws(seed: int, numbers: range, index: int = 0) -> dict[int, int]:
        options = parse({"predictor": "noisy", "noise_seed": seed})
        noisy = make_predictor(options, index)
        return {n: noisy.predict(about(true_tokens=10**6, number=n)) for n in numbers}

    there = draws(1, range(50))
    assert draws(1, range(49, -1, -1)) == there
    assert draws(2, range(50)) != there
    # Routers of one server do not err alike.
    assert draws(1, range(50), index=1) != there


lengths = st.none() | st.integers(1, 10**7)


@given(
    name=st.sampled_from(NAMES),
    hint=lengths,
    true=lengths,
    most=lengths,
    least=st.integers(0, 100),
    prompt=st.integers(0, 10**7),
    produced=st.integers(0, 10**7),
    finish=st.sampled_from(["stop", "length", "abort", "error", "repetition", "?"]),
)
def test_no_request_ends_in_anything_but_a_positive_length(
    name: str,
    hint: int | None,
    true: int | None,
    most: int | None,
    least: int,
    prompt: int,
    produced: int,
    finish: str,
) -> None:
    asked = about(
        hint_tokens=hint,
        true_tokens=true,
        max_tokens=most,
        min_tokens=min(least, most or least),
        prompt_tokens=prompt,
    )
    predictor = named(name)
    for _ in range(3):
        assert 1 <= predictor.predict(asked) <= (most or 10**12)
        assert predictor.remaining(asked, produced) >= 1
        predictor.finished(asked, produced, finish)
