"""What arrives: seeded workload families and replayed traces."""

from vllm_calrouter.workloads.arrivals import Arrival, WorkloadError

__all__ = ["Arrival", "WorkloadError"]
