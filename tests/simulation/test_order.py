"""Orders in a cluster: vLLM's scheduler, the router, and deadlines between them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from tests.simulation.clusters import PROFILE, cluster, costs, digest, some
from tests.simulation.test_cluster import REGIMES, assert_nothing_is_left
from vllm_calrouter.ordering.queue import OrderedQueue
from vllm_calrouter.simulation.cluster import Cluster
from vllm_calrouter.workloads import Arrival, generate

BURST = generate("mixed", rate=30.0, duration_s=8.0, seed=3)


def ordered(order: str, regime: str = "split", **more: Any) -> Cluster:
    shape = {**REGIMES[regime], **more}
    options = {**shape.pop("options", {}), "order": order}
    return cluster(**shape, options=options)


def goodput(ran: Cluster, arrivals: list[Arrival]) -> float:
    served = ran.run(arrivals)
    return sum(one.good for one in served) / len(served)


def test_fcfs_is_vllm_s_own_queue_and_class() -> None:
    for engine in ordered("fcfs").engines:
        assert type(engine.scheduler.waiting) is FCFSRequestQueue
        assert not hasattr(engine.scheduler, "ordering")


@pytest.mark.parametrize("prefill", [0, 1])
def test_engines_that_compute_prompts_are_ordered(prefill: int) -> None:
    ran = cluster(prefill=prefill, options={"order": "short_first"})
    ours = [type(e.scheduler.waiting) is OrderedQueue for e in ran.engines]
    assert ours == [prefill == 0 or rank < prefill for rank in range(len(ours))]


def test_decode_engines_have_an_order_of_their_own() -> None:
    ran = cluster(
        options={
            "order": "fcfs",
            "decode_order": "deadline",
            "first_token": False,
        }
    )
    ours = [type(e.scheduler.waiting) is OrderedQueue for e in ran.engines]
    assert ours == [False, True, True]
    served = ran.run(some(60))
    assert all(one.finish == "length" for one in served)


@pytest.mark.parametrize("order", ["short_first", "deadline"])
@pytest.mark.parametrize(
    "regime", ["split", "unified", "little_kv_unified", "few_slots", "small_steps"]
)
def test_everybody_is_served_and_nothing_is_left(regime: str, order: str) -> None:
    ran = ordered(order, regime)
    arrivals = some(60)
    served = ran.run(arrivals)
    assert [one.tokens for one in served] == [a.output_tokens for a in arrivals]
    assert_nothing_is_left(ran)


@pytest.mark.parametrize("order", ["short_first", "deadline"])
@pytest.mark.parametrize("regime", ["split", "little_kv_unified"])
def test_steps_without_a_decision_change_nothing_under_an_order(
    regime: str, order: str
) -> None:
    quick, full = (ordered(order, regime, every_step=e) for e in (False, True))
    assert digest(quick.run(some(60))) == digest(full.run(some(60)))


def test_under_pressure_orders_pay() -> None:
    plain = goodput(ordered("fcfs"), BURST)
    in_time = goodput(ordered("deadline"), BURST)
    assert in_time > plain + 0.1


def test_without_targets_deadline_is_short_first() -> None:
    first, second = (
        {
            one.number: one.first_s
            for one in ordered(order, tells_slo=False).run(BURST)
            if one.first_s is not None
        }
        for order in ("deadline", "short_first")
    )
    mean = {k: sum(v.values()) / len(v) for k, v in (("d", first), ("s", second))}
    # The order is the same, but for whose patience ends.
    assert mean["d"] == pytest.approx(mean["s"], rel=0.05)


def test_a_bound_on_overtaking_shortens_the_longest_wait() -> None:
    each = [costs()] * 3
    worst = {}
    for patience in (0.5, None):
        ran = cluster(each=each, options={"order": "deadline", "patience": patience})
        worst[patience] = max(one.ttft_s or 0.0 for one in ran.run(BURST))
    assert worst[0.5] < worst[None]


def test_clients_that_state_no_targets_have_none() -> None:
    ran = cluster(tells_slo=False)
    ran.run(some(5))
    records = ran.routers[0].decisions(5)
    assert [one["slo"]["ttft_s"] for one in records] == [None] * 5


def test_clients_that_state_targets_are_heard() -> None:
    ran = cluster()
    served = ran.run(some(5))
    records = ran.routers[0].decisions(100)
    told = {one["request_id"]: one["slo"]["ttft_s"] for one in records}
    assert told == {str(one.number): pytest.approx(one.ttft_target_s) for one in served}
    assert {one.arrival.slo for one in served} <= set(PROFILE.slo)
