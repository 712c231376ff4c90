"""The observer on vLLM's real schedulers, stepped without a model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.bare_scheduler import (
    BLOCK_TOKENS,
    bare_config,
    bare_request,
    bare_scheduler,
    made_up_output,
)
from tests.engine.far_kv import FETCH, KEEP, READ, FarKV
from vllm_calrouter.engine.observer import QUIET_S, Observer, observed
from vllm_calrouter.messages import MOST_ROUTERS, MOST_TIMINGS, EngineMessage, decode
from vllm_calrouter.messages import encode as encoded

BLOCKS = 60

Ended = Callable[[], KVConnectorOutput]


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return bare_config(
        max_num_seqs=8, max_num_batched_tokens=128, max_model_len=BLOCK_TOKENS * 40
    )


class Told:
    """Stands for the publisher; counts again, at once, what it is told."""

    def __init__(self, recount: Callable[[], dict[str, Any]]) -> None:
        self.recount = recount
        self.wrong: list[tuple[dict[str, Any], EngineMessage]] = []
        self.messages: list[EngineMessage] = []
        self.began_s: float | None = None
        self.closed = False

    def tell(self, message: EngineMessage, step_began_s: float | None) -> None:
        self.messages.append(message)
        self.began_s = step_began_s
        if (right := self.recount()) != figures(message):
            # Raised here it would only end the telling.
            self.wrong.append((right, message))

    def close(self) -> None:
        self.closed = True

    @property
    def last(self) -> EngineMessage:
        return self.messages[-1]


class Engine:
    """An engine's loop around an observed scheduler, without an engine.

    Asynchronous, it schedules one step ahead of the answers, as vLLM does.
    """

    def __init__(
        self, config: VllmConfig, *, asynchronous: bool = False, blocks: int = BLOCKS
    ) -> None:
        self.scheduler = bare_scheduler(
            config, blocks=blocks, asynchronous=asynchronous, extend=observed
        )
        self.connector = FarKV()
        self.scheduler.connector = self.connector
        self.now_s = 0.0
        self.told = Told(lambda: recount(self))
        self.scheduler.observer = Observer(
            self.scheduler,
            rank=3,
            role="decode",
            to=self.told,
            clock=lambda: self.now_s,
        )
        self.depth = 2 if asynchronous else 1
        self.under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.all: list[Request] = []

    @property
    def observer(self) -> Observer:
        found: Observer = self.scheduler.observer
        return found

    def add(
        self,
        prompt: Any = range(10),
        output_tokens: int = 4,
        **extra: Any,
    ) -> Request:
        request = bare_request(
            f"r{len(self.all)}", prompt, output_tokens=output_tokens, extra_args=extra
        )
        self.all.append(request)
        self.scheduler.add_request(request)
        return request

    def step(self, step_s: float = 1.0, ended: Ended | None = None) -> None:
        if self.scheduler.has_requests():
            self.schedule()
        if len(self.under_way) == self.depth or not self.scheduler.has_requests():
            self.answer(step_s, ended)

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.under_way.append((output, made_up_output(self.scheduler, output)))
        return output

    def answer(self, step_s: float = 1.0, ended: Ended | None = None) -> None:
        if not self.under_way:
            return
        output, answer = self.under_way.popleft()
        self.now_s += step_s
        answer.kv_connector_output = ended() if ended else None
        self.scheduler.update_from_output(output, answer)

    def run(self) -> None:
        while self.scheduler.has_requests() or self.under_way:
            self.step()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(config: VllmConfig, request: pytest.FixtureRequest) -> Engine:
    return Engine(config, asynchronous=request.param)


def recount(engine: Engine) -> dict[str, Any]:
    """Every figure, from all requests one by one, by the words of `EngineMessage`."""
    scheduler = engine.scheduler
    by_status: dict[str, list[Request]] = {}
    for request in scheduler.requests.values():
        name = "FINISHED" if request.is_finished() else request.status.name
        by_status.setdefault(name, []).append(request)
    running = by_status.pop("RUNNING", [])
    held = by_status.pop("FINISHED", [])
    remote = by_status.pop("WAITING_FOR_REMOTE_KVS", [])
    waiting = list(chain(*by_status.values()))
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    return {
        "prefill_tokens": sum(map(left_to_prefill, running + remote + waiting)),
        "output_tokens": sum(map(left_to_come, running + remote + waiting)),
        "context_tokens": sum(map(computed, running)),
        "running": len(running),
        "waiting": len(waiting),
        "waiting_remote": len(remote),
        "transfers_in_flight": len(
            engine.connector.reading & {r.request_id for r in remote}
        ),
        "kv_total_blocks": BLOCKS - 1,
        "kv_free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "kv_pinned_blocks": sum(len(manager.req_to_blocks[r.request_id]) for r in held),
    }


def figures(message: EngineMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in COUNTED}


COUNTED = (
    "prefill_tokens",
    "output_tokens",
    "context_tokens",
    "running",
    "waiting",
    "waiting_remote",
    "transfers_in_flight",
    "kv_total_blocks",
    "kv_free_blocks",
    "kv_pinned_blocks",
)


def computed(request: Request) -> int:
    # Of what is in flight, some may be from before a preemption.
    in_flight = request.num_in_flight_tokens - request.num_stale_output_tokens
    return request.num_computed_tokens - in_flight


def left_to_prefill(request: Request) -> int:
    if (request.kv_transfer_params or {}).get("do_remote_prefill"):
        return 0
    lost = request.num_preemptions > 0
    end = request.num_tokens - 1 if lost else request.num_prompt_tokens
    ready = computed(request)
    if request.status != RequestStatus.RUNNING:
        ready = request.num_computed_tokens
    return max(0, max(end, request.num_prompt_tokens) - ready)


def left_to_come(request: Request) -> int:
    booking = (request.sampling_params.extra_args or {}).get("calrouter")
    predicted = min(booking["output_tokens"], request.max_tokens) if booking else 0
    return max(0, predicted - request.num_output_tokens)


def check(engine: Engine) -> None:
    assert figures(engine.observer.message()) == recount(engine)
    assert not engine.told.wrong


class Story:
    """Does things to an engine at random, every kind of thing that happens to one."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.draw = random.Random(seed)
        self.bookings: dict[str, int] = {}

    def tell(self, acts: int) -> Iterator[str]:
        choices = [self.add] * 6 + [self.step] * 14 + [self.abort] * 2
        choices += [self.lose_cache, self.pause]
        for _ in range(acts):
            act = self.draw.choice(choices)
            act()
            yield act.__name__

    def add(self) -> None:
        draw = self.draw
        extra: dict[str, Any] = {}
        if draw.random() < 0.8:
            router = draw.choice("abc")
            number = self.bookings[router] = self.bookings.get(router, 0) + 1
            predicted = draw.randrange(0, 40)
            extra["calrouter"] = {
                "router": router,
                "booking": number,
                "output_tokens": predicted,
            }
        if draw.random() < 0.6:
            fate = draw.choice([READ, KEEP, FETCH])
            extra["kv_transfer_params"] = dict(fate)
        # Few first tokens, so that prompts share blocks.
        first = draw.randrange(2)
        prompt = [first] * draw.randrange(1, 12 * BLOCK_TOKENS)
        self.engine.add(prompt, draw.randrange(1, 30), **extra)

    def step(self) -> None:
        self.engine.step(ended=self.transfers)

    def transfers(self) -> KVConnectorOutput:
        connector = self.engine.connector
        arrived, read = self.some(connector.reading), self.some(connector.kept)
        connector.reading -= arrived
        connector.kept -= read
        return KVConnectorOutput(finished_sending=read, finished_recving=arrived)

    def some(self, names: set[str]) -> set[str]:
        return {name for name in sorted(names) if self.draw.random() < 0.4}

    def abort(self) -> None:
        live = sorted(self.engine.scheduler.requests)
        if live:
            self.engine.scheduler.finish_requests(
                self.draw.choice(live), RequestStatus.FINISHED_ABORTED
            )

    def lose_cache(self) -> None:
        # It preempts all, and then fails where a reader's blocks cannot be cleared.
        with suppress(RuntimeError):
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def pause(self) -> None:
        self.engine.scheduler.set_pause_state(
            self.draw.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
            if self.draw.random() < 0.3
            else PauseState.UNPAUSED
        )


