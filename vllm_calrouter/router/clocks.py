"""Engines' timestamps on the router's clock.

vLLM takes intervals between the times at which engines made tokens, by each engine's
monotonic clock. A split request has its first token from one engine and the others from
another, and monotonic clocks of two hosts have nothing in common.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

#: Clocks drift apart by some 50 microseconds a second at worst, so in this time by less
#: than a message's way through two processes.
WINDOW_S = 10.0


class _Offset:
    """This clock minus another one's: the least that messages of late have shown.

    A message shows the offset plus the time it took, so the least is the nearest
    (the minimum filter of NTP, RFC 5905, section 10).
    """

    def __init__(self) -> None:
        self._until_s = -math.inf
        self._last_s = math.inf
        self._now_s = math.inf

    def update(self, stamp_s: float, now_s: float) -> float:
        """Take in a message that was stamped there and read now; the offset."""
        if now_s >= self._until_s:
            # A window that nothing was heard in is no memory of the one before.
            recent = now_s < self._until_s + WINDOW_S
            self._last_s = self._now_s if recent else math.inf
            self._now_s = math.inf
            self._until_s = now_s + WINDOW_S
        self._now_s = min(self._now_s, now_s - stamp_s)
        return min(self._now_s, self._last_s)


class Clocks:
    """Puts engines' timestamps on the router's monotonic clock.

    Those of engines that share its clock stay untouched. Others' become later than they
    were by the quickest message's way, a constant that no interval between an engine's
    own tokens sees.

    Args:
        engines: by rank, the name of each engine's clock (`introduction.clock_name`).
        own: name of the router's.
        clock: the router's, in seconds.
    """

    def __init__(
        self,
        engines: Sequence[str],
        own: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._offsets = [None if name == own else _Offset() for name in engines]

    @property
    def differ(self) -> bool:
        """Whether any engine has another clock."""
        return any(self._offsets)

    def translate(self, outputs: EngineCoreOutputs) -> None:
        """Change the times in one engine's message to the router's clock."""
        offset = self._offsets[outputs.engine_index]
        if offset is None:
            return
        shift_s = offset.update(outputs.timestamp, self._clock())
        outputs.timestamp += shift_s
        for output in outputs.outputs:
            for event in output.events or ():
                event.timestamp += shift_s
