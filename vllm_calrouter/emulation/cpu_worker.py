"""A paced worker that runs the model on the CPU; for the build of vLLM that does."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_calrouter.emulation.pacing import Paced


class PacedCpuWorker(Paced, CPUWorker):  # type: ignore[misc]
    """For `--worker-cls`: the model's own tokens, no earlier than a profile says."""
