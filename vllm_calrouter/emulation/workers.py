"""A paced worker without a forward pass, for machines with few cores and no kernels."""

from __future__ import annotations

from vllm_calrouter.emulation.kernel_free import KernelFreeRunner, KernelFreeWorker
from vllm_calrouter.emulation.pacing import Paced


class PacedWorker(Paced, KernelFreeWorker):
    """For `--worker-cls`: made-up tokens at a profile's pace, real NIXL transfers."""

    def make_runner(self) -> KernelFreeRunner:
        return _QuickRunner(self.vllm_config)


class _QuickRunner(KernelFreeRunner):
    """Looks at the end of a text only: its time must not grow with the context."""

    reads_tokens = 32
