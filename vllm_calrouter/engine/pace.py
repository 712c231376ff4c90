"""How fast an engine is, next to what its profile says."""

from __future__ import annotations

import math

from vllm_calrouter.calibration.profile import SPEED, EngineCosts

#: Part of the difference that one step makes good.
_GAIN = 0.02

#: A step counts as at most so many times as far off as an engine is thought to be: one
#: that was held up tells little.
_MOST = math.e

#: No engine is faster or slower than its profile by more than this.
_BOUND = 100.0


class Pace:
    """An engine's constants, all multiplied by what its steps are seen to take.

    A profile of another GPU is wrong by some factor in most of its constants alike. The
    factor f follows the steps that compute prompts:
    `log f += _GAIN * log(took / predicted)`, where `predicted` has f in it and the
    quotient is cut to [1 / `_MOST`, `_MOST`].

    Args:
        costs: of the engine's profile.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self._profile = costs
        self._log_factor = 0.0
        #: As they are now.
        self.costs = costs

    def note(self, predicted_s: float, took_s: float) -> None:
        """A step took so long; `costs` had predicted so much."""
        if not (0 < predicted_s < math.inf and 0 < took_s < math.inf):
            return
        off = min(max(took_s / predicted_s, 1 / _MOST), _MOST)
        most = math.log(_BOUND)
        log_factor = self._log_factor + _GAIN * math.log(off)
        self._log_factor = min(max(log_factor, -most), most)
        factor = math.exp(self._log_factor)
        times = {name: factor * getattr(self._profile, name) for name in SPEED}
        self.costs = self._profile.changed(**times)
