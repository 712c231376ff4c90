from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.calibration.steps import traffic
from tests.calibration.test_fit import off, worst
from tests.engine.messages import message
from vllm_calrouter._core import Costs, Table
from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.messages import MOST_TIMINGS, StepTiming
from vllm_calrouter.router import calibrator as module
from vllm_calrouter.router.calibrator import Calibrator, Prices
from vllm_calrouter.router.metrics import RouterMetrics

A40 = load("a40-qwen2.5-3b").costs


class Setting:
    """A calibrator, the table it prices, and engines that report steps."""

    def __init__(
        self,
        priors: list[EngineCosts],
        roles: list[str] | None = None,
        *,
        takes_over: bool = True,
    ) -> None:
        self.now_s = 0.0
        self.put: dict[int, Costs] = {}
        self.registry = CollectorRegistry()
        self.calibrator = Calibrator(
            priors,
            roles or ["both"] * len(priors),
            self,
            takes_over=takes_over,
            metrics=RouterMetrics(self.registry),
            clock=lambda: self.now_s,
        )
        self.told = [0] * len(priors)

    def set_costs(self, rank: int, costs: Costs) -> None:
        self.put[rank] = costs

    def report(self, rank: int, steps: list[StepTiming], at_once: int = 5) -> None:
        """Tell steps in messages that overlap, as an engine does."""
        for begin in range(0, len(steps), at_once):
            end = min(begin + at_once, len(steps))
            self.told[rank] += end - begin
            recent = steps[max(0, end - MOST_TIMINGS) : end]
            said = message(rank=rank, steps=self.told[rank], recent_steps=recent)
            self.calibrator.hear(said)
            self.calibrator.learn(rank)
            self.now_s += 0.05
            self.calibrator.put_if_due()

    def state(self, rank: int) -> dict[str, Any]:
        return self.calibrator.describe()[rank]

    def ratio(self, rank: int) -> float | None:
        name = "vllm:calrouter_step_prediction_ratio"
        return self.registry.get_sample_value(name, {"engine": str(rank)})


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(
        module.logger, "warning", lambda text, *args: said.append(text % args)
    )
    return said


def test_the_table_of_the_core_takes_constants() -> None:
    table: Prices = Table(1)
    fitted = Calibrator([A40], ["both"], table)
    assert fitted.costs(0) == A40


@pytest.mark.parametrize("wrong", [1 / 7.4, 7.4])
def test_engines_of_a_wrong_profile_are_priced_rightly_after_400_steps(
    wrong: float,
) -> None:
    setting = Setting([A40.faster(wrong)])
    setting.report(0, traffic(A40, 400, noise=0.005))
    assert setting.state(0)["source"] == "fit"
    assert worst(setting.calibrator.costs(0), A40) < 0.05
    put = setting.put[0]
    assert put.decode_base_s == setting.calibrator.costs(0).decode_base_s
    # What steps say nothing of stays the profile's.
    assert put.transfer_base_s == A40.transfer_base_s


def test_engines_that_differ_get_their_own_constants() -> None:
    slow = A40.faster(1 / 1.5)
    setting = Setting([A40, A40])
    for rank, costs in enumerate((A40, slow)):
        setting.report(rank, traffic(costs, 300, seed=rank, noise=0.005))
    assert abs(off(setting.calibrator.costs(1), slow)["decode_base_s"]) < 0.02
    assert abs(off(setting.calibrator.costs(0), A40)["decode_base_s"]) < 0.02


def test_an_engine_that_was_not_heard_costs_what_its_peers_do() -> None:
    setting = Setting([A40.faster(7.4)] * 3, ["prefill", "prefill", "decode"])
    setting.report(0, traffic(A40, 200, noise=0.005))
    sources = [row["source"] for row in setting.calibrator.describe()]
    assert sources == ["fit", "peers", "profile"]
    assert setting.calibrator.costs(1) == setting.calibrator.costs(0)
    assert 2 not in setting.put


@pytest.mark.parametrize("takes_over", [True, False])
def test_a_wrong_profile_is_noticed_within_100_steps(
    warned: list[str], takes_over: bool
) -> None:
    setting = Setting([A40.faster(7.4)], takes_over=takes_over)
    setting.report(0, traffic(A40, 100))
    assert len(warned) == 1
    assert "engine 0: a step takes 7." in warned[0]
    setting.report(0, traffic(A40, 100, seed=1))
    assert len(warned) == 1
    if takes_over:
        assert setting.ratio(0) == pytest.approx(1, abs=0.05)
        assert not setting.state(0)["drifts"]
    else:
        assert setting.ratio(0) == pytest.approx(1 / 7.4, rel=0.05)
        assert setting.state(0)["drifts"]
        assert "calrouter calibrate" in warned[0]
        assert not setting.put


