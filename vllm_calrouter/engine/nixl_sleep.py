"""NIXL's progress thread, told that it may sleep.

NIXL's Python API asks for a thread that never sleeps: it takes a whole core for each
engine, busy or idle (`nixl._api.nixl_agent`, 1.5). That is right beside a GPU, and
takes the machine away from engines that compute on few cores. Told to sleep, the thread
waits for events, and looks by itself once in so many milliseconds.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from vllm.distributed import nixl_utils
from vllm.platforms import current_platform

logger = logging.getLogger("vllm.calrouter")

#: By this attribute a class is known to be told already.
_OURS = "_calrouter_sleep_ms"

#: Milliseconds where engines run on the CPU, unless said otherwise.
ON_CPU_MS = 1


def let_sleep(sleep_ms: int | None) -> None:
    """Let the progress threads of agents that this process makes from now on sleep.

    The first call counts: an engine's connectors all have the same option.

    Args:
        sleep_ms: for at most so many milliseconds; 0: as NIXL has it; None: `ON_CPU_MS`
            on a CPU, else 0.
    """
    if sleep_ms is None:
        sleep_ms = ON_CPU_MS if current_platform.is_cpu() else 0
    # Without NIXL vLLM's connector says so itself.
    if not sleep_ms or nixl_utils.NixlWrapper is None:
        return
    api = sys.modules[nixl_utils.NixlWrapper.__module__]
    bindings = getattr(api, "nixlBind", None)
    config = getattr(bindings, "nixlAgentConfig", None)
    if not isinstance(getattr(config, "pthrDelay", None), property):
        logger.warning("this NIXL has no pthrDelay: its progress threads do not sleep")
    elif bindings is not None and not hasattr(config, _OURS):
        bindings.nixlAgentConfig = _sleepy(config, sleep_ms)


def _sleepy(config: Any, milliseconds: int) -> type[Any]:
    """NIXL's configuration of an agent, with a delay that its makers do not change."""

    class Sleepy(config):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config.pthrDelay.fset(self, 1000 * milliseconds)

        @property
        def pthrDelay(self) -> int:  # noqa: N802
            delay_us: int = config.pthrDelay.fget(self)
            return delay_us

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            """It stays."""

    setattr(Sleepy, _OURS, milliseconds)
    return Sleepy
