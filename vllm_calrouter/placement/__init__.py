"""Where: which engine of a pool serves a leg. The policies are in `csrc/`."""

from vllm_calrouter.placement.placer import Choice, Placer, Pools

__all__ = ["Choice", "Placer", "Pools"]
