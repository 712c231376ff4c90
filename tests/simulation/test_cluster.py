"""The cluster in virtual time: what it computes, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.clusters import (
    COSTS,
    cluster,
    costs,
    digest,
    one_request,
    some,
)
from vllm_calrouter._core import Phase
from vllm_calrouter.simulation.cluster import Cluster, SimulationError
from vllm_calrouter.workloads import Arrival

#: Shapes that bring out what a scheduler has to decide.
REGIMES: dict[str, dict[str, Any]] = {
    "split": {},
    "unified": {"prefill": 0, "decode": 3},
    "several_routers": {"routers": 3, "policy": "vllm", "prefill": 2},
    "little_kv": {"each": [costs(kv_capacity_tokens=9_000)] * 3},
    "little_kv_unified": {
        "prefill": 0,
        "each": [costs(kv_capacity_tokens=5_000)] * 2,
    },
    "no_prefix_caching": {
        "each": [costs(kv_capacity_tokens=9_000)] * 3,
        "limits": {"prefix_caching": False},
    },
    "few_slots": {"limits": {"max_num_seqs": 8}},
    "small_steps": {"prefill": 0, "limits": {"max_num_batched_tokens": 96}},
    "role_limits": {"options": {"decode_max_num_seqs": 4, "prefill_max_num_seqs": 2}},
    "unequal": {"each": [COSTS, COSTS.faster(2), COSTS.faster(0.5)]},
}


def assert_nothing_is_left(ended: Cluster) -> None:
    # What was read last is freed by the events that remain.
    ended.drain()
    for engine in ended.engines:
        engine.settle()
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert engine.scheduler.requests == {}, engine.rank
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, engine.rank
    for router in ended.routers:
        assert router.requests_under_way == 0
        assert router.placer.table.is_idle()


@pytest.mark.parametrize("regime", list(REGIMES))
def test_steps_without_a_decision_change_nothing(regime: str) -> None:
    arrivals = some(80)
    quick, full = (
        cluster(**REGIMES[regime]),
        cluster(every_step=True, **REGIMES[regime]),
    )
    steps = Counter[str]()
    for name, ran in (("quick", quick), ("full", full)):
        for engine in ran.engines:
            count_calls(engine.scheduler, steps, name)
    assert digest(quick.run(arrivals)) == digest(full.run(arrivals))
    assert [e.steps for e in quick.engines] == [e.steps for e in full.engines]
    assert quick.now_s == full.now_s
    assert steps["quick"] < steps["full"]
    assert_nothing_is_left(quick)
    assert_nothing_is_left(full)


@settings(max_examples=15, deadline=None)
@given(
    prefill=st.integers(0, 2),
    decode=st.integers(1, 2),
    routers=st.sampled_from([1, 3]),
    policy=st.sampled_from(["vllm", "least_loaded", "calibrated"]),
    max_num_seqs=st.sampled_from([2, 5, 64]),
    max_num_batched_tokens=st.sampled_from([64, 300, 2_048]),
    block_tokens=st.sampled_from([1, 16]),
    prefix_caching=st.booleans(),
    kv_tokens=st.sampled_from([3_500, 60_000]),
    rate=st.sampled_from([3.0, 20.0]),
    seed=st.integers(0, 1_000),
)
def test_steps_without_a_decision_change_nothing_in_any_shape(
    prefill: int,
    decode: int,
    routers: int,
    policy: str,
    kv_tokens: int,
    rate: float,
    seed: int,
    **limits: Any,
) -> None:
    short = [
        one
        for one in some(25, rate=rate, seed=seed)
        if one.prompt_tokens + one.output_tokens < 3_000
    ]
    shape: dict[str, Any] = {
        "prefill": prefill,
        "each": [costs(kv_capacity_tokens=kv_tokens)] * (prefill + decode),
        "routers": routers,
        "policy": policy,
        "report_s": 0.01,
        "limits": limits,
    }
    quick, full = cluster(**shape), cluster(every_step=True, **shape)
    assert digest(quick.run(short)) == digest(full.run(short))
    assert_nothing_is_left(quick)


def count_calls(scheduler: Any, calls: Counter[str], name: str) -> None:
    schedule = scheduler.schedule

    def counted(*args: Any) -> Any:
        calls[name] += 1
        return schedule(*args)

    scheduler.schedule = counted


def test_little_kv_preempts_and_still_serves_everybody() -> None:
    ran = cluster(**REGIMES["little_kv_unified"])
    served = ran.run(some(80))
    assert sum(one.preemptions for one in served) > 0
    assert all(one.finish == "length" for one in served)


def test_every_request_gets_its_tokens() -> None:
    arrivals = some(60)
    served = cluster().run(arrivals)
    assert [one.tokens for one in served] == [a.output_tokens for a in arrivals]
    assert all(one.finish == "length" for one in served)


@pytest.mark.parametrize("regime", ["split", "several_routers", "little_kv_unified"])
def test_the_same_run_gives_the_same_result(regime: str) -> None:
    first, second = (cluster(**REGIMES[regime]).run(some(60)) for _ in range(2))
    assert digest(first) == digest(second)
    other = cluster(**REGIMES[regime]).run(some(60, seed=2))
    assert digest(first) != digest(other)


def test_another_process_gets_the_same_result() -> None:
    program = (
        "from tests.simulation.clusters import *\n"
        "print(digest(cluster(policy='power_of_two').run(some(40))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = cluster(policy="power_of_two").run(some(40))
    assert ran.stdout.split()[-1] == digest(here)


def test_a_lone_request_takes_what_the_profile_says() -> None:
    prompt, output = 200, 20
    (one,) = cluster(prefill=0, decode=1).run([one_request(prompt, output)])
    assert one.ttft_s == pytest.approx(COSTS.prefill_s(prompt), rel=1e-12)
    rest = sum(COSTS.step_s(0, 0, 1, prompt + n) for n in range(1, output))
    assert one.e2e_s == pytest.approx(COSTS.prefill_s(prompt) + rest, rel=1e-12)
    assert (one.prefill_rank, one.decode_rank) == (None, 0)


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks() -> None:
    limits = {"max_num_batched_tokens": 256}
    (one,) = cluster(prefill=0, decode=1, limits=limits).run([one_request(600, 2)])
    whole = COSTS.prefill_s(600)
    assert one.ttft_s == pytest.approx(whole + 2 * COSTS.prefill_base_s, rel=1e-12)


def test_a_split_request_pays_for_its_transfer() -> None:
    prompt, output = 1_000, 20
    ran = cluster(each=[costs(transfer_base_s=0.5)] * 3)
    (one,) = ran.run([one_request(prompt, output)])
    least = COSTS.prefill_s(prompt) + ran.engines[0].costs.transfer_s(prompt)
    least += (output - 1) * COSTS.decode_base_s
    assert one.e2e_s is not None
    assert least < one.e2e_s < least + 0.1
    assert one.prefill_rank == 0
    assert one.decode_rank in (1, 2)
    assert_nothing_is_left(ran)


def test_kv_caches_leave_an_engine_one_after_another() -> None:
    slow = costs(transfer_bytes_per_s=36_864 * 100.0)  # 100 tokens a second
    ran = cluster(each=[slow] * 3)
    first, second = ran.run([one_request(100, 2), one_request(100, 2)])
    assert first.e2e_s is not None
    assert second.e2e_s is not None
    assert second.e2e_s - first.e2e_s == pytest.approx(1.0, abs=0.1)


def test_a_pinned_kv_cache_takes_the_place_of_others() -> None:
    """A prefill engine whose blocks wait for readers starts nothing new."""
    slow = costs(transfer_base_s=5.0)
    ran = cluster(each=[costs(kv_capacity_tokens=1_024), slow, slow])
    first, second = ran.run([one_request(800, 2), one_request(800, 2)])
    assert first.e2e_s is not None
    assert second.ttft_s is not None
    assert second.ttft_s > 5.0 > COSTS.prefill_s(1_600)


def test_a_shared_prefix_is_computed_once() -> None:
    def arrivals(other: int) -> list[Arrival]:
        return [
            Arrival(at_s, 1_040, 2, "tight", prefix=names, prefix_block_tokens=512)
            for at_s, names in ((0.0, (1, 2, 3)), (5.0, (1, other, 4)))
        ]

    def ttft(other: int, *, caching: bool = True) -> float:
        limits = {"prefix_caching": caching}
        _, last = cluster(limits=limits).run(arrivals(other))
        assert last.ttft_s is not None
        return last.ttft_s

    assert ttft(2) < ttft(9) < ttft(9, caching=False)
    assert ttft(2, caching=False) == ttft(9, caching=False)


def test_a_faster_engine_is_given_more() -> None:
    each = [COSTS, COSTS.faster(4), COSTS.faster(0.5)]
    served = cluster(prefill=0, each=each).run(some(150, rate=20))
    ranks = Counter(one.decode_rank for one in served)
    assert ranks[1] > ranks[0] > ranks[2] > 0


def test_requests_go_to_routers_in_turn() -> None:
    ran = cluster(routers=2, policy="round_robin", prefill=2)
    seen = [Counter[str]() for _ in ran.routers]
    for router, names in zip(ran.routers, seen, strict=True):
        watch(router, names)
    ran.run(some(20))
    assert sum(seen[0].values()) == pytest.approx(sum(seen[1].values()), abs=1)


def watch(router: Any, names: Counter[str]) -> None:
    begin = router.begin

    def watched(request: Any, **more: Any) -> Any:
        names[request.request_id] += 1
        return begin(request, **more)

    router.begin = watched


def test_routers_learn_what_engines_hold_only_with_a_report() -> None:
    """Two routers that never hear of the engines cannot see each other's work."""

    def reported(report_s: float) -> float:
        ran = cluster(prefill=0, decode=2, routers=2, policy="vllm", report_s=report_s)
        counts: list[float] = []
        place = ran.routers[0].placer.report

        def report(told: Any) -> None:
            counts.append(sum(running for _, running, _ in told))
            place(told)

        ran.routers[0].placer.report = report
        ran.run(some(60))
        return max(counts)

    assert reported(1e6) == 0
    assert reported(0.1) > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"limits": {"max_model_len": 256}}, "max_model_len"),
        ({"each": [costs(kv_capacity_tokens=256)] * 3}, "an engine holds"),
    ],
)
def test_a_request_that_never_fits_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        cluster(**more).run([one_request(250, 20)])


def test_a_cluster_that_stops_says_so() -> None:
    ran = cluster()
    ran.engines[0].add = lambda leg: None  # type: ignore[method-assign]
    with pytest.raises(SimulationError, match="never be served"):
        ran.run([one_request()])


def test_work_is_booked_while_it_runs() -> None:
    ran = cluster()
    most = Counter[str]()

    def look(done: int) -> None:
        table = ran.routers[0].placer.table
        most["legs"] = max(most["legs"], table.legs(1, Phase.DECODE))

    ran.run(some(150), progress=look)
    assert most["legs"] > 0
