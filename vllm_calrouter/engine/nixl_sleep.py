"""NIXL's progress thread, told that it may sleep.

NIXL's Python API asks for a thread that never sleeps: it takes a whole core for each
engine, busy or idle (`nixl._api.nixl_agent`, 1.5). That is right beside a GPU, and takes
the machine away from engines that compute on few cores. Told so, it waits for events,
and looks by itself once in so many milliseconds.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.platforms import current_platform

logger = logging.getLogger("vllm.calrouter")

#: Milliseconds where engines run on the CPU, unless said otherwise.
ON_CPU_MS = 1


def let_sleep(sleep_ms: int | None) -> None:
    """Let the progress threads of agents that this process makes from now on sleep.

    Args:
        sleep_ms: for at most so many milliseconds; 0: as NIXL has it; None: `ON_CPU_MS`
            on a CPU, else 0.
    """
    if sleep_ms is None:
        sleep_ms = ON_CPU_MS if current_platform.is_cpu() else 0
    if not sleep_ms:
        return
    # Imported by vLLM's connector already, or there is none.
    from nixl import _api

    bindings = getattr(_api, "nixlBind", None)
    config = getattr(bindings, "nixlAgentConfig", None)
    if not hasattr(config, "pthrDelay"):
        logger.warning("this NIXL has no pthrDelay: its progress threads do not sleep")
        return
    if config.__name__ == "Sleepy":
        # Told before; both of an engine's connectors do.
        return
    bindings.nixlAgentConfig = _sleepy(config, 1000 * sleep_ms)


def _sleepy(config: type[Any], delay_us: int) -> type[Any]:
    """NIXL's configuration of an agent, with a delay that its makers do not change."""

    class Sleepy(config):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            config.pthrDelay.fset(self, delay_us)

        @property
        def pthrDelay(self) -> int:  # noqa: N802
            value: int = config.pthrDelay.fget(self)
            return value

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            """It stays."""

    return Sleepy
