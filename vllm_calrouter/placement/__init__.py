"""Where: which engine of a pool serves a leg. The policies are in `csrc/`."""

from vllm_calrouter.placement.costs import (
    A40_QWEN_3B,
    EngineCosts,
    Limits,
    core_costs,
)
from vllm_calrouter.placement.placer import Choice, Placer, Pools

__all__ = [
    "A40_QWEN_3B",
    "Choice",
    "EngineCosts",
    "Limits",
    "Placer",
    "Pools",
    "core_costs",
]
