"""Requests that are not let in, in a cluster."""

from __future__ import annotations

from tests.simulation.clusters import cluster, digest, some
from tests.simulation.test_cluster import assert_nothing_is_left
from vllm_calrouter.simulation.results import summary
from vllm_calrouter.workloads import generate


def test_refusing_some_serves_the_others_in_time() -> None:
    flood = generate("chat", rate=60.0, duration_s=6.0, seed=3)
    open_to_all = cluster(prefill=1, decode=4).run(flood)
    guarded = cluster(prefill=1, decode=4, options={"admission": 1.0})
    served = guarded.run(flood)
    assert_nothing_is_left(guarded)
    figures = summary(served)
    assert 0 < figures["refused"] < len(flood) / 2
    assert figures["failed"] == 0
    let_in = [one for one in served if one.finish != "refused"]
    assert all(one.tokens == one.arrival.output_tokens for one in let_in)
    assert all(one.tokens == 0 for one in served if one.finish == "refused")
    assert sum(one.good for one in served) > 1.5 * sum(one.good for one in open_to_all)


def test_nobody_is_refused_who_can_be_served() -> None:
    plain = cluster().run(some(30))
    guarded = cluster(options={"admission": 50.0}).run(some(30))
    assert digest(plain) == digest(guarded)
