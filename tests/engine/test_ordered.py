"""Orders on vLLM's real schedulers, stepped without a model."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import Request, RequestStatus

from benchmarks.bare_scheduler import (
    BLOCK_TOKENS,
    bare_config,
    bare_request,
    bare_scheduler,
    made_up_output,
)
from vllm_calrouter.calibration import load
from vllm_calrouter.calibration.work import work_of_rows
from vllm_calrouter.engine.ordered import Reader, order_queue, ordered
from vllm_calrouter.engine.pace import Pace
from vllm_calrouter.messages import BOOKING

COSTS = load("a40-qwen2.5-3b").costs
STEP_TOKENS = 1024

LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": STEP_TOKENS,
    "max_model_len": 4096,
}


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return bare_config(**LIMITS)


class Engine:
    """An engine's loop around an ordered scheduler, on a clock of its own."""

    def __init__(
        self,
        config: VllmConfig,
        order: str | None = "deadline",
        *,
        patience: float | None = None,
        asynchronous: bool = False,
        blocks: int = 2000,
    ) -> None:
        self.scheduler = bare_scheduler(
            config, blocks=blocks, asynchronous=asynchronous, extend=ordered
        )
        self.now_s = 100.0
        if order is not None:
            order_queue(self.scheduler, order, patience, COSTS, lambda: self.now_s)
        self._rng = random.Random(1)

    def add(
        self,
        name: str,
        tokens: int = 100,
        *,
        left_s: Any = None,
        sent_s: Any = None,
        output: int = 1,
        prompt: list[int] | None = None,
        **more: Any,
    ) -> Request:
        booking = {"router": "a", "booking": 1, "sent_s": sent_s, "deadline_s": left_s}
        request = bare_request(
            name,
            prompt or [self._rng.randrange(500) for _ in range(tokens)],
            output_tokens=output,
            extra_args={BOOKING: booking},
        )
        for key, value in more.items():
            setattr(request, key, value)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; whom it ran, and how many tokens of each."""
        step = self.scheduler.schedule()
        self.scheduler.update_from_output(step, made_up_output(self.scheduler, step))
        return dict(step.num_scheduled_tokens)

    def job(self, name: str) -> Any:
        return self.scheduler.waiting._jobs[name]


def test_prompts_of_a_step_are_those_that_are_due_first(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add("later", 900, left_s=3.0)
    engine.add("sooner", 900, left_s=1.0)
    assert engine.step() == {"sooner": 900, "later": STEP_TOKENS - 900}
    assert engine.step() == {"later": 1800 - STEP_TOKENS}


def test_a_step_is_cut_between_prompts(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add("tight", 300, left_s=COSTS.prefill_s(300) + 0.01)
    engine.add("loose", 600, left_s=5.0)
    assert engine.step() == {"tight": 300}
    assert engine.step() == {"loose": 600}


def test_short_first_never_cuts_a_step(config: VllmConfig) -> None:
    engine = Engine(config, "short_first")
    engine.add("long", 1500)
    engine.add("short", 100)
    assert engine.step() == {"short": 100, "long": STEP_TOKENS - 100}


def test_those_who_decode_go_on_while_prompts_are_cut(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add("talks", 20, output=9)
    engine.step()
    engine.add("tight", 300, left_s=COSTS.step_s(300, 90_000, 1, 21) + 0.01)
    engine.add("loose", 600, left_s=5.0)
    assert engine.step() == {"talks": 1, "tight": 300}
    assert engine.step() == {"talks": 1, "loose": 600}


def test_a_prompt_in_chunks_is_finished_before_others_begin(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add("long", 1500, left_s=9.0)
    assert engine.step() == {"long": STEP_TOKENS}
    engine.add("due", 300, left_s=0.12)
    engine.add("later", 400, left_s=5.0)
    assert engine.step() == {"long": 476, "due": 300}


def test_without_chunked_prefill_everybody_is_served() -> None:
    whole = bare_config(
        **{**LIMITS, "max_num_batched_tokens": 4096}, enable_chunked_prefill=False
    )
    engine = Engine(whole)
    engine.add("tight", 300, left_s=COSTS.prefill_s(300) + 0.01)
    engine.add("huge", 4000, left_s=5.0)
    assert [engine.step(), engine.step()] == [{"tight": 300}, {"huge": 4000}]


def test_what_is_cached_is_not_paid_for(config: VllmConfig) -> None:
    engine = Engine(config)
    shared = list(range(320))
    engine.add("first", prompt=shared)
    engine.step()
    engine.add("again", prompt=[*shared, 1, 2, 3])
    assert engine.job("again").tokens == 3
    engine.add("other", 200)
    # Cached or not is looked up again for the step.
    engine.scheduler.kv_cache_manager.reset_prefix_cache()
    assert engine.step() == {"again": 323, "other": 200}


def test_a_deadline_counts_from_sending_not_from_the_end_of_the_last_step(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    engine.step()
    engine.now_s += 0.2
    engine.add("a", left_s=1.0, sent_s=engine.now_s - 0.15)
    engine.add("b", left_s=1.0, sent_s=engine.now_s - 5000)
    engine.add("c", left_s=1.0, sent_s=engine.now_s + 5000)
    left = {name: engine.job(name).deadline_s - engine.now_s for name in "abc"}
    assert left["a"] == pytest.approx(0.85)
    # No request waits unseen for longer than a step, whatever another clock says.
    assert left["b"] == pytest.approx(0.8)
    assert left["c"] == pytest.approx(1.0)


@pytest.mark.parametrize("value", [None, "soon", math.nan, math.inf, 1e300, [1.0]])
def test_what_is_no_deadline_is_none(config: VllmConfig, value: Any) -> None:
    engine = Engine(config)
    engine.add("a", left_s=value, sent_s=value)
    job = engine.job("a")
    assert math.isfinite(job.urgency_s)
    assert job.deadline_s == math.inf


def test_who_has_no_deadline_gets_as_much_time_to_spare_as_the_others(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    engine.add("dated", 100, left_s=COSTS.prefill_s(100) + 0.5)
    engine.add("undated", 900)
    job = engine.job("undated")
    assert job.latest_start_s - engine.now_s == pytest.approx(0.5)


def test_targets_that_nobody_can_meet_make_nobody_else_late(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    engine.add("hopeless", 900, left_s=0.001)
    engine.add("undated", 900)
    spare_s = engine.job("undated").latest_start_s - engine.now_s
    assert spare_s == pytest.approx(3.0 * COSTS.prefill_s(900))


def test_targets_of_long_ago_count_for_nothing(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add("dated", 100, left_s=5.0)
    began_s = engine.now_s
    for age_s, known in ((50.0, True), (70.0, False)):
        engine.now_s = began_s + age_s
        engine.add(f"after {age_s}", 900)
        assert math.isfinite(engine.job(f"after {age_s}").deadline_s) == known


def test_without_any_deadline_the_order_is_short_first(config: VllmConfig) -> None:
    engines = [Engine(config, order) for order in ("deadline", "short_first")]
    rng = random.Random(4)
    for number in range(30):
        tokens = rng.randint(1, 1500)
        for engine in engines:
            engine.add(f"r{number}", tokens)
            engine.now_s += 0.05
    first, second = (
        [request.request_id for request in engine.scheduler.waiting]
        for engine in engines
    )
    assert first == second != sorted(first)


def test_a_kv_cache_from_afar_costs_its_transfer(config: VllmConfig) -> None:
    reader = Reader(Engine(config).scheduler, Pace(COSTS), lambda: 0.0)
    request = bare_request("r", range(500), output_tokens=5)
    request.kv_transfer_params = {"do_remote_prefill": True}
    job = reader.read(request)
    assert job.tokens == 1
    assert job.cost_s == pytest.approx(
        COSTS.transfer_s(500) + COSTS.step_s(1, 999, 0, 0)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_under_way_are_waited_for(config: VllmConfig, asynchronous: bool) -> None:
    engine = Engine(config, asynchronous=asynchronous)
    engine.add("runs", 1000, left_s=9.0)
    under_way = engine.scheduler.schedule()
    # In time if it started now, not if it starts after the step under way.
    engine.add("misses", 1000, left_s=1.5 * COSTS.prefill_s(1000))
    engine.add("makes", 1000, left_s=2.5 * COSTS.prefill_s(1000))
    made_up = made_up_output(engine.scheduler, under_way)
    following = engine.scheduler.schedule()
    assert list(following.num_scheduled_tokens) == ["makes"]
    engine.scheduler.update_from_output(under_way, made_up)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_that_is_slower_than_its_profile_prices_prompts_up(
    config: VllmConfig, asynchronous: bool
) -> None:
    engine = Engine(config, asynchronous=asynchronous)
    for number in range(200):
        engine.add(f"r{number}", 400, output=2)
        step = engine.scheduler.schedule()
        rows = [
            (tokens, engine.scheduler.requests[name].num_computed_tokens)
            for name, tokens in step.num_scheduled_tokens.items()
        ]
        engine.now_s += 4.0 * COSTS.step_s(*work_of_rows(rows))
        made_up = made_up_output(engine.scheduler, step)
        engine.scheduler.update_from_output(step, made_up)
    engine.add("priced", 400)
    assert engine.job("priced").cost_s == pytest.approx(
        4.0 * COSTS.prefill_s(400), rel=0.1
    )


@pytest.mark.parametrize("order", ["short_first", "deadline"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_little_kv_loses_nobody(
    config: VllmConfig, order: str, asynchronous: bool
) -> None:
    engine = Engine(config, order, asynchronous=asynchronous, blocks=40, patience=0.5)
    rng = random.Random(7)
    requests = [
        engine.add(
            f"r{number}",
            rng.randint(1, 15 * BLOCK_TOKENS),
            left_s=rng.choice([None, 0.05, 0.5, 3.0]),
            output=rng.randint(1, 12 * BLOCK_TOKENS),
        )
        for number in range(40)
    ]
    gone = requests[5]
    engine.scheduler.finish_requests(gone.request_id, RequestStatus.FINISHED_ABORTED)
    steps = 0
    while engine.scheduler.has_unfinished_requests():
        assert engine.step()
        engine.now_s += 0.02
        steps += 1
        assert steps < 5000
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        if request is not gone:
            assert request.num_output_tokens == request.max_tokens
    assert not engine.scheduler.waiting
    assert len(engine.scheduler.waiting._jobs) == 0


def test_priority_goes_above_deadlines_where_vllm_has_it_on() -> None:
    engine = Engine(bare_config(**LIMITS, scheduling_policy="priority"))
    engine.add("due", 900, left_s=0.2)
    engine.add("first", 900, left_s=9.0, priority=-1)
    assert engine.step() == {"first": 900}


def test_a_fault_of_an_order_costs_no_request(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(config)
    for number in range(3):
        engine.add(f"r{number}", 300, left_s=3.0 - number)
    engine.scheduler.waiting.begin_step = None
    with caplog.at_level(logging.ERROR, "vllm.calrouter"):
        logging.getLogger("vllm.calrouter").addHandler(caplog.handler)
        assert list(engine.step()) == ["r0", "r1", "r2"]
    assert type(engine.scheduler.waiting) is FCFSRequestQueue
    assert engine.scheduler.ordering is None
    assert "vLLM's own order" in caplog.text


def test_a_scheduler_with_a_queue_of_its_own_keeps_it(config: VllmConfig) -> None:
    class Own(PriorityRequestQueue):
        pass

    engine = Engine(config, None)
    engine.scheduler.waiting = own = Own()
    order_queue(engine.scheduler, "deadline", None, COSTS)
    assert engine.scheduler.waiting is own
    assert engine.scheduler.ordering is None
