"""What arrives: seeded workload families and replayed traces."""

from vllm_calrouter.workloads.arrivals import Arrival, WorkloadError, with_hints
from vllm_calrouter.workloads.families import FAMILIES, generate
from vllm_calrouter.workloads.traces import Replay, replay

__all__ = [
    "FAMILIES",
    "Arrival",
    "Replay",
    "WorkloadError",
    "generate",
    "replay",
    "with_hints",
]