@pytest.mark.parametrize("seed", range(8))
def test_figures_equal_a_recount_whatever_happens(engine: Engine, seed: int) -> None:
    story = Story(engine, seed)
    done = set()
    for act in story.tell(250):
        done.add(act)
        check(engine)
        assert engine.observer.message().seen == story.bookings
    assert done == {"add", "step", "abort", "lose_cache", "pause"}
    assert any(request.num_preemptions for request in engine.all)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_told_last_is_how_things_are_when_all_is_done(
    engine: Engine, seed: int
) -> None:
    story = Story(engine, seed)
    for _ in story.tell(120):
        pass
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    while engine.scheduler.has_requests() or engine.under_way:
        story.step()
    told = engine.told.last
    assert figures(told) == recount(engine)
    assert (told.running, told.waiting, told.kv_pinned_blocks) == (0, 0, 0)
    assert told.kv_free_blocks == told.kv_total_blocks
    assert engine.told.began_s is None
    total = sum(request.num_preemptions for request in engine.all)
    # A request lost twice between two steps was preempted once for all to see.
    assert told.preemptions <= total
    assert bool(told.preemptions) == bool(total)


def test_a_message_of_every_moment_survives_the_wire(engine: Engine) -> None:
    for _ in Story(engine, 0).tell(100):
        said = engine.observer.message()
        assert decode(encoded(said)) == said


