from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.v1.engine import FinishReason

from tests.router.requests import answer, request, token
from vllm_calrouter.engine.scheduler import introduce
from vllm_calrouter.introduction import read
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router.endpoints import RouterEndpoints
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.split import Split


class Client:
    """Stands for the router's client: a router, and engines that answer."""

    def __init__(self) -> None:
        self.router = Router(RouterOptions(prefill=1), 3)
        self.subscriber: Any = None
        self.introductions = read(
            [introduce(RouterOptions(telemetry="tcp://10.0.0.1:5600"), 1)]
        )
        self.calibrator: Any = None
        self.served = {"model": "tiny"}
        self.split = Split(self.router.pools)

    async def engine_states(self) -> list[dict[str, Any]]:
        return [{"rank": rank} for rank in range(3)]


async def page(api_key: list[str] | None, subscriber: Any = None) -> TestClient:
    client = Client()
    client.subscriber = subscriber
    app = FastAPI()
    endpoints = RouterEndpoints()
    endpoints.attach_router(app)
    engine_client = SimpleNamespace(engine_core=client)
    await endpoints.init_state(engine_client, app.state, Namespace(api_key=api_key))
    return TestClient(app)


async def test_the_state_shows_every_engine() -> None:
    state = (await page(None)).get("/router/state").json()
    assert [row["rank"] for row in state["load"]] == [0, 1, 2]
    assert (state["idle"], state["prefill_engines"]) == (True, 1)
    assert state["split"] == {
        "prefill_engines": 1,
        "suggested_prefill_engines": None,
        "prefill_use": None,
        "decode_use": None,
    }


async def test_the_state_shows_what_was_heard() -> None:
    heard = [{"rank": 0, "age_s": None}, {"rank": 1, "age_s": 0.25}]
    ear = SimpleNamespace(describe=lambda: heard, refresh=lambda: None)
    state = (await page(None, ear)).get("/router/state").json()
    assert state["heard"] == heard
    assert (await page(None)).get("/router/state").json()["heard"] == []


async def test_the_state_shows_where_engines_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    state = (await page(None)).get("/router/state").json()
    place = {"rank": 1, "host": "10.0.0.1", "telemetry": "tcp://10.0.0.1:5601"}
    assert state["hosts"] == [place]


@pytest.mark.parametrize("given_by", ["option", "environment"])
async def test_the_server_s_key_opens_it_and_nothing_else(
    given_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given_by == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "secret")
    http = await page(["secret"] if given_by == "option" else None)
    for path in ("/router/state", "/router/decisions"):
        assert http.get(path).status_code == 401
        for key, status in (("wrong", 401), ("secret", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert http.get(path, headers=headers).status_code == status


async def test_decisions_are_the_journal_s_records() -> None:
    http = await page(None)
    client = http.app.state.calrouter_client  # type: ignore[attr-defined]
    router = client.router
    for name in "abc":
        router.begin(request(name, params={"max_tokens": 1}))
        router.answered(answer(token(name, FinishReason.LENGTH)))
    last = router._ended[-1].journey
    last.choices[0] = replace(last.choices[0], scores=((0, float("inf")),))
    found = http.get("/router/decisions", params={"limit": 2}).json()
    assert [record["request_id"] for record in found] == ["user-b", "user-c"]
    (record,) = router.decisions(1, "user-b")
    assert found[0] == msgspec.json.decode(msgspec.json.encode(record))
    (candidate,) = found[1]["decisions"][0]["candidates"]
    assert candidate == {"rank": 0, "score": None, "terms": {}}
    one = http.get("/router/decisions", params={"request_id": "user-a"}).json()
    assert [record["request_id"] for record in one] == ["user-a"]
    for limit in ("0", "-1", "x", "99999999999999999999"):
        answered = http.get("/router/decisions", params={"limit": limit})
        assert answered.status_code == 422
