"""Small clusters and workloads for tests of the simulator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.options import parse
from vllm_calrouter.simulation.cluster import Cluster, Limits
from vllm_calrouter.simulation.results import Served
from vllm_calrouter.workloads import Arrival, generate

PROFILE = load("a40-qwen2.5-3b")
COSTS = PROFILE.costs


def costs(**changes: Any) -> EngineCosts:
    return msgspec.structs.replace(COSTS, **changes)


def cluster(
    *,
    prefill: int = 1,
    decode: int = 2,
    policy: str = "least_loaded",
    each: Sequence[EngineCosts] | None = None,
    limits: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Cluster:
    return Cluster(
        parse({"policy": policy, "prefill": prefill, **(options or {})}),
        each or [COSTS] * (prefill + decode),
        PROFILE.slo,
        limits=Limits(**(limits or {})),
        **more,
    )


def one_request(prompt: int = 200, output: int = 20, at_s: float = 0.0) -> Arrival:
    return Arrival(at_s, prompt, output, "tight")


def some(count: int, *, rate: float = 12.0, seed: int = 1) -> list[Arrival]:
    return generate("mixed", rate=rate, duration_s=count / rate, seed=seed)


def digest(served: Sequence[Served]) -> str:
    """Equal exactly where every figure of every request is, to the last bit."""
    text = repr([one.record() for one in served])
    return hashlib.sha256(text.encode()).hexdigest()