def test_who_it_is_and_what_it_may_hold(engine: Engine) -> None:
    said = engine.observer.message()
    assert (said.rank, said.role) == (3, "decode")
    assert (said.block_tokens, said.max_seqs) == (BLOCK_TOKENS, 8)
    assert said.max_batched_tokens == 128


def test_another_start_is_another_incarnation(config: VllmConfig) -> None:
    said = [Engine(config).observer.message().incarnation for _ in range(3)]
    assert said == sorted(set(said))


def test_work_under_way_is_still_to_be_done(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(100), 5)
    engine.schedule()
    assert engine.told.last.prefill_tokens == 100
    assert engine.told.last.running == 1
    engine.answer()
    engine.schedule()
    assert engine.told.last.prefill_tokens == 0
    assert engine.told.last.context_tokens == 100


def test_a_prompt_computed_elsewhere_is_no_work_here(config: VllmConfig) -> None:
    engine = Engine(config)
    reader = engine.add(range(50), 5, kv_transfer_params=dict(READ))
    assert engine.observer.message().prefill_tokens == 0
    engine.step()
    said = engine.told.last
    assert (said.waiting, said.waiting_remote, said.transfers_in_flight) == (0, 1, 1)
    engine.step(ended=lambda: arrived(engine, reader))
    said = engine.told.last
    assert (said.waiting_remote, said.transfers_in_flight) == (1, 0)
    engine.step()
    assert (engine.told.last.running, engine.told.last.waiting_remote) == (1, 0)


def arrived(engine: Engine, *readers: Request) -> KVConnectorOutput:
    names = {reader.request_id for reader in readers}
    engine.connector.reading -= names
    return KVConnectorOutput(finished_recving=names)


def test_blocks_kept_for_a_reader_are_pinned_until_it_has_read(
    config: VllmConfig,
) -> None:
    engine = Engine(config)
    kept = engine.add(range(2 * BLOCK_TOKENS), 1, kv_transfer_params=dict(KEEP))
    engine.step()
    assert engine.told.last.kv_pinned_blocks == 2
    engine.step(ended=lambda: KVConnectorOutput(finished_sending={kept.request_id}))
    assert engine.told.last.kv_pinned_blocks == 0
    assert not engine.scheduler.has_requests()


def test_steps_that_only_add_a_token_are_told_now_and_then(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(10), 60)
    engine.step(QUIET_S / 10)
    # Its prompt was under way at the first, is context at the second.
    engine.step(QUIET_S / 10)
    before = len(engine.told.messages)
    for _ in range(40):
        engine.step(QUIET_S / 10)
    assert 3 <= len(engine.told.messages) - before <= 5
    assert engine.told.last.steps > 30


def test_what_changes_is_told_at_once(config: VllmConfig) -> None:
    engine = Engine(config)
    # More than fit: one waits.
    for _ in range(9):
        engine.add(range(10), 30)
    for _ in range(4):
        engine.step(0.0)
    before = len(engine.told.messages)
    engine.step(0.0)
    assert len(engine.told.messages) == before
    engine.add(range(10), 30)
    engine.step(0.0)
    assert engine.told.last.waiting == 2
    engine.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    engine.step(0.0)
    assert (engine.told.last.running, engine.told.last.waiting) == (8, 1)


