"""How a router meets its engines; all else of the client needs real engines."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_calrouter._core import Phase
from vllm_calrouter.engine.scheduler import introduce
from vllm_calrouter.options import OptionError, RouterOptions
from vllm_calrouter.placement import Placer, Pools, Prompt
from vllm_calrouter.router import client as module
from vllm_calrouter.router.client import RouterClient
from vllm_calrouter.router.router import Router

OPTIONS = RouterOptions(prefill=1, telemetry="off")


class Client(RouterClient):
    """The router's client without vLLM's sockets: `answers` are the engines'."""

    def __init__(self, answers: Any) -> None:
        placer = Placer(OPTIONS, Pools(2, 1))
        self.router: Any = SimpleNamespace(options=OPTIONS, placer=placer)
        self.answers = answers
        self.client_index = 0
        self.calibrator = None

    async def call_utility_async(self, method: str, *args: Any) -> None:
        return

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        if isinstance(self.answers, Exception):
            raise self.answers
        if self.answers is None:
            await asyncio.Event().wait()
        answers: list[Any] = self.answers
        return answers


async def test_engines_are_known_after_the_meeting() -> None:
    client = Client([introduce(OPTIONS, rank) for rank in range(2)])
    await client._meet_engines()
    assert [engine.rank for engine in client.introductions] == [0, 1]
    assert client._clocks is None


async def test_times_of_another_host_are_translated() -> None:
    answers = [introduce(OPTIONS, rank) for rank in range(2)]
    answers[1]["clock"] = "another boot"
    client = Client(answers)
    await client._meet_engines()
    assert client._clocks is not None


async def test_a_host_started_without_the_router_ends_the_start() -> None:
    unknown = Exception("Call to calrouter_introduction method failed: no attribute")
    with pytest.raises(OptionError, match=r"same --router-plugin.* on every host"):
        await Client(unknown)._meet_engines()


async def test_the_state_is_there_when_a_host_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.01)
    assert await Client(None).engine_states() == []
    assert await Client([{"rank": 0}]).engine_states() == [{"rank": 0}]


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"policy": "calibrated"}, True),
        ({"policy": "vllm"}, False),
        ({"policy": "vllm", "admission": 2.0}, True),
    ],
)
async def test_what_work_costs_is_fitted_where_anything_acts_on_it(
    options: dict[str, Any], fits: bool
) -> None:
    client = Client([])
    router = client.router = Router(RouterOptions(**options), 2)
    client.introductions, client._listening = [], []
    client._listen()
    client._stop_listening()
    assert (client.calibrator is not None) == fits
    assert router.placer.refresh is None


@pytest.mark.parametrize(
    ("what", "args", "empties"),
    [
        ("reset_prefix_cache_async", (), True),
        ("pause_scheduler_async", ("wait",), True),
        ("pause_scheduler_async", ("keep", False), False),
        ("sleep_async", (), True),
        ("sleep_async", (0,), False),
    ],
)
async def test_what_was_cached_is_forgotten_when_caches_are_emptied(
    what: str, args: tuple[Any, ...], empties: bool
) -> None:
    client = Client([True, True])
    prompt = Prompt(list(range(200)))
    options = RouterOptions(policy="calibrated")
    placer = client.router.placer = Placer(options, Pools(2, 0))
    placer.choose(Phase.PREFILL, 200, 1, prompt=prompt)
    await getattr(client, what)(*args)
    again = placer.choose(Phase.PREFILL, 200, 1, prompt=prompt)
    assert again.cached_tokens == (0 if empties else 192)


def vllm_config(**changes: Any) -> Any:
    model = {"model": "Qwen/Qwen2.5-3B", "dtype": "torch.bfloat16", **changes}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, **model),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )


def test_what_is_served_is_named_as_in_a_profile() -> None:
    served = module._served(vllm_config())
    assert served["dtype"] == served["kv_dtype"] == "bfloat16"
    assert served["tensor_parallel"] == 2
    assert served["gpu"]


@pytest.mark.parametrize(
    ("options", "level", "says"),
    [
        (
            {"policy": "calibrated", "profile": "a40-qwen2.5-3b"},
            logging.WARNING,
            "tensor_parallel 1, ",
        ),
        ({"policy": "calibrated"}, logging.INFO, "no profile was written"),
        ({}, logging.INFO, "is fitted as they come"),
        ({"telemetry": "off"}, logging.INFO, "work is mispriced"),
        ({"calibration": False}, logging.INFO, "work is mispriced"),
        ({"policy": "vllm"}, logging.INFO, "orders correct it"),
        (
            {"policy": "vllm", "order": "fcfs", "admission": 1.0},
            logging.INFO,
            "is fitted as they come",
        ),
        (
            {"order": "deadline", "profile": "a40-qwen2.5-3b"},
            logging.WARNING,
            "calrouter calibrate",
        ),
        ({"policy": "least_loaded", "order": "fcfs"}, None, None),
    ],
)
def test_a_profile_of_something_else_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    level: int | None,
    says: str | None,
) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(
        module.logger, "log", lambda at, text, *args: said.append((at, text % args))
    )
    for index in range(3):
        client = Client([])
        client.client_index = index
        client.router = SimpleNamespace(options=RouterOptions(**options))
        client.served = module._served(vllm_config())
        client._warn_of_profile()
    if says is None:
        assert said == []
    else:
        ((told_at, text),) = said
        assert told_at == level
        assert says in text