def test_wrong_prefill_is_noticed_where_most_steps_decode(warned: list[str]) -> None:
    wrong = A40.changed(
        prefill_base_s=0.0, prefill_per_token_s=A40.prefill_per_token_s / 7.4
    )
    setting = Setting([wrong], takes_over=False)
    setting.report(0, traffic(A40, 130, kinds="ddddp"))
    assert len(warned) == 1
    assert setting.state(0)["drifts"]


def test_a_right_profile_is_no_drift(warned: list[str]) -> None:
    setting = Setting([A40], takes_over=False)
    setting.report(0, traffic(A40, 500, outliers=0.1))
    assert not warned
    assert not setting.state(0)["drifts"]


def test_an_engine_that_slows_down_is_followed() -> None:
    setting = Setting([A40])
    setting.report(0, traffic(A40, 300, noise=0.01))
    slow = A40.faster(0.5)
    setting.report(0, traffic(slow, 200, noise=0.01))
    assert abs(off(setting.calibrator.costs(0), slow)["decode_base_s"]) < 0.05
    assert setting.ratio(0) == pytest.approx(1, abs=0.05)


def test_each_step_counts_once_however_often_it_is_told() -> None:
    setting = Setting([A40])
    steps = traffic(A40, 6)
    for _ in range(3):
        setting.calibrator.hear(message(steps=6, recent_steps=steps))
    setting.calibrator.learn(0)
    assert setting.state(0)["steps"] == 6
    setting.calibrator.hear(message(steps=8, recent_steps=[*steps, *steps[:2]]))
    # Of those lost between two messages, what is still told counts.
    setting.calibrator.hear(message(steps=900, recent_steps=steps))
    setting.calibrator.learn(0)
    assert setting.state(0)["steps"] == 6 + 2 + 6


def test_an_engine_that_started_again_is_heard_from_its_first_step() -> None:
    setting = Setting([A40])
    setting.calibrator.hear(message(steps=900, recent_steps=traffic(A40, 8)))
    setting.calibrator.hear(
        message(incarnation=8, steps=3, recent_steps=traffic(A40, 3))
    )
    setting.calibrator.learn(0)
    assert setting.state(0)["steps"] == 8 + 3


def test_hearing_learns_nothing_yet_and_keeps_little() -> None:
    setting = Setting([A40])
    for number in range(100):
        setting.calibrator.hear(
            message(steps=8 * (number + 1), recent_steps=traffic(A40, 8, seed=number))
        )
    assert setting.state(0)["steps"] == 0
    setting.calibrator.learn(0)
    assert 8 <= setting.state(0)["steps"] <= 32


def test_a_fault_in_the_fit_begins_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting([A40])
    monkeypatch.setattr(module.logger, "exception", lambda *_: None)
    with monkeypatch.context() as faulty:
        faulty.setattr(
            module.OnlineFit, "observe", lambda *_: (_ for _ in ()).throw(ValueError)
        )
        setting.report(0, traffic(A40, 20))
    setting.report(0, traffic(A40, 60))
    assert setting.state(0)["source"] == "fit"


def test_a_fit_that_has_no_answer_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.logger, "exception", lambda *_: None)
    setting = Setting([A40, A40])
    setting.report(0, traffic(A40, 60))
    setting.calibrator._engines[0].fit._information[:] = 0.0
    setting.now_s += 1.0
    setting.calibrator.put_if_due()
    setting.report(0, traffic(A40, 60))
    assert setting.state(0)["source"] == "fit"
    assert setting.state(0)["steps"] == 60


async def test_while_many_engines_are_judged_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting([A40] * 5)
    judged: list[int] = []
    monkeypatch.setattr(setting.calibrator, "_judge", judged.append)
    task = asyncio.create_task(setting.calibrator.run())
    for done in range(5):
        assert len(judged) == done
        await asyncio.sleep(0)
    task.cancel()


async def test_it_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEARN_S", 0.001)
    setting = Setting([A40])
    task = asyncio.create_task(setting.calibrator.run())
    steps = traffic(A40.faster(0.5), 64)
    for end in range(8, 65, 8):
        setting.calibrator.hear(message(steps=end, recent_steps=steps[end - 8 : end]))
        while setting.state(0)["steps"] < end:
            await asyncio.sleep(0.001)
        setting.now_s += 1
    while 0 not in setting.put:
        await asyncio.sleep(0.001)
    task.cancel()


def test_the_page_is_plain_json() -> None:
    setting = Setting([A40, A40])
    setting.report(0, traffic(A40, 100))
    page = setting.calibrator.describe()
    assert msgspec.json.decode(msgspec.json.encode(page)) == page
    assert page[1]["standard_errors"]["decode_base_s"] is None
    assert page[0]["standard_errors"]["decode_base_s"] > 0
