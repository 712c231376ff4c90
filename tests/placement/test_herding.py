"""Several routers that hear of each other's work late, through the engines only."""

from __future__ import annotations

import random
import statistics

from benchmarks.price import A40_QWEN_3B
from tests.placement.herd import Herd

_ENGINES = 4
_REQUESTS = 200
_SEEDS = range(12)


def spread(seed: int, *, burst_s: float, **how: object) -> float:
    """Most requests on one engine over an even share, after a burst of equal ones."""
    herd = Herd([A40_QWEN_3B] * _ENGINES, routers=6, seed=seed, **how)  # type: ignore[arg-type]
    herd.tell(until_s=1.0 + burst_s, every_s=0.02)
    for index in range(_REQUESTS):
        herd.request(0.3 + burst_s * index / _REQUESTS, 500, 200)
    herd.run()
    assert all(router.table.is_idle() for router in herd.routers)
    served = [engine.served for engine in herd.engines]
    assert sum(served) == _REQUESTS
    return max(served) / (_REQUESTS / _ENGINES)


def worst(**how: object) -> float:
    return max(spread(seed, **how) for seed in _SEEDS)  # type: ignore[arg-type]


def test_six_routers_with_messages_up_to_250_ms_late_spread_a_burst_evenly() -> None:
    for burst_s in (0.0, 0.5, 1.0):
        assert worst(policy="calibrated", burst_s=burst_s) <= 1.1


def test_it_is_the_others_unseen_work_that_keeps_routers_from_herding() -> None:
    """Each router alone counts right; together they pile up between two messages."""
    blind = worst(policy="calibrated", burst_s=0.5, believed_routers=1)
    assert blind > 1.1
    assert blind > worst(policy="calibrated", burst_s=0.5)


def wait_s(policy: str, *, seeds: range = range(6)) -> float:
    """Mean seconds that requests of unlike length wait for one of 16 slots."""
    waits: list[float] = []
    for seed in seeds:
        draw = random.Random(seed)
        herd = Herd(
            [A40_QWEN_3B] * _ENGINES,
            routers=6,
            policy=policy,
            slots=16,
            latest_s=0.02,
            seed=seed,
        )
        herd.tell(until_s=20.0, every_s=0.02)
        now_s = 0.0
        while now_s < 20.0:
            now_s += draw.gammavariate(0.25, 4 / 15)
            herd.request(
                now_s, draw.randrange(50, 1500), draw.choice((20, 50, 100, 200, 800))
            )
        herd.run()
        waits.append(statistics.mean(herd.waits_s))
    return statistics.mean(waits)


def test_where_slots_bind_pricing_waits_less_than_counting_and_the_naive_score() -> (
    None
):
    priced = wait_s("calibrated")
    assert priced < 0.9 * wait_s("least_loaded")
    assert priced < 0.9 * wait_s("paper")
