"""Real engines that take as long as other hardware would."""

from vllm_calrouter.emulation.pacing import KEY, Pace, arguments

__all__ = ["KEY", "Pace", "arguments"]
