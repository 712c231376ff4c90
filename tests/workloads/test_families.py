"""Seeded workload families."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.workloads import (
    FAMILIES,
    Arrival,
    WorkloadError,
    generate,
    with_hints,
)
from vllm_calrouter.workloads.families import Burst, Lengths

FAMILY = pytest.mark.parametrize("name", list(FAMILIES))


@FAMILY
def test_the_same_seed_draws_the_same_requests(name: str) -> None:
    assert generate(name, seed=7) == generate(name, seed=7)
    assert generate(name, seed=7) != generate(name, seed=8)


@FAMILY
def test_arrivals_come_in_order_at_the_rate_asked_for(name: str) -> None:
    made = generate(name, rate=20, duration_s=300, seed=3)
    times = [one.arrival_s for one in made]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 300
    # Poisson: 6,000 expected, standard deviation 77.
    assert len(made) == pytest.approx(6_000, abs=400)


@FAMILY
def test_lengths_stay_in_their_ranges(name: str) -> None:
    kinds = FAMILIES[name].kinds
    for one in generate(name, duration_s=60):
        assert any(
            kind.prompt.least <= one.prompt_tokens <= kind.prompt.most
            and kind.output.least <= one.output_tokens <= kind.output.most
            for kind in kinds
        )


def test_families_stress_what_they_are_said_to() -> None:
    def mean(name: str, field: str) -> float:
        made = generate(name, duration_s=300)
        return statistics.fmean(getattr(one, field) for one in made)

    assert mean("docs", "prompt_tokens") > 4 * mean("chat", "prompt_tokens")
    assert mean("reasoning", "output_tokens") > 4 * mean("chat", "output_tokens")
    assert mean("docs", "output_tokens") < mean("chat", "output_tokens")


def test_without_bursts_arrivals_are_a_poisson_process() -> None:
    def dispersion(burst_factor: float | None) -> float:
        made = generate("chat", duration_s=600, seed=5, burst_factor=burst_factor)
        counts = [0] * 600
        for one in made:
            counts[int(one.arrival_s)] += 1
        return statistics.variance(counts) / statistics.fmean(counts)

    assert dispersion(1.0) == pytest.approx(1.0, abs=0.25)
    assert dispersion(None) > 3
    for factor in (0.5, float("nan")):
        with pytest.raises(WorkloadError, match="burst factor"):
            generate("chat", burst_factor=factor)


def test_another_rate_does_not_draw_other_lengths() -> None:
    slow, fast = generate("mixed", rate=5), generate("mixed", rate=50)
    for a, b in zip(slow, fast, strict=False):
        assert (a.prompt_tokens, a.output_tokens) == (b.prompt_tokens, b.output_tokens)
        assert a.slo == b.slo


def test_arrivals_are_burstier_than_poisson() -> None:
    made = generate("mixed", rate=20, duration_s=600)
    counts = [0] * 600
    for one in made:
        counts[int(one.arrival_s)] += 1
    assert statistics.variance(counts) > 2 * statistics.fmean(counts)


def test_a_burst_lasts_its_share_of_the_time() -> None:
    import random

    burst = Burst(factor=3.0, share=0.25, mean_s=1.0)
    pieces = burst._pieces(10_000, random.Random(1))
    assert sum(length for length, _ in pieces) == pytest.approx(10_000)
    bursting = sum(length for length, factor in pieces if factor == 3.0)
    assert bursting / 10_000 == pytest.approx(0.25, abs=0.03)


def test_classes_come_half_and_half_or_as_asked() -> None:
    made = generate("chat", rate=50, duration_s=100)
    tight = sum(one.slo == "tight" for one in made) / len(made)
    assert tight == pytest.approx(0.5, abs=0.05)
    only = generate("chat", slo_mix={"gold": 1, "lead": 0})
    assert {one.slo for one in only} == {"gold"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "mixd"}, "did you mean 'mixed'"),
        ({"name": "zzz"}, "known: mixed"),
        ({"rate": 0}, "rate"),
        ({"rate": -3}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"duration_s": 0}, "duration"),
        ({"duration_s": float("inf")}, "duration"),
        ({"rate": 1e5, "duration_s": 1e5}, "shorter"),
        ({"rate": 0.001, "duration_s": 0.001}, "nothing arrives"),
        ({"slo_mix": {}}, "SLO mix"),
        ({"slo_mix": {"tight": -1}}, "SLO mix"),
        ({"slo_mix": {"tight": 0.0}}, "SLO mix"),
    ],
)
def test_a_wrong_wish_is_one_clear_line(changes: dict[str, object], said: str) -> None:
    wishes = {"name": "mixed", **changes}
    with pytest.raises(WorkloadError, match=said) as caught:
        generate(**wishes)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(median=st.floats(1, 1e4), spread=st.floats(0, 2), least=st.integers(1, 100))
def test_lengths_are_cut_to_their_range(
    median: float, spread: float, least: int
) -> None:
    import random

    lengths = Lengths(median, spread, least, least + 50)
    assert least <= lengths.draw(random.Random(0)) <= least + 50


def test_hints_are_the_truth_unless_an_error_is_asked_for() -> None:
    made = generate("chat", rate=50, duration_s=200)
    assert all(one.hinted_tokens == 0 for one in made)
    assert all(o.hinted_tokens == o.output_tokens for o in with_hints(made))
    noisy = [o.hinted_tokens / o.output_tokens for o in with_hints(made, error=0.5)]
    assert statistics.fmean(noisy) == pytest.approx(1, abs=0.05)
    assert statistics.stdev(noisy) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(WorkloadError, match="length error"):
        with_hints(made, error=-1)


def test_prompts_share_what_their_names_say_and_nothing_else() -> None:
    a = Arrival(0, 10, 1, prefix=(5, 6), prefix_block_tokens=4).prompt(1)
    b = Arrival(0, 10, 1, prefix=(5, 7), prefix_block_tokens=4).prompt(2)
    assert len(a) == len(b) == 10
    assert a[:4] == b[:4]
    assert not set(a[4:]) & set(b[4:])
    assert len(Arrival(0, 3, 1, prefix=(5, 6), prefix_block_tokens=4).prompt(1)) == 3
