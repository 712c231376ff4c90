from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import order_cost
from benchmarks.orders import REGIMES, markdown
from benchmarks.runs import Runs


def made_up(arguments: str) -> dict[str, Any]:
    good = 0.9 if "deadline" in arguments else 0.8
    spread = {"p99": 1.5, "max": 2.0}
    return {"goodput": good, "ttft_s": spread, "pause_s": {"p99": None}}


def test_differences_are_to_the_first_row(tmp_path: Path) -> None:
    told = markdown(Runs(tmp_path / "runs.jsonl", made_up), (1, 2), list(REGIMES))
    assert "| round-robin, `fcfs`, first token off | 0.800 |" in told
    assert "| least-loaded, `deadline` | 0.900 (+0.100 ± 0.000) |" in told
    assert "| least-loaded, `deadline` | 1.50 |" in told


def test_the_cost_of_an_order_is_measured() -> None:
    engine = order_cost.Engine("deadline", 20)
    seconds, admitted = engine.step()
    assert seconds > 0
    assert admitted > 0
