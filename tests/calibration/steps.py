"""Steps as an engine of known constants would report them."""

from __future__ import annotations

import random

from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.messages import StepTiming


def timing(
    costs: EngineCosts,
    prefill: tuple[int, int] | None = None,
    seqs: int = 0,
    context: int = 0,
    factor: float = 1.0,
) -> StepTiming:
    """One step: a prompt's chunk (start, tokens), and a decode batch."""
    tokens = squares = 0
    if prefill:
        start, tokens = prefill
        squares = (start + tokens) ** 2 - start**2
    seconds = costs.step_s(tokens, squares, seqs, context) * factor
    return StepTiming(tokens, seqs, context, seconds, squares)


def traffic(
    costs: EngineCosts,
    count: int,
    *,
    seed: int = 0,
    kinds: str = "pdm",
    noise: float = 0.03,
    outliers: float = 0.0,
) -> list[StepTiming]:
    """Prefill, decode and mixed steps (letters of `kinds`) in equal parts.

    Args:
        noise: standard deviation, relative.
        outliers: share of steps that take 3 to 100 times as long.
    """
    draw = random.Random(seed)
    made = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        factor = max(0.2, draw.gauss(1.0, noise))
        if draw.random() < outliers:
            factor *= draw.uniform(3, 100)
        prefill = None
        if kind in "pm":
            prefill = (draw.choice([0, 0, 2048, 6000]), draw.randrange(16, 2048))
        seqs = draw.randrange(1, 64) if kind in "dm" else 0
        context = seqs * draw.randrange(50, 1500)
        made.append(timing(costs, prefill, seqs, context, factor))
    return made
