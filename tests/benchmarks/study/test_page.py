"""The page, from made-up runs: no simulation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import tables
from benchmarks.study.exhibit import Claim, Results
from benchmarks.study.exhibits import EXHIBITS
from benchmarks.study.measure import SHARES
from benchmarks.study.page import write

SEEDS = (1, 2)
COMMON = {"duration": 5}


def made_up(line: str) -> dict[str, Any]:
    """Figures that depend on the command line alone."""
    digest = hashlib.sha256(line.encode()).digest()
    goodput, tail_s = digest[0] / 255, 0.1 + digest[1] / 255
    return {
        "goodput": goodput,
        "ttft_s": {"p99": tail_s},
        "pause_s": {"p99": 0.0},
        "ttft_at_shares_s": [0.05 + tail_s * share for share in SHARES],
        "timeline": {
            "at_s": [5.0, 6.0, 7.0],
            "rate": [20.0, 0.0, 30.0],
            "goodput": [goodput, None, 1.0],
            "ttft_p95_s": [tail_s, None, 0.2],
        },
    }


def results() -> list[Results]:
    return [Results(one, made_up, COMMON, SEEDS) for one in EXHIBITS]


def written(folder: Path) -> dict[str, bytes]:
    write(results(), folder)
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_the_same_runs_make_the_same_page_and_plots(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name) for name in ("a", "b"))
    assert first == second
    page = first["study.md"].decode()
    for exhibit in EXHIBITS:
        assert f"## {exhibit.title}\n" in page
        for plot in exhibit.plots:
            name = f"study/{exhibit.name}-{plot}.svg"
            assert f"({name})" in page
            assert first[name].startswith(b"<?xml")


def test_another_figure_makes_another_page(tmp_path: Path) -> None:
    before = tables.goodput(results()[0])
    mixed = Results(EXHIBITS[0], lambda line: made_up(line + "!"), COMMON, SEEDS)
    assert tables.goodput(mixed) != before


def test_gains_are_paired_with_the_first_setup() -> None:
    exhibit = EXHIBITS[0]
    first, second, *_ = exhibit.setups
    values = {(1, first): 0.5, (2, first): 0.9, (1, second): 0.6, (2, second): 1.0}
    of = {
        exhibit.line({}, "mixed", setup, seed): goodput
        for (seed, setup), goodput in values.items()
    }

    def run(line: str) -> dict[str, Any]:
        return {"goodput": of.get(line, 0.0)}

    table = tables.goodput(Results(exhibit, run, {}, SEEDS))
    assert f"| `{first}` | 0.700 |" in table
    assert f"| `{second}` | 0.800 (+0.100 ± 0.000) |" in table


@pytest.mark.parametrize(
    ("level", "engines"), [(0.3, 3.0), (0.5, 3.0), (0.6, 3.5), (0.8, 6.5), (0.95, None)]
)
def test_engines_that_a_goodput_takes(level: float, engines: float | None) -> None:
    found = tables.reached([3, 4, 5, 8], [0.5, 0.7, 0.7, 0.9], level)
    assert found == pytest.approx(engines)


@pytest.mark.parametrize(
    ("printed", "ties", "gain", "error", "traces", "verdict"),
    [
        (0.05, False, 0.04, 0.01, 4, "agrees"),
        (0.05, False, 0.03, 0.01, 4, "undecided"),
        (0.05, False, 0.04, 0.01, 2, "undecided"),
        (0.05, False, 0.03, 0.01, 100, "agrees"),
        (0.05, False, 0.009, 0.0, 4, "level"),
        (0.05, False, -0.04, 0.01, 4, "contrary"),
        (-0.05, False, -0.04, 0.01, 4, "agrees"),
        (None, False, -0.04, 0.01, 4, "contrary"),
        (0.0, True, 0.009, 0.001, 4, "agrees"),
        (0.0, True, 0.03, 0.01, 4, "undecided"),
        (0.0, True, 0.04, 0.01, 4, "does not"),
        (0.05, False, 0.04, 0.0, 1, "one trace"),
    ],
)
def test_a_claim_agrees_only_beyond_the_noise(
    printed: float | None,
    ties: bool,
    gain: float,
    error: float,
    traces: int,
    verdict: str,
) -> None:
    claim = Claim("x", "mixed", "a", "b", printed, ties=ties)
    assert tables.verdict(claim, gain, error, traces=traces) == verdict
