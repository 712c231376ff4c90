"""Jobs and steps for tests of the orders."""

from __future__ import annotations

import math
from itertools import count
from types import SimpleNamespace
from typing import Any

from vllm_calrouter.calibration import load
from vllm_calrouter.ordering import Job, Order, Step

COSTS = load("a40-qwen2.5-3b").costs

_numbers = count(1)


def job(
    tokens: int = 100, *, arrived_s: float = 0.0, due_s: float | None = None
) -> Job:
    """A job with nothing cached; `due_s` is its deadline on the clock."""
    made = Job(
        request=SimpleNamespace(request_id=f"r{(number := next(_numbers))}"),
        number=number,
        arrived_s=arrived_s,
        tokens=tokens,
        squares=tokens * tokens,
        cost_s=COSTS.prefill_s(tokens),
    )
    if due_s is not None:
        made.deadline_s = made.urgency_s = due_s
    return made


def step(now_s: float = 0.0, **more: Any) -> Step:
    settings: dict[str, Any] = {
        "costs": COSTS,
        "price": lambda job: None,
        "start_s": now_s,
        "seqs_left": 64,
        "tokens_left": 2048,
        **more,
    }
    return Step(**settings)


def taken(order: Order, now_s: float = 0.0, **more: Any) -> list[Job]:
    """Whom the order puts into the next step."""
    made = step(now_s, **more)
    order.take(made)
    return made.jobs


def serve(order: Order, jobs: list[Job]) -> None:
    """These run."""
    for one in jobs:
        order.remove(one)
        order.left(one)


def work_s(jobs: list[Job]) -> float:
    return math.fsum(one.cost_s for one in jobs)