def test_an_end_that_nobody_waits_for_is_told_at_once(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(10), 30)
    engine.add(range(10), 30)
    for _ in range(3):
        engine.step(0.0)
    engine.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    engine.step(0.0)
    assert engine.told.last.running == 1


def test_every_part_of_a_long_prompt_is_told(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(300), 5)
    told = []
    for _ in range(4):
        engine.step(0.0)
        told.append(engine.told.last.prefill_tokens)
    assert told == [300, 172, 44, 0]


def test_requests_that_come_while_paused_are_told(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    request = engine.add(range(20), 3)
    assert not engine.scheduler.has_requests(), "no step would tell it"
    assert engine.told.last.waiting == 1
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert engine.told.last.waiting == 0


# --- Bookings ---


@pytest.mark.parametrize(
    "booking",
    [
        7,
        "r",
        {},
        {"router": "r"},
        {"router": "r", "booking": "3"},
        {"router": "r", "booking": True},
        {"router": "r", "booking": -1},
        {"router": "r", "booking": 1 << 63},
        {"router": "", "booking": 1},
        {"router": "r" * 65, "booking": 1},
        {"router": 3, "booking": 1},
        {"router": "r", "booking": None, "output_tokens": "many"},
    ],
)
def test_a_booking_that_is_none_is_not_echoed(engine: Engine, booking: Any) -> None:
    engine.add(calrouter=booking)
    engine.run()
    assert engine.told.last.seen == {}


def test_the_echo_is_the_highest_booking(engine: Engine) -> None:
    for number in (3, 9, 4):
        engine.add(calrouter={"router": "r", "booking": number})
    assert engine.observer.message().seen == {"r": 9}


def test_routers_that_are_gone_make_room(engine: Engine) -> None:
    for number in range(MOST_ROUTERS + 2):
        engine.add(calrouter={"router": f"r{number}", "booking": 1})
    seen = engine.observer.message().seen
    assert len(seen) == MOST_ROUTERS
    assert "r1" not in seen
    assert f"r{MOST_ROUTERS + 1}" in seen


# --- What steps cost ---


@pytest.mark.parametrize("seed", range(6))
def test_the_shape_of_each_step_is_what_the_workers_are_asked(
    engine: Engine, seed: int
) -> None:
    story = Story(engine, seed)
    asked: deque[tuple[int, int, int, int]] = deque(maxlen=MOST_TIMINGS)
    answer = engine.scheduler.update_from_output

    def noted(output: SchedulerOutput, result: ModelRunnerOutput) -> Any:
        if output.num_scheduled_tokens:
            asked.append(shapes.popleft())
        return answer(output, result)

    shapes: deque[tuple[int, int, int, int]] = deque()
    schedule = engine.scheduler.schedule

    def shaped() -> SchedulerOutput:
        output = schedule()
        if output.num_scheduled_tokens:
            shapes.append(shape(engine, output))
        return output

    engine.scheduler.schedule = shaped
    engine.scheduler.update_from_output = noted
    for _ in story.tell(200):
        said = engine.observer.message()
        steps = [
            (s.prefill_tokens, s.prefill_squares, s.decode_seqs, s.context_tokens)
            for s in said.recent_steps
        ]
        assert steps == list(asked)
    assert said.steps > MOST_TIMINGS


def shape(engine: Engine, output: SchedulerOutput) -> tuple[int, int, int, int]:
    """A step as `StepTiming` words it, from what goes to the workers."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prefill = squares = seqs = context = 0
    for name, tokens in output.num_scheduled_tokens.items():
        request = engine.scheduler.requests[name]
        end = request.num_prompt_tokens
        if request.num_preemptions:
            end = max(end, request.num_tokens - 1)
        if before[name] < end - 1:
            prefill += tokens
            squares += (before[name] + tokens) ** 2 - before[name] ** 2
        else:
            seqs += 1
            context += before[name]
    return prefill, squares, seqs, context


def seconds(engine: Engine) -> list[float]:
    return [step.seconds for step in engine.observer.message().recent_steps]


def test_steps_of_a_busy_engine_last_from_end_to_end(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(10), 3)
    engine.step(0.5)
    # Between two steps, at a busy engine, passes time that a token waits for.
    engine.now_s += 0.25
    engine.step(0.5)
    assert seconds(engine) == [0.5, 0.75]


def test_idleness_is_no_step_s_time(engine: Engine) -> None:
    for _ in range(2):
        engine.add(range(10), 1)
        engine.run()
        engine.now_s += 1000.0
    assert len(seconds(engine)) == engine.observer.message().steps == 2
    assert max(seconds(engine)) <= 3.0


def test_a_pause_is_no_step_s_time(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(range(10), 5)
    engine.step(0.5)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.now_s += 1000.0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step(0.5)
    assert seconds(engine) == [0.5, 0.5]


def test_waiting_for_kv_is_no_step_s_time(config: VllmConfig) -> None:
    engine = Engine(config)
    reader = engine.add(range(50), 2, kv_transfer_params=dict(READ))
    for _ in range(5):
        engine.step(100.0)
    engine.step(100.0, ended=lambda: arrived(engine, reader))
    engine.step(0.5)
    assert seconds(engine) == [0.5]


def test_a_step_scheduled_ahead_counts_from_the_one_before(config: VllmConfig) -> None:
    engine = Engine(config, asynchronous=True)
    engine.add(range(10), 4)
    engine.schedule()
    engine.schedule()
    engine.answer(0.5)
    engine.answer(0.25)
    assert seconds(engine) == [0.5, 0.25]


def test_the_step_under_way_is_told_with_its_beginning(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.now_s = 5.0
    engine.add(range(10), 1)
    engine.schedule()
    assert engine.told.began_s == 5.0
    engine.answer()
    assert engine.told.began_s is None


def test_transfers_are_those_the_connector_measured(config: VllmConfig) -> None:
    engine = Engine(config)

    def moved(count: int) -> KVConnectorOutput:
        data = {
            "transfer_duration": [0.5] * count,
            "bytes_transferred": [1000] * count,
            "num_failed_transfers": [],
        }
        return KVConnectorOutput(kv_connector_stats=SimpleNamespace(data=data))

    engine.add(range(10), 4)
    engine.step(ended=lambda: moved(2))
    engine.step(ended=lambda: moved(MOST_TIMINGS))
    said = engine.observer.message()
    count = MOST_TIMINGS + 2
    assert (said.transfers, said.transfer_bytes) == (count, 1000 * count)
    assert said.transfer_s == pytest.approx(0.5 * count)
    assert len(said.recent_transfers) == MOST_TIMINGS


def test_a_connector_that_measures_otherwise_costs_nothing(config: VllmConfig) -> None:
    engine = Engine(config)
    other = SimpleNamespace(data={"gets": 3})
    engine.add(range(10), 2)
    engine.step(ended=lambda: KVConnectorOutput(kv_connector_stats=other))
    engine.run()
    assert engine.told.last.transfers == 0


# --- The scheduler goes on ---


def test_the_scheduler_does_what_it_does_unobserved(config: VllmConfig) -> None:
    def steps(observe: bool) -> list[dict[str, int]]:
        engine = Engine(config)
        if not observe:
            engine.scheduler.observer = None
        done = []
        for count in (5, 90, 200, 40):
            engine.add([count] * count, 12)
        while engine.scheduler.has_requests():
            done.append(dict(engine.schedule().num_scheduled_tokens))
            engine.answer()
        return done

    assert steps(observe=True) == steps(observe=False)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_fault_all_is_counted_again(engine: Engine, seed: int) -> None:
    story = Story(engine, seed)
    for number, _ in enumerate(story.tell(250)):
        if number % 20 == 19:
            engine.now_s += 100.0
            engine.observer._fresh.clear()
            engine.observer._held["gone"] = 7
            engine.observer._prefilling.clear()
            engine.scheduler._note("something_that_no_observer_does")
        check(engine)
        assert engine.observer.message().seen == story.bookings
        assert set(engine.observer._predicted) <= set(engine.scheduler.requests)
    assert engine.observer.message().steps > 0


def test_a_fault_in_the_observer_costs_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise ZeroDivisionError

    request = engine.add(range(10), 3)
    monkeypatch.setattr(Observer, "_count_running", fault)
    engine.run()
    assert request.num_output_tokens == 3
    assert engine.told.closed
    assert engine.scheduler.observer is None


def test_the_end_of_the_scheduler_is_the_end_of_telling(engine: Engine) -> None:
    engine.scheduler.kv_event_publisher = None
    engine.scheduler.shutdown()
    assert engine.told.closed
