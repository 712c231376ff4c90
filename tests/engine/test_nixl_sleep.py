"""NIXL's progress thread sleeps where it was told to."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import psutil
import pytest
from nixl import _api

from vllm_calrouter.engine import connector, nixl_sleep
from vllm_calrouter.engine.nixl_sleep import ON_CPU_MS, let_sleep
from vllm_calrouter.options import RouterOptions


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test does to NIXL."""
    monkeypatch.setattr(_api.nixlBind, "nixlAgentConfig", _api.nixlBind.nixlAgentConfig)


def delay_us() -> int:
    config = _api.nixlBind.nixlAgentConfig()
    # As NIXL's own API does.
    config.pthrDelay = 0
    delay: int = config.pthrDelay
    return delay


@pytest.mark.parametrize(
    ("on_cpu", "sleep_ms", "expected_ms"),
    [(True, None, ON_CPU_MS), (False, None, 0), (True, 0, 0), (False, 7, 7)],
)
def test_for_how_long(
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: bool,
    sleep_ms: int | None,
    expected_ms: int,
) -> None:
    monkeypatch.setattr(
        nixl_sleep.current_platform, "is_cpu", lambda: on_cpu, raising=False
    )
    let_sleep(sleep_ms)
    let_sleep(sleep_ms)
    assert delay_us() == 1000 * expected_ms


def cores_of_an_idle_agent() -> float:
    """Taken by the threads that it starts."""
    process = psutil.Process()
    before = {thread.id for thread in process.threads()}
    # As many threads as vLLM asks for.
    agent = _api.nixl_agent("idle", _api.nixl_agent_config(num_threads=4))

    def used_s() -> float:
        threads = [one for one in process.threads() if one.id not in before]
        return sum(one.user_time + one.system_time for one in threads)

    used_before_s, began_s = used_s(), time.monotonic()
    time.sleep(0.5)
    used = (used_s() - used_before_s) / (time.monotonic() - began_s)
    assert agent.name == "idle"
    return used


def test_an_idle_agent_takes_no_core() -> None:
    awake = cores_of_an_idle_agent()
    let_sleep(1)
    # Whoever shares the machine slows a thread that never sleeps, too.
    assert cores_of_an_idle_agent() < 0.2 * awake


def test_another_nixl_is_told_of_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other:
        pthrDelay = 0  # noqa: N815

    monkeypatch.setattr(_api.nixlBind, "nixlAgentConfig", Other)
    # vLLM's loggers do not propagate to where pytest listens.
    monkeypatch.setattr(nixl_sleep.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm.calrouter"):
        let_sleep(1)
    assert _api.nixlBind.nixlAgentConfig is Other
    assert "pthrDelay" in caplog.text


def test_without_nixl_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_sleep.nixl_utils, "NixlWrapper", None, raising=False)
    let_sleep(1)
    assert delay_us() == 0


def test_the_connector_lets_them_sleep_as_the_option_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(connector, "let_sleep", told.append)
    monkeypatch.setattr(
        connector, "router_options", lambda _: RouterOptions(prefill=1, nixl_sleep_ms=7)
    )
    monkeypatch.setattr(connector.NixlPullConnector, "__init__", lambda *_: None)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0),
        kv_transfer_config=SimpleNamespace(),
    )
    connector.NixlConnector(config, None, None)  # type: ignore[arg-type]
    assert told == [7]
