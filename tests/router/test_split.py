"""The split of the engines that the traffic asks for."""

from __future__ import annotations

import pytest

from tests.engine.messages import message
from vllm_calrouter._core import Phase
from vllm_calrouter.messages import StepTiming
from vllm_calrouter.placement import Pools
from vllm_calrouter.router.split import MEMORY_S, Split


class Traffic:
    """Engines that are as busy as they are told to be, a message every 0.1 s."""

    def __init__(self, pools: Pools) -> None:
        self.now_s = 0.0
        self.pools = pools
        self.split = Split(pools, clock=lambda: self.now_s)
        self.steps = [0] * pools.engines

    def run(
        self, seconds: float, *, busy: float, slots: float = 0.0, blocks: float = 0.0
    ) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for rank in range(self.pools.engines):
                self.steps[rank] += 2
                step = StepTiming(100, 0, 0, 0.05 * busy, 10_000)
                told = message(
                    rank=rank,
                    steps=self.steps[rank],
                    recent_steps=[step] * 8,
                    running=round(slots * 64),
                    waiting=0,
                    waiting_remote=0,
                    kv_free_blocks=round(1000 * (1 - blocks)),
                )
                self.split.hear(told)


@pytest.mark.parametrize(
    ("busy", "slots", "blocks", "best"),
    [
        (0.8, 0.4, 0.1, 3),  # 1.6 to 1.6
        (0.9, 0.1, 0.05, 5),  # 1.8 to 0.4
        (0.2, 0.9, 0.5, 1),  # 0.4 to 3.6
        (0.2, 0.1, 0.9, 1),  # the same by KV
        (0.4, 0.4, 0.1, 2),  # as it is
    ],
)
def test_the_busier_pool_gets_more(
    busy: float, slots: float, blocks: float, best: int
) -> None:
    traffic = Traffic(Pools(6, 2))
    traffic.run(20, busy=busy, slots=slots, blocks=blocks)
    assert traffic.split.use(Phase.PREFILL) == pytest.approx(busy)
    decode = traffic.split.use(Phase.DECODE)
    assert decode == pytest.approx(max(slots, blocks), abs=0.01)
    assert traffic.split.suggested_prefill() == best


def test_nothing_is_said_too_soon_nor_of_engines_that_do_both() -> None:
    traffic = Traffic(Pools(6, 2))
    assert traffic.split.suggested_prefill() is None
    traffic.run(5, busy=0.5, slots=0.5)
    assert traffic.split.use(Phase.PREFILL) is None
    traffic.run(20, busy=0.5, slots=0.5)
    assert traffic.split.suggested_prefill() is not None
    both = Traffic(Pools(6, 0))
    both.run(20, busy=0.5, slots=0.5)
    assert both.split.suggested_prefill() is None


def test_an_idle_cluster_asks_for_nothing() -> None:
    traffic = Traffic(Pools(6, 2))
    traffic.run(20, busy=0.0)
    assert traffic.split.suggested_prefill() is None


def test_traffic_of_before_is_forgotten() -> None:
    traffic = Traffic(Pools(6, 2))
    traffic.run(MEMORY_S, busy=0.9, slots=0.1)
    assert traffic.split.suggested_prefill() == 5
    traffic.run(3 * MEMORY_S, busy=0.1, slots=0.9)
    assert traffic.split.suggested_prefill() == 1


def test_a_step_longer_than_the_time_between_messages_counts_in_full() -> None:
    traffic = Traffic(Pools(2, 1))
    for number in range(1, 200):
        traffic.now_s += 0.1
        ended = number // 5
        step = [StepTiming(2000, 0, 0, 0.25, 4_000_000)] * min(ended, 8)
        traffic.split.hear(message(rank=0, steps=ended, recent_steps=step))
    use = traffic.split.use(Phase.PREFILL)
    assert use == pytest.approx(0.5, abs=0.02)


def test_an_engine_started_anew_is_measured_from_there() -> None:
    traffic = Traffic(Pools(2, 1))
    traffic.run(20, busy=0.5, slots=0.5)
    traffic.now_s += 1000.0
    traffic.split.hear(message(rank=0, incarnation=8, steps=10**6))
    assert traffic.split.use(Phase.PREFILL) == pytest.approx(0.5)
