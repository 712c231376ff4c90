from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.predictors.life_table import (
    _LARGEST_UNIT,
    Curve,
    LifeTable,
    geometric,
)


def learnt(
    lengths: list[int], *, memory: int = 10**6, cut_at: int | None = None
) -> Curve:
    table = LifeTable(memory)
    for tokens in lengths:
        if cut_at is not None and tokens > cut_at:
            table.add(cut_at, ended=False)
        else:
            table.add(tokens, ended=True)
    return table.curve(geometric(256))


@pytest.mark.parametrize("mean", [20, 256, 4096])
def test_knowing_only_a_mean_expects_it_at_any_age(mean: int) -> None:
    curve = geometric(mean)
    assert curve.mean() == pytest.approx(mean, rel=0.01)
    for produced in (0, 10, mean, 3 * mean):
        assert curve.remaining(produced) == pytest.approx(mean, rel=0.15), produced


@pytest.mark.parametrize("tokens", [1, 2, 3, 47, 100, 1000, 30_000])
def test_one_length_over_and_over_is_learnt_exactly(tokens: int) -> None:
    curve = learnt([tokens] * 5000)
    assert curve.mean() == pytest.approx(tokens, rel=0.02, abs=0.3)


def test_a_spread_of_lengths_gives_their_mean_and_their_mean_rest() -> None:
    draw = random.Random(1)
    lengths = [1 + int(draw.lognormvariate(5, 1)) for _ in range(20_000)]
    curve = learnt(lengths)
    assert curve.mean() == pytest.approx(fmean(lengths), rel=0.02)
    for produced in (50, 200, 800):
        rests = [tokens - produced for tokens in lengths if tokens > produced]
        assert curve.remaining(produced) == pytest.approx(fmean(rests), rel=0.1)
    for most in (64, 200, 1000):
        limited = fmean(min(tokens, most) for tokens in lengths)
        assert curve.mean(most) == pytest.approx(limited, rel=0.05)


def test_two_kinds_of_length_show_in_the_rest() -> None:
    """Half stop early, half go on: what has passed the first is one of the second."""
    curve = learnt([20, 2000] * 2000)
    assert curve.mean() == pytest.approx(1010, rel=0.02)
    assert curve.remaining(100) == pytest.approx(1900, rel=0.02)


def test_what_is_cut_off_is_no_lesson_of_shortness() -> None:
    draw = random.Random(2)
    lengths = [1 + int(draw.expovariate(1 / 400)) for _ in range(20_000)]
    curve = learnt(lengths, cut_at=300)
    # More than half never ended; a mean of what was seen would be about 211.
    assert curve.mean(300) == pytest.approx(
        fmean(min(tokens, 300) for tokens in lengths), rel=0.05
    )
    assert curve.mean() > 300


def test_old_outputs_are_forgotten() -> None:
    curve = learnt([1000] * 500 + [30] * 1000, memory=200)
    assert curve.mean() == pytest.approx(30, rel=0.3)


def test_weights_are_scaled_down_before_they_overflow() -> None:
    table = LifeTable(1)
    for _ in range(2000):
        table.add(77, ended=True)
        assert table._unit <= _LARGEST_UNIT
    # With a memory of one output, four of the prior weigh most.
    assert 77 < table.curve(geometric(256)).mean() < 256


def test_a_few_outputs_say_little_and_many_say_all() -> None:
    errors = [abs(learnt([32] * count).mean() - 32) for count in (0, 1, 5, 50, 500)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] > 100
    assert errors[-1] < 3


outputs = st.lists(st.tuples(st.integers(1, 2**40), st.booleans()), max_size=50)


@given(outputs, st.integers(1, 10**7), st.integers(0, 2**40), st.integers(1, 2**40))
def test_whatever_came_the_curve_is_one(
    seen: list[tuple[int, bool]], prior: int, produced: int, most: int
) -> None:
    table = LifeTable(10)
    for tokens, ended in seen:
        table.add(tokens, ended=ended)
    curve = table.curve(geometric(prior))
    assert all(0 <= hazard <= 1 for hazard in curve.hazards)
    assert all(a >= b >= 0 for a, b in zip(curve.alive, curve.alive[1:], strict=False))
    assert curve.mean() > 0
    rest = curve.remaining(produced)
    assert rest is None or rest >= -1e-6 * produced
    if most < 2**20:
        assert curve.mean(most) <= min(most, curve.mean()) * (1 + 1e-9)
