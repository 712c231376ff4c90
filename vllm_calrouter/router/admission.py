"""Whether a request is let in: not where it would wait longer than its class allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm.exceptions import GracefulHTTPError

from vllm_calrouter import _core
from vllm_calrouter._core import Phase
from vllm_calrouter.router.wishes import Wishes

if TYPE_CHECKING:
    from vllm_calrouter.options import RouterOptions
    from vllm_calrouter.placement import Placer

#: Terms of a price (docs/pricing.md) that are waiting for others.
_WAITING = ("prefill_backlog_s", "decode_wait_s", "silence_s")

#: A client that asks again is told to wait so long at least and at most, in seconds.
_SOONEST_S = 1
_LATEST_S = 60


class RefusedError(GracefulHTTPError):  # type: ignore[misc]
    """A request that was not let in: HTTP 429.

    Attributes:
        retry_after_s: whole seconds after which it may be let in.
    """

    def __init__(self, wait_s: float, allowed_s: float) -> None:
        super().__init__(
            f"this request would wait {wait_s:.1f} s for its first token to be begun, "
            f"its SLO allows {allowed_s:.1f} s: try again later",
            HTTPStatus.TOO_MANY_REQUESTS,
        )
        missing_s = math.ceil(wait_s - allowed_s)
        self.retry_after_s = min(max(missing_s, _SOONEST_S), _LATEST_S)


class Admission:
    """Predicts the least wait there is, and refuses who cannot bear it.

    The wait is that of an empty prompt on the engine where it is cheapest, in the order
    of arrival: an order that lets a request overtake others makes it shorter.

    Args:
        options: `admission`, and the pools.
        placer: whose table tells how much there is to do.
        count: how many routers share the engines.
        clock: seconds, on which the table hears messages.
    """

    def __init__(
        self,
        options: RouterOptions,
        placer: Placer,
        *,
        count: int,
        clock: Callable[[], float],
    ) -> None:
        assert options.admission is not None
        self._times = options.admission
        self._placer = placer
        self._clock = clock
        pools = placer.pools
        ranks = pools.ranks(Phase.PREFILL)
        # Prices whatever the policy: it looks for a wait, and chooses nothing.
        self._pricing = _core.make_policy(
            "calibrated",
            ranks.start,
            ranks.stop,
            routers=count,
            serves=Phase.PREFILL if pools.disaggregated else None,
        )

    def wait_s(self) -> float:
        """Seconds before an engine would begin with a request that came now."""
        if self._placer.refresh is not None:
            self._placer.refresh()
        pricing = self._pricing
        rank = pricing.pick(self._placer.table, 0, 0, now_s=self._clock())
        price = pricing.price(rank)
        return sum(price[term] for term in _WAITING)

    def check(self, wishes: Wishes) -> None:
        """Let a request pass; one without a TTFT target always does.

        Raises:
            RefusedError: it would wait longer than so many times its target.
        """
        if wishes.ttft_s is None:
            return
        allowed_s = self._times * wishes.ttft_s
        wait_s = self.wait_s()
        if wait_s > allowed_s:
            raise RefusedError(wait_s, allowed_s)
