from __future__ import annotations

import random
from itertools import pairwise

import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutputs

from tests.router.requests import token
from vllm_calrouter.router.clocks import WINDOW_S, Clocks

#: Host clocks count from boot: any difference is possible.
AHEAD_S = {"a": 0.0, "b": 86_400.0, "c": -5_000.0}
WAY_S = 0.001


class Setting:
    """Engines on clocks of their own, and a router that reads their messages."""

    def __init__(self, *names: str) -> None:
        self.now_s = 10_000.0
        self.names = names
        self.clocks = Clocks(names, "a", lambda: self.now_s)

    def message(self, rank: int, way_s: float = WAY_S) -> EngineCoreOutputs:
        """Sent now, read `way_s` later, with its times translated."""
        stamp_s = self.now_s + AHEAD_S[self.names[rank]]
        output = token("r")
        queued = EngineCoreEvent(EngineCoreEventType.QUEUED, stamp_s - 0.5)
        output.events = [queued]
        outputs = EngineCoreOutputs(
            engine_index=rank, outputs=[output], timestamp=stamp_s
        )
        self.now_s += way_s
        self.clocks.translate(outputs)
        self.now_s -= way_s
        return outputs


def test_an_interval_across_two_hosts_is_what_passed() -> None:
    setting = Setting("b", "c")
    first = setting.message(0).timestamp
    setting.now_s += 0.25
    second = setting.message(1).timestamp
    assert second - first == pytest.approx(0.25, abs=WAY_S)


def test_events_move_along() -> None:
    (output,) = (outputs := Setting("b").message(0)).outputs
    assert output.events is not None
    assert outputs.timestamp - output.events[0].timestamp == pytest.approx(0.5)


def test_an_engine_on_the_router_s_clock_is_left_alone() -> None:
    setting = Setting("a", "b")
    assert setting.message(0, way_s=3.0).timestamp == setting.now_s
    assert setting.clocks.differ
    assert not Setting("a", "a").clocks.differ


def test_a_slow_message_s_way_is_not_taken_for_time() -> None:
    setting = Setting("b")
    setting.message(0)
    setting.now_s += 1.0
    slow = setting.message(0, way_s=2.0)
    assert slow.timestamp == pytest.approx(setting.now_s, abs=2 * WAY_S)


def test_steps_keep_their_lengths_under_a_jittering_network() -> None:
    setting = Setting("b")
    draw = random.Random(3)
    setting.message(0)
    stamps = []
    for _ in range(5_000):
        setting.now_s += 0.02
        way_s = WAY_S * (1.0 + draw.random())
        stamps.append(setting.message(0, way_s).timestamp)
    steps = [later - earlier for earlier, later in pairwise(stamps)]
    assert max(abs(step - 0.02) for step in steps) < WAY_S
    assert stamps[-1] - stamps[0] == pytest.approx(0.02 * 4_999, abs=WAY_S)


@pytest.mark.parametrize("drift", [-5e-5, 5e-5])
@pytest.mark.parametrize("every_s", [0.02, WINDOW_S / 3, 3 * WINDOW_S])
def test_drifting_clocks_are_followed(
    monkeypatch: pytest.MonkeyPatch, drift: float, every_s: float
) -> None:
    setting = Setting("b")
    for _ in range(2_000):
        setting.now_s += every_s
        monkeypatch.setitem(AHEAD_S, "b", AHEAD_S["b"] + drift * every_s)
        stamp_s = setting.message(0).timestamp
        # At most two windows old.
        assert abs(stamp_s - setting.now_s) <= WAY_S + 2 * WINDOW_S * abs(drift) + 1e-6
