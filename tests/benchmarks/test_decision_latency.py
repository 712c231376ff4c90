"""The benchmark of choices, at small sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import decision_latency
from benchmarks.decision_latency import (
    DEADLINE,
    Run,
    costs_of,
    measure,
    script_of,
    split,
)


def test_all_versions_choose_alike_and_not_always_the_same() -> None:
    runs = measure(6, choices=300)
    assert set(runs) == {
        "C++",
        "C++, all new",
        DEADLINE,
        "binding",
        "decide",
        "NumPy",
        "Python",
    }
    picks = runs["C++"].picks
    assert len(picks) == len(runs["C++"].seconds) == 300
    assert {p for p, _ in picks} == {0, 1}
    assert {d for _, d in picks} == {2, 3, 4, 5}
    assert len(runs.pop(DEADLINE).picks) == 300
    assert all(run.picks == picks[: len(run.picks)] for run in runs.values())
    assert all(seconds > 0 for run in runs.values() for seconds in run.seconds)


def test_a_version_that_chooses_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs_of(engines: int, choices: int, seed: int) -> Iterator[tuple[str, Run]]:
        yield "C++", Run([(0, 1), (0, 2)], [1e-6, 1e-6])
        yield DEADLINE, Run([(0, 5), (0, 5)], [1e-6, 1e-6])
        yield "Python", Run([(0, 1), (0, 3)], [1e-6, 1e-6])

    monkeypatch.setattr(decision_latency, "runs_of", runs_of)
    with pytest.raises(AssertionError, match="Python"):
        measure(6)


def test_splits_are_two_of_six_and_quarters() -> None:
    assert [split(n) for n in decision_latency.SIZES] == [2, 16, 256]


def test_a_seed_is_a_script() -> None:
    assert script_of(8, 50, seed=1) == script_of(8, 50, seed=1)
    assert script_of(8, 50, seed=1) != script_of(8, 50, seed=2)
    assert len({cost.decode_base_s for cost in costs_of(8, seed=1)}) == 8
