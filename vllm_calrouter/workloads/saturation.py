"""The rate at which a setup is overloaded by just so much."""

from __future__ import annotations

from collections.abc import Callable

from vllm_calrouter.workloads.arrivals import WorkloadError

#: Two rates this close are one.
_RESOLUTION = 1.03
#: Doublings or halvings from the first rate on, before it is given up.
_MOST_STEPS = 10


def find_rate(
    goodput_at: Callable[[float], float], first_rate: float, aim: float
) -> float:
    """The rate, in requests a second, at which goodput falls through a value.

    Doubles or halves the rate until the value lies between two, then bisects (in
    logarithms: a rate is a scale) to 3 %. Goodput has to fall with the rate.

    Args:
        goodput_at: makes a run at a rate; its goodput, 0 to 1.
        first_rate: where to begin, above 0.
        aim: the value.

    Raises WorkloadError when goodput is above or below the aim at every rate tried.
    """
    low = high = first_rate
    if goodput_at(first_rate) >= aim:
        while goodput_at(high := 2 * low) >= aim:
            low = _next(high, first_rate, aim)
    else:
        while goodput_at(low := high / 2) < aim:
            high = _next(low, first_rate, aim)
    while high / low > _RESOLUTION:
        middle = (low * high) ** 0.5
        if goodput_at(middle) >= aim:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)


def _next(rate: float, first_rate: float, aim: float) -> float:
    if max(rate / first_rate, first_rate / rate) >= 2**_MOST_STEPS:
        side = "above" if rate > first_rate else "below"
        raise WorkloadError(
            f"goodput stays {side} {aim:g} from {first_rate:g} to {rate:g} req/s: "
            "ask --find-rate for another value"
        )
    return rate
