"""The router's books and legs, without engines."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from tests.router.requests import KV, answer, prefilled, request, token
from vllm_calrouter._core import Phase
from vllm_calrouter.calibration import load
from vllm_calrouter.options import RouterOptions, SloClass
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router


class Lines(list[dict[str, Any]]):
    write = list.append


def split_router(**options: Any) -> Router:
    options = {"policy": "round_robin", "prefill": 2, "first_token": False, **options}
    return Router(RouterOptions(**options), 6, journal=Lines())  # type: ignore[arg-type]


def idle(router: Router) -> bool:
    return router.placer.table.is_idle() and router.requests_under_way == 0


def test_a_request_takes_both_legs_and_leaves_nothing() -> None:
    router = split_router()
    first = router.begin(request())
    assert first.data_parallel_rank == 0
    assert router.placer.table.legs(0, Phase.PREFILL) == 1

    outputs = answer(prefilled("r"))
    (second,) = router.answered(outputs)
    assert outputs.outputs == []
    assert second.data_parallel_rank == 2
    assert second.sampling_params.extra_args["kv_transfer_params"] == KV
    assert router.placer.table.legs(0, Phase.PREFILL) == 0
    assert router.placer.table.legs(2, Phase.DECODE) == 1

    outputs = answer(token("r"))
    assert router.answered(outputs) == []
    assert len(outputs.outputs) == 1
    router.answered(answer(token("r", FinishReason.STOP)))
    assert idle(router)
    (line,) = router._journal  # type: ignore[union-attr,attr-defined]
    assert (line["prefill_rank"], line["decode_rank"]) == (0, 2)
    assert (line["output_tokens"], line["finish"]) == (2, "stop")


def test_legs_say_whose_they_are_and_under_which_booking() -> None:
    router = split_router()
    first = router.begin(request())
    (second,) = router.answered(answer(prefilled("r")))
    whole = router.begin(request("w", params={"max_tokens": 1}))
    said = [
        leg.sampling_params.extra_args["calrouter"] for leg in (first, second, whole)
    ]
    assert [each["booking"] for each in said] == [1, 2, 3]
    assert {each["router"] for each in said} == {router.uid}
    assert [each["output_tokens"] for each in said] == [1, 20, 1]


def test_no_two_routers_are_one() -> None:
    assert len({split_router().uid for _ in range(9)}) == 9


def test_a_choice_is_made_from_the_freshest_figures() -> None:
    router = split_router()
    asked: list[str] = []
    router.placer.refresh = lambda: asked.append("p")
    router.begin(request())
    router.answered(answer(prefilled("r")))
    assert asked == ["p", "p"]


def test_decode_stays_on_the_host_of_its_prefill_where_another_is_far() -> None:
    costs = msgspec.structs.replace(
        load("a40-qwen2.5-3b").costs, far_transfer_bytes_per_s=1e9
    )
    options = RouterOptions(policy="calibrated", prefill=2)
    router = Router(options, 6, costs=[costs] * 6)
    hosts = ["one", "other", "other", "one", "other", "one"]
    router.placer.place_on(hosts)
    for name in "abcdefgh":
        first = router.begin(request(name, prompt=1000))
        (second,) = router.answered(answer(prefilled(name)))
        assert hosts[first.data_parallel_rank] == hosts[second.data_parallel_rank]


def test_a_client_that_leaves_during_prefill_frees_the_cache_at_once() -> None:
    router = split_router()
    router.begin(request())
    assert router.abort(["r"]) == ["r-prefill"]
    # The engine had finished before the abort reached it.
    (release,) = router.answered(answer(prefilled("r")))
    assert release.abort_immediately
    assert release.data_parallel_rank in range(2, 6)
    assert idle(router)
    assert router.answered(answer(dropped=("r-release",))) == []


def test_an_abort_that_reaches_the_prefill_engine_in_time_needs_no_release() -> None:
    router = split_router()
    router.begin(request())
    router.abort(["r"])
    assert router.answered(answer(dropped=("r-prefill",))) == []
    assert idle(router)


def test_an_abort_during_decode_goes_to_the_decode_leg() -> None:
    router = split_router()
    router.begin(request())
    router.answered(answer(prefilled("r")))
    assert router.abort(["r"]) == ["r"]
    router.answered(answer(dropped=("r",)))
    assert idle(router)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_prefill_leg_that_ends_badly_ends_the_request(reason: FinishReason) -> None:
    router = split_router()
    router.begin(request())
    outputs = answer(EngineCoreOutput("r-prefill", [7], finish_reason=reason))
    assert router.answered(outputs) == []
    (told,) = outputs.outputs
    assert (told.request_id, told.new_token_ids) == ("r", [])
    assert told.finish_reason == reason
    assert idle(router)


def test_a_cache_that_was_not_kept_is_computed_again_and_counted() -> None:
    registry = CollectorRegistry()
    router = split_router()
    router.metrics = RouterMetrics(registry)
    router.begin(request())
    (leg,) = router.answered(answer(prefilled("r", kv=None)))
    assert "kv_transfer_params" not in (leg.sampling_params.extra_args or {})
    name = "vllm:calrouter_handovers_without_kv_total"
    assert registry.get_sample_value(name) == 1


def test_a_leg_that_cannot_be_sent_becomes_the_client_s_error() -> None:
    router = split_router()
    router.begin(request())
    (leg,) = router.answered(answer(prefilled("r")))
    told = router.not_sent(leg)
    assert told is not None
    assert (told.request_id, told.finish_reason) == ("r", FinishReason.ERROR)
    assert idle(router)
    first = router.begin(request("s"))
    assert router.not_sent(first) is not None
    assert idle(router)


def test_a_chosen_rank_is_used_and_counted_by_cause() -> None:
    registry = CollectorRegistry()
    router = split_router()
    router.metrics = RouterMetrics(registry)
    leg = router.begin(request(data_parallel_rank=5))
    assert (leg.request_id, leg.data_parallel_rank) == ("r", 5)
    cause = {"cause": "forced_rank"}
    assert registry.get_sample_value("vllm:calrouter_one_leg_total", cause) == 1


def test_prefill_only_work_goes_to_prefill_engines() -> None:
    router = split_router()
    ranks = {
        router.begin(request(str(i), params={"max_tokens": 1})).data_parallel_rank
        for i in range(6)
    }
    assert ranks == {0, 1}


def test_an_open_session_ends_with_its_engine_not_with_a_chunk() -> None:
    router = split_router()
    router.begin(request(resumable=True))
    router.answered(answer(dropped=()))
    outputs = answer(token("r", FinishReason.LENGTH))
    outputs.finished_requests = set()
    router.answered(outputs)
    assert "r" in router
    router.answered(answer(dropped=("r",)))
    assert idle(router)


def test_what_the_prompt_cost_is_told_from_where_it_ran() -> None:
    router = split_router()
    router.begin(request())
    first = prefilled("r")
    where_it_ran = PrefillStats(num_prompt_tokens=10, num_local_cached_tokens=4)
    first.prefill_stats = where_it_ran
    router.answered(answer(first))
    later = token("r")
    later.prefill_stats = PrefillStats(num_prompt_tokens=10)
    outputs = answer(later)
    router.answered(outputs)
    assert outputs.outputs[0].prefill_stats is where_it_ran
    (record,) = router.decisions(1, "user-r")
    assert record["cached_tokens"] == 4


def test_a_prompt_forced_onto_an_engine_is_cached_there_all_the_same() -> None:
    router = Router(RouterOptions(policy="calibrated"), 4)
    legs = []
    for name, rank in (("a", 2), ("b", 2), ("c", None)):
        legs.append(router.begin(request(name, 200, data_parallel_rank=rank)))
        router.answered(answer(token(name, FinishReason.LENGTH)))
    assert [leg.data_parallel_rank for leg in legs] == [2, 2, 2]
    expected = [one["expected_cached_tokens"] for one in router.decisions(3)]
    assert expected == [0, 192, 192]


def test_who_does_not_read_the_cache_is_not_expected_to() -> None:
    router = Router(RouterOptions(policy="calibrated"), 2)
    prompts = {"first": {}, "scored": {"prompt_logprobs": 1}}
    for name, params in prompts.items():
        router.begin(request(name, 200, params=params))
        router.answered(answer(token(name, FinishReason.LENGTH)))
    _, scored = router.decisions(2)
    assert scored["expected_cached_tokens"] == 0


@pytest.mark.parametrize("prefill", [0, 2])
def test_a_prompt_goes_where_it_is_expected_to_be_cached(prefill: int) -> None:
    router = Router(RouterOptions(policy="calibrated", prefill=prefill), 6)
    router.metrics = RouterMetrics(registry := CollectorRegistry())
    for name in "ab":
        leg = router.begin(request(name, prompt=200))
        answered = prefilled(name) if prefill else token(name)
        answered.prefill_stats = PrefillStats(num_local_cached_tokens=176)
        router.answered(answer(answered))
        router.answered(answer(token(name, FinishReason.STOP)))
    first, second = router.decisions(2)
    ranks = [record["decisions"][0]["rank"] for record in (first, second)]
    assert ranks == [leg.data_parallel_rank] * 2
    assert first["expected_cached_tokens"] == 0
    assert second["expected_cached_tokens"] == 192
    name = "vllm:calrouter_cached_prompt_tokens_total"
    assert registry.get_sample_value(name, {"by": "router"}) == 192
    assert registry.get_sample_value(name, {"by": "engine"}) == 2 * 176


def test_prompts_that_caches_know_by_more_than_their_tokens_are_not_guessed() -> None:
    router = Router(RouterOptions(policy="calibrated"), 6)
    for name in "ab":
        router.begin(request(name, prompt=200, mm_features=["a picture"]))
    for name in "cd":
        router.begin(request(name, prompt=200, cache_salt=name))
    told = [router.decisions(1, f"user-{name}")[0] for name in "abcd"]
    assert [record["expected_cached_tokens"] for record in told] == [0] * 4


def test_a_client_that_leaves_while_others_legs_are_sent_frees_the_cache() -> None:
    router = split_router()
    router.begin(request("a"))
    router.begin(request("b"))
    first, second = router.answered(answer(prefilled("a"), prefilled("b")))
    assert router.still_wanted(first) is first
    router.abort(["b"])
    assert router.still_wanted(second).abort_immediately
    assert "b" not in router
    router.answered(answer(token("a", FinishReason.LENGTH)))
    assert idle(router)


def test_a_decode_leg_that_ends_unread_frees_the_cache() -> None:
    router = split_router()
    router.begin(request())
    router.answered(answer(prefilled("r")))
    failed = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)
    outputs = answer(failed)
    (release,) = router.answered(outputs)
    assert release.abort_immediately
    assert outputs.outputs == [failed]
    assert idle(router)


def test_a_cache_that_was_read_is_not_freed_again() -> None:
    router = split_router()
    router.begin(request())
    router.answered(answer(prefilled("r")))
    assert router.answered(answer(token("r"))) == []
    assert router.answered(answer(token("r", FinishReason.ERROR))) == []


def test_length_threshold_uses_all_prefill_engines() -> None:
    router = split_router(policy="length_threshold")
    ranks = {router.begin(request(str(i))).data_parallel_rank for i in range(8)}
    assert ranks == {0, 1}


async def test_a_warm_up_s_outputs_are_nobody_s() -> None:
    router = split_router()
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    leg = router.begin(request(), pair=(1, 4), done=done)
    assert leg.data_parallel_rank == 1
    (leg,) = router.answered(answer(prefilled("r")))
    assert leg.data_parallel_rank == 4
    outputs = answer(token("r", FinishReason.LENGTH))
    router.answered(outputs)
    assert outputs.outputs == []
    assert done.result() == "length"
    assert router._journal == []


def test_routers_start_at_different_engines() -> None:
    options = RouterOptions(policy="round_robin")
    firsts = [
        Router(options, 6, index=i, count=3).begin(request()).data_parallel_rank
        for i in range(3)
    ]
    assert firsts == [0, 2, 4]


events = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.sampled_from(
            [
                *("begin", "prefilled", "stopped", "failed", "token", "end"),
                *("abort", "drop", "unsent"),
            ]
        ),
    ),
    max_size=120,
)


@settings(max_examples=400)
@given(events, st.sampled_from([0, 2]), st.booleans())
def test_load_is_zero_after_any_interleaving(
    happenings: list[tuple[int, str]], prefill: int, first_token: bool
) -> None:
    """Whatever order begins, answers, aborts and losses come in, twice or never."""
    router = split_router(prefill=prefill, first_token=first_token)
    begun = 0
    for number, event in happenings:
        begun += event == "begin" and str(number) not in router
        happen(router, str(number), event)
    for number in range(8):
        happen(router, str(number), "drop")
    assert idle(router)
    lines: Any = router._journal
    assert len(lines) == begun


def happen(router: Router, name: str, event: str) -> None:
    if event == "begin":
        if name not in router:
            router.begin(request(name))
    elif event == "prefilled":
        router.answered(answer(prefilled(name)))
    elif event == "stopped":
        output = prefilled(name)
        output.finish_reason = FinishReason.STOP
        router.answered(answer(output))
    elif event == "failed":
        output = EngineCoreOutput(
            f"{name}-prefill", [], finish_reason=FinishReason.ERROR
        )
        router.answered(answer(output))
    elif event == "token":
        router.answered(answer(token(name)))
    elif event == "end":
        router.answered(answer(token(name, FinishReason.LENGTH)))
    elif event == "abort":
        router.abort([name])
    elif event == "unsent":
        router.not_sent(request(name))
    else:
        router.answered(answer(dropped=(name, f"{name}-prefill")))


def test_a_hint_is_used_recorded_and_told_apart_from_a_guess() -> None:
    registry = CollectorRegistry()
    router = split_router()
    router.metrics = RouterMetrics(registry)
    router.begin(request("a", params={"extra_args": {"output_tokens": 4}}))
    router.begin(request("b", params={"max_tokens": 300}))
    for name in ("a", "b"):
        router.answered(answer(prefilled(name)))
        router.answered(answer(token(name)))
        router.answered(answer(token(name, FinishReason.STOP)))
    first, second = router.decisions(10)
    assert (first["predicted_output_tokens"], first["predicted_by"]) == (4, "hint")
    assert (second["predicted_output_tokens"], second["predicted_by"]) == (256, "hint")
    name = "vllm:calrouter_output_tokens_ratio"
    labels = {"source": "hint"}
    assert registry.get_sample_value(f"{name}_sum", labels) == 4 / 2 + 256 / 2
    assert registry.get_sample_value(f"{name}_count", labels) == 2


def test_the_online_predictor_learns_from_what_ends_and_not_from_warm_ups() -> None:
    router = split_router(predictor="online")

    def expected(name: str) -> int:
        router.begin(request(name, params={"max_tokens": 1000}))
        router.abort([name])
        router.answered(answer(dropped=(f"{name}-prefill",)))
        told: int = router.decisions(1)[0]["predicted_output_tokens"]
        return told

    before = expected("first")
    for number in range(200):
        name = str(number)
        router.begin(request(name, params={"max_tokens": 1000}))
        router.answered(answer(prefilled(name)))
        router.answered(answer(token(name)))
        router.answered(answer(token(name, FinishReason.STOP)))
    assert before > 200
    # Aborted before a token came, "first" has taught nothing.
    assert expected("last") < 10

    learnt = len(router.predictor)  # type: ignore[arg-type]
    done: asyncio.Future[str] = asyncio.Future(loop=asyncio.new_event_loop())
    router.begin(request("w", prompt=1, params={"max_tokens": 2}), done=done)
    router.answered(answer(prefilled("w")))
    router.answered(answer(token("w", FinishReason.LENGTH)))
    assert done.done()
    assert len(router.predictor) == learnt  # type: ignore[arg-type]


def test_an_slo_and_its_defaults_reach_the_record() -> None:
    router = split_router(
        slo_classes={"tight": SloClass(ttft_ms=175), "loose": SloClass(tpot_ms=99)},
        default_slo="loose",
    )
    for name, extra in (("a", {"slo": "tight"}), ("b", {"slo_ttft_ms": 50}), ("c", {})):
        router.begin(request(name, params={"extra_args": extra}))
    records = [router.decisions(1, f"user-{name}")[0] for name in "abc"]
    assert [record["slo"] for record in records] == [
        {"class": "tight", "ttft_s": 0.175, "tpot_s": None},
        {"class": "loose", "ttft_s": 0.05, "tpot_s": 0.099},
        {"class": "loose", "ttft_s": None, "tpot_s": 0.099},
    ]


def test_bad_wishes_that_came_past_the_gate_cost_no_request() -> None:
    router = split_router()
    router.begin(request(params={"extra_args": {"slo": "none such", "x": 1}}))
    router.answered(answer(prefilled("r")))
    router.answered(answer(token("r", FinishReason.STOP)))
    assert idle(router)


def test_predicted_times_are_compared_where_there_are_any() -> None:
    registry = CollectorRegistry()
    now = [0.0]
    options = RouterOptions(policy="round_robin", prefill=2)
    router = Router(options, 6, clock=lambda: now[0])
    router.metrics = RouterMetrics(registry)
    for name in ("predicted", "not"):
        router.begin(request(name))
        if name == "predicted":
            journey = router._by_request[name]
            journey.predicted_ttft_s, journey.predicted_e2e_s = 0.5, 6.0
        now[0] += 2.0
        router.answered(answer(prefilled(name)))
        router.answered(answer(token(name)))
        now[0] += 1.0
        router.answered(answer(token(name, FinishReason.STOP)))
    for kind, ratio in (("ttft", 0.25), ("e2e", 2.0)):
        name = f"vllm:calrouter_{kind}_ratio"
        assert registry.get_sample_value(f"{name}_sum") == ratio
        assert registry.get_sample_value(f"{name}_count") == 1


def test_the_last_decisions_are_kept_and_no_more() -> None:
    router = split_router()
    for number in range(1200):
        router.begin(request(str(number), params={"max_tokens": 1}))
        router.answered(answer(token(str(number), FinishReason.LENGTH)))
    ids = [record["request_id"] for record in router.decisions(10_000)]
    assert ids == [f"user-{number}" for number in range(700, 1200)]
    assert [r["request_id"] for r in router.decisions(2)] == ids[-2:]
    # What is remembered is small: no prompts but the last one.
    held = [hasattr(one.journey, "request") for one in router._ended]
    assert held == [False] * 499 + [True]


def test_a_request_under_way_is_found_by_its_id_without_an_end() -> None:
    router = split_router()
    router.begin(request())
    (record,) = router.decisions(10, "user-r")
    assert (record["finish"], record["decode_rank"]) == (None, None)
    assert router.decisions(10) == []
    assert router.decisions(10, "user-s") == []
