from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_calrouter.calibration import EngineCosts, ProfileError, load
from vllm_calrouter.emulation import KEY, Pace, arguments
from vllm_calrouter.emulation.pacing import PaceError, Pacer, Work, read_pace, work_of

A40 = load("a40-qwen2.5-3b").costs


def step(
    new: dict[str, tuple[int, int]] | None = None,
    running: dict[str, tuple[int, int]] | None = None,
) -> Any:
    """A scheduler's output: by request, tokens computed before and in this step."""
    new, running = new or {}, running or {}
    counts = {name: count for name, (_, count) in (new | running).items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start)
            for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            num_computed_tokens=[start for start, _ in running.values()],
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


class Machine:
    """Time that passes only by sleeping and by work."""

    def __init__(self, costs: EngineCosts = A40, poll_s: float = 0.0) -> None:
        self.now_s = 50.0
        self.pacer = Pacer(
            costs, poll_s=poll_s, clock=lambda: self.now_s, sleep=self.pass_by
        )

    def pass_by(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def run(self, what: Any, *, computing_s: float = 0.0) -> float:
        """Seconds from the hand-over of a step to its result."""
        began_s = self.now_s
        self.pacer.begin(what)
        self.now_s += computing_s
        self.pacer.end()
        return self.now_s - began_s


def test_a_step_s_work_is_what_the_profile_counts() -> None:
    mixed = step({"a": (32, 100)}, {"b": (500, 1), "c": (700, 1), "d": (1000, 200)})
    squares = 132**2 - 32**2 + 1200**2 - 1000**2
    assert work_of(mixed) == Work(300, squares, 2, 501 + 701)


def test_the_chunks_of_a_prompt_cost_its_own_square() -> None:
    chunks = [step({"a": (0, 300)}), step(running={"a": (300, 300)})]
    assert sum(work_of(chunk).prefill_squares for chunk in chunks) == 600**2


@pytest.mark.parametrize("computing_s", [0.0, 0.004])
def test_a_step_takes_what_the_profile_says_however_fast_the_machine(
    computing_s: float,
) -> None:
    taken_s = Machine().run(step({"a": (0, 512)}), computing_s=computing_s)
    assert taken_s == pytest.approx(A40.prefill_s(512))


def test_a_machine_that_is_too_slow_is_not_made_up_for() -> None:
    machine = Machine()
    assert machine.run(step({"a": (0, 512)}), computing_s=1.0) == pytest.approx(1.0)
    expected_s = A40.step_s(0, 0, 1, 513)
    assert machine.run(step(running={"a": (512, 1)})) == pytest.approx(expected_s)


def test_scheduling_a_running_batch_takes_no_time_of_the_device() -> None:
    machine = Machine()
    machine.run(step({"a": (0, 512)}))
    ended_s = machine.now_s
    machine.now_s += 0.003
    machine.run(step(running={"a": (512, 1)}))
    assert machine.now_s - ended_s == pytest.approx(A40.step_s(0, 0, 1, 513))


@pytest.mark.parametrize("next_step", [step({"b": (0, 64)}), step({"a": (600, 2)})])
def test_an_idle_engine_s_step_begins_when_it_is_handed_over(next_step: Any) -> None:
    machine = Machine()
    machine.run(step({"a": (0, 512)}))
    machine.now_s += 5.0
    expected_s = A40.step_s(*work_of(next_step))
    assert machine.run(next_step) == pytest.approx(expected_s)


def test_a_step_that_computes_nothing_takes_no_time() -> None:
    assert Machine().run(step()) == 0.0


def test_waiting_is_slowed_down_with_the_rest() -> None:
    machine = Machine(poll_s=0.007)
    assert machine.run(step()) == pytest.approx(0.007)
    taken_s = machine.run(step({"a": (0, 512)}))
    assert taken_s == pytest.approx(A40.prefill_s(512))


def test_a_machine_that_does_not_keep_up_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    target = "vllm_calrouter.emulation.pacing.logger.warning"
    monkeypatch.setattr(target, lambda *args: told.append(args))
    machine = Machine()
    for _ in range(200):
        machine.run(step({"a": (0, 512)}), computing_s=0.01)
    assert not told
    for _ in range(200):
        machine.run(step({"a": (0, 512)}), computing_s=0.1)
    assert len(told) == 1


def test_a_pace_comes_back_from_the_arguments() -> None:
    pace = Pace("a40-qwen2.5-3b", slow_down=8, speed={1: 0.5}, prefill=1)
    for forward_pass in (False, True):
        words = arguments(pace, forward_pass=forward_pass)
        assert "--worker-cls" in words

        config = json.loads(words[words.index("--additional-config") + 1])
        assert read_pace(config) == pace


def test_slow_down_and_speed_scale_every_step() -> None:
    pace = Pace("a40-qwen2.5-3b", slow_down=8, speed={1: 0.5})
    whole = A40.step_s(700, 490_000, 9, 5000)
    assert pace.costs(0).step_s(700, 490_000, 9, 5000) == pytest.approx(8 * whole)
    assert pace.costs(1).step_s(700, 490_000, 9, 5000) == pytest.approx(16 * whole)


WRONG = [
    (None, "needs --additional-config"),
    ({}, "needs --additional-config"),
    ({KEY: 3}, KEY),
    ({KEY: {}}, "profile"),
    ({KEY: {"profile": "x", "slowdown": 8}}, "slowdown"),
    ({KEY: {"profile": "x", "slow_down": 0}}, "slow_down"),
    ({KEY: {"profile": "x", "speed": {"one": 2}}}, "speed"),
]


@pytest.mark.parametrize(("config", "names"), WRONG)
def test_a_wrong_pace_ends_in_one_line(config: Any, names: str) -> None:
    with pytest.raises(PaceError, match=names) as told:
        read_pace(config)
    assert "\n" not in str(told.value)


def test_an_unknown_profile_or_absurd_speed_is_refused() -> None:
    with pytest.raises(ProfileError, match="nosuch"):
        Pace("nosuch").costs(0)
    with pytest.raises(ValueError, match="speed"):
        Pace("a40-qwen2.5-3b", speed={0: 0.0}).costs(0)
