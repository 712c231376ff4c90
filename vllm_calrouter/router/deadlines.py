"""When a prefill leg must have ended for its request to be in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_calrouter.placement.costs import engine_costs

if TYPE_CHECKING:
    from vllm_calrouter.calibration import EngineCosts
    from vllm_calrouter.options import RouterOptions
    from vllm_calrouter.router.wishes import Wishes


class Deadlines:
    """Takes from a TTFT target what the decode leg still needs.

    Args:
        options: `prefill`, and `profile` where there are no costs.
        engines: number of engines.
        costs: of each, by rank.

    Raises ProfileError.
    """

    def __init__(
        self,
        options: RouterOptions,
        engines: int,
        costs: Sequence[EngineCosts] | None = None,
    ) -> None:
        costs = costs or engine_costs(options, engines)
        self._decode = costs[options.prefill :]

    def prefill_s(
        self, wishes: Wishes, prompt_tokens: int, *, early: bool
    ) -> float | None:
        """Seconds that a prefill leg has; None where the request has no target.

        `early`: its token is the client's first, and nothing comes after it.
        """
        if wishes.ttft_s is None or early:
            return wishes.ttft_s
        return wishes.ttft_s - self._decode_s(prompt_tokens)

    def _decode_s(self, prompt_tokens: int) -> float:
        """From the end of prefill to the first token of an engine that decodes alone.

        The decode engine sees the leg when the step under way ends, half a step later
        on average; the KV cache is read beside whole steps; one more step makes the
        token. On a free A40 these are the 36 ms that were measured in simulation.
        """

        def one(costs: EngineCosts) -> float:
            step_s = costs.step_s(0, 0, 1, prompt_tokens)
            steps = math.ceil(costs.transfer_s(prompt_tokens) / step_s)
            return (0.5 + steps + 1) * step_s

        return min(map(one, self._decode))
