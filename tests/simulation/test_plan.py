"""`calrouter plan`: which splits are worth having."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vllm_calrouter.simulation.plan import frontier, plan

TRAFFIC = ("--workload", "mixed", "--duration", "3", "--rate", "12")


def run(goodput: float, ttft_s: float | None, tpot_s: float | None) -> dict[str, Any]:
    return {"goodput": goodput, "ttft_s": {"p99": ttft_s}, "tpot_s": {"p99": tpot_s}}


def planned(*words: str) -> Result:
    return CliRunner().invoke(plan, words)


def test_the_frontier_is_what_nothing_beats() -> None:
    good, quick = run(0.9, 2.0, 0.02), run(0.8, 1.0, 0.02)
    beaten, nothing = run(0.8, 2.0, 0.02), run(0.0, None, None)
    assert frontier([beaten, good, nothing, quick]) == [good, quick]
    # Equals beat nobody.
    assert frontier([good, dict(good)]) == [good, good]


def test_every_split_is_simulated_on_the_same_requests() -> None:
    done = planned("--engines", "3", *TRAFFIC, "--policy", "least_loaded", "--json")
    assert done.exit_code == 0, done.output
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["prefill"], r["decode"]) for r in runs] == [(0, 3), (1, 2), (2, 1)]
    assert len({r["requests"] for r in runs}) == 1
    assert any(r["on_frontier"] for r in runs)
    assert all(r["failed"] == 0 for r in runs)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engines", "3", "--workload", "no such"), "no such"),
        (("--engines", "3", "nowhere.csv"), "nowhere.csv"),
        (("--engines", "3", *TRAFFIC, "--decode", "2"), "--decode"),
        (("--engines", "3", *TRAFFIC, "--output=x"), "--output=x"),
        (("--engines", "3", *TRAFFIC, "--requests-file", "x"), "--requests-file"),
        (("--engines", "3", *TRAFFIC, "--seed", "1", "--seed=2"), "write one"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    words: tuple[str, ...], says: str
) -> None:
    done = planned(*words)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("calrouter plan: error: ")
    assert says in line
