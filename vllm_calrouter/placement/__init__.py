"""Where: which engine of a pool serves a leg. The policies are in `csrc/`."""

from vllm_calrouter.placement.costs import (
    A40_QWEN_3B,
    Limits,
    core_costs,
    engine_costs,
    engine_limits,
)
from vllm_calrouter.placement.placer import Choice, Placer, Pools

__all__ = [
    "A40_QWEN_3B",
    "Choice",
    "Limits",
    "Placer",
    "Pools",
    "core_costs",
    "engine_costs",
    "engine_limits",
]
