"""Where: which engine of a pool serves a leg. The policies are in `csrc/`."""

from vllm_calrouter.placement.costs import (
    Limits,
    core_costs,
    engine_costs,
    engine_limits,
    foreign_profile,
)
from vllm_calrouter.placement.placer import Choice, Placer, Pools, Prompt

__all__ = [
    "Choice",
    "Limits",
    "Placer",
    "Pools",
    "Prompt",
    "core_costs",
    "engine_costs",
    "engine_limits",
    "foreign_profile",
]
