"""What is kept of single requests."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.study import measure
from benchmarks.study.measure import SHARES, measured, timeline


def request(arrival_s: float, ttft_s: float = 0.1, good: bool = True) -> dict[str, Any]:
    return {"arrival_s": arrival_s, "ttft_s": ttft_s, "good": good}


def test_a_point_of_the_timeline_has_those_who_came_before_it() -> None:
    line = timeline([request(1.0, 0.3, False), request(4.5, 0.1), request(7.0, 0.2)])
    assert line["at_s"] == [5.0, 6.0, 7.0]
    assert line["rate"] == [2 / 5, 1 / 5, 2 / 5]
    assert line["goodput"] == [0.5, 1.0, 1.0]
    assert line["ttft_p95_s"] == pytest.approx([0.29, 0.1, 0.195])


def test_a_time_in_which_nobody_came_has_no_figures() -> None:
    line = timeline([request(0.5), request(20.0)])
    assert line["goodput"][1] is None
    assert line["ttft_p95_s"][1] is None
    assert line["rate"][1] == 0


def test_a_run_keeps_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(arguments: str) -> dict[str, Any]:
        file = arguments.split()[-1]
        with open(file, "w") as lines:
            for n in range(11):
                lines.write(
                    f'{{"arrival_s": {n}, "ttft_s": {(7 * n) % 11}, "good": true}}\n'
                )
        return {"goodput": 1.0}

    monkeypatch.setattr(measure, "simulated", simulated)
    figures = measured("--workload mixed")
    waits = dict(zip(SHARES, figures["ttft_at_shares_s"], strict=True))
    assert (waits[0.0], waits[0.5], waits[1.0]) == (0.0, 5.0, 10.0)
    assert figures["goodput"] == 1.0
