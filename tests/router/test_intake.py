"""Headers and bodies on their way to a request, without engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.router.requests import request as engine_request
from vllm_calrouter.options import parse
from vllm_calrouter.router import intake
from vllm_calrouter.router.admission import RefusedError

TTFT = "x-llm-d-slo-ttft-ms"
TPOT = "x-llm-d-slo-tpot-ms"


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(intake, "_rules", None)
    monkeypatch.setattr(intake, "_admit", None)
    intake._beams_let_in.set(False)
    intake.activate(parse({"slo_classes": {"tight": {"ttft_ms": 175}}}))
    token = intake._headers.set(None)
    yield
    intake._headers.reset(token)


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest(model="tiny", prompt="x", **body)


def told(body: Any) -> dict[str, Any]:
    """What a request's body, and the headers around it, leave in `extra_args`."""
    original = type(body).to_sampling_params
    original = getattr(original, "__wrapped__", original)
    params = intake.told_by_body(original, body, 10, {})
    extra: dict[str, Any] = params.extra_args
    return extra


def passed(**params: Any) -> dict[str, Any]:
    """What `process_inputs` lets pass of a request that no OpenAI route made."""
    asked = engine_request(params=params)
    return intake.checked(lambda: asked).sampling_params.extra_args or {}


def with_headers(**headers: str) -> None:
    names = {"ttft": TTFT, "tpot": TPOT}
    found = {names[k].encode(): v.encode() for k, v in headers.items()}
    intake._headers.set(found)


def test_what_is_not_ours_stays_as_it_is() -> None:
    extra = told(completion(vllm_xargs={"mine": [1, "a"], "output_tokens": 5}))
    assert (extra["mine"], extra["output_tokens"]) == ([1, "a"], 5)


def test_prompts_of_one_batch_share_nothing_that_changes() -> None:
    body = completion(vllm_xargs={"mine": 1})
    with_headers(ttft="100")
    first, second = told(body), told(body)
    assert first == second
    assert first is not second
    assert body.vllm_xargs == {"mine": 1}


@pytest.mark.parametrize(
    ("body", "route"),
    [
        (completion(user="u"), "completions"),
        (ChatCompletionRequest(model="tiny", messages=[], user="u"), "chat"),
        (ResponsesRequest(model="tiny", input="x", user="u"), "responses"),
    ],
)
def test_every_body_tells_its_model_route_and_user(body: Any, route: str) -> None:
    assert told(body)["calrouter"] == {"model": "tiny", "route": route, "user": "u"}


def test_tools_and_reasoning_are_told() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = ChatCompletionRequest(
        model="tiny", messages=[], tools=[tool], reasoning_effort="low"
    )
    about = told(chat)["calrouter"]
    assert (about["tools"], about["reasoning"]) == (True, "low")
    answer = ResponsesRequest(model="tiny", input="x", reasoning={"effort": "high"})
    assert told(answer)["calrouter"]["reasoning"] == "high"


def test_a_long_user_name_costs_no_memory() -> None:
    assert len(told(completion(user="u" * 10_000))["calrouter"]["user"]) == 64


def test_dynamo_s_length_hint_is_a_hint_unless_the_body_has_its_own() -> None:
    nvext = {"agent_hints": {"osl": 512, "priority": 5}, "annotations": ["a"]}
    assert told(completion(nvext=nvext))["output_tokens"] == 512
    own = completion(nvext=nvext, vllm_xargs={"output_tokens": 5})
    assert told(own)["output_tokens"] == 5
    for without in (None, {}, {"agent_hints": None}, {"agent_hints": {}}):
        assert "output_tokens" not in told(completion(nvext=without))


@pytest.mark.parametrize(
    ("nvext", "names"),
    [
        (5, "nvext must be an object"),
        ({"agent_hints": [1]}, "nvext.agent_hints must be an object"),
        *(
            ({"agent_hints": {"osl": osl}}, "nvext.agent_hints.osl must")
            for osl in ("512", 0, -3, True, float("nan"), 1e12, [1])
        ),
    ],
)
def test_a_bad_hint_of_dynamo_s_is_refused_by_name(nvext: Any, names: str) -> None:
    with pytest.raises(VLLMValidationError, match=names):
        told(completion(nvext=nvext))


def test_a_header_is_a_target_unless_the_body_has_its_own() -> None:
    with_headers(ttft="250.5", tpot="40")
    extra = told(completion(vllm_xargs={"slo_tpot_ms": 30}))
    assert (extra["slo_ttft_ms"], extra["slo_tpot_ms"]) == (250.5, 30)


@pytest.mark.parametrize(
    "value", ["", "fast", "-1", "0", "nan", "inf", "1e9", "1,2", "1_0 0", "\xff"]
)
def test_a_bad_header_is_refused_by_name_on_every_route(value: str) -> None:
    with_headers(ttft=value)
    with pytest.raises(VLLMValidationError, match=f"the header {TTFT} must"):
        told(completion())
    with pytest.raises(VLLMValidationError, match=f"the header {TTFT} must"):
        passed()


def test_the_last_gate_reads_headers_for_routes_without_a_known_body() -> None:
    with_headers(ttft="100")
    assert passed(extra_args={"mine": 1}) == {"mine": 1, "slo_ttft_ms": 100}
    # What went through a body before is left as that left it.
    assert passed(extra_args={"slo_ttft_ms": 70}) == {"slo_ttft_ms": 70}


def test_the_last_gate_refuses_what_cannot_be_meant() -> None:
    with pytest.raises(VLLMValidationError, match="slo_ttft_ms"):
        passed(extra_args={"slo_ttft_ms": -1})


def test_the_last_gate_lets_pooling_pass() -> None:
    asked = engine_request(sampling_params=None)
    assert intake.checked(lambda: asked) is asked


def test_a_beam_search_is_refused_for_a_bad_wish_only() -> None:
    def made(body: Any) -> str:
        return intake.told_by_beam_search(lambda request: "beams", body)

    assert made(completion(vllm_xargs={"slo": "tight"})) == "beams"
    with pytest.raises(VLLMValidationError, match="one of tight"):
        made(completion(vllm_xargs={"slo": "loose"}))


def test_without_a_router_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_rules", None)
    with_headers(ttft="fast")
    assert "calrouter" not in told(completion(vllm_xargs={"slo": "none such"}))
    assert passed(extra_args={"slo_ttft_ms": -1}) == {"slo_ttft_ms": -1}


def no_tight_ones(wishes: Any) -> None:
    if wishes.slo == "tight":
        raise RefusedError(7.2, 3.0)


def test_a_request_is_let_in_or_not_by_its_wishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(intake, "_admit", asked.append)
    extra = told(completion(vllm_xargs={"slo": "tight"}))
    # Once: who has a body was let in by it.
    passed(extra_args=extra)
    passed(extra_args={"slo_ttft_ms": 70})
    assert [wishes.ttft_s for wishes in asked] == [0.175, 0.07]
    intake.guard(no_tight_ones)
    with pytest.raises(RefusedError):
        told(completion(vllm_xargs={"slo": "tight"}))
    with pytest.raises(RefusedError):
        passed(extra_args={"slo": "tight"})
    told(completion())


def test_a_beam_search_is_let_in_once_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(intake, "_admit", asked.append)
    body = completion(vllm_xargs={"slo": "tight"})
    intake.told_by_beam_search(lambda request: "beams", body)
    for _ in range(3):
        passed()
    assert [wishes.slo for wishes in asked] == ["tight"]
    monkeypatch.setattr(intake, "_admit", no_tight_ones)
    with pytest.raises(RefusedError):
        intake.told_by_beam_search(lambda request: "beams", body)


def test_a_session_is_let_in_by_its_first_part_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(intake, "_admit", asked.append)
    for resumable in (False, True, True):
        part = engine_request(resumable=resumable)
        intake.checked(lambda part=part: part)
    assert len(asked) == 1


async def test_a_refused_client_is_told_when_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "_admit", no_tight_ones)
    app = FastAPI()

    @app.get("/{slo}")
    async def route(slo: str) -> Any:
        try:
            told(completion(vllm_xargs={"slo": slo} if slo == "tight" else None))
        except RefusedError as error:
            return JSONResponse(str(error), status_code=error.http_status)
        return "in"

    app.add_middleware(intake.SloHeaders)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        for slo, status, retry in (
            ("tight", 429, "5"),
            ("none", 200, None),
            ("tight", 429, "5"),
        ):
            answer = await http.get(f"/{slo}")
            assert answer.status_code == status
            assert answer.headers.get("retry-after") == retry


def make_app() -> FastAPI:
    """Answers with the headers that each of its requests finds, in every way a route of
    vLLM's may look for them: at once, in a task, and while it streams."""
    app = FastAPI()

    def seen() -> dict[str, Any]:
        return told_by_headers()

    @app.get("/plain")
    async def plain(wait: float = 0) -> dict[str, Any]:
        await asyncio.sleep(wait)
        return await asyncio.create_task(_later(seen))

    @app.get("/stream")
    async def stream(request: Request, wait: float = 0) -> StreamingResponse:
        async def chunks() -> Any:
            for _ in range(3):
                await asyncio.sleep(wait)
                yield json.dumps(seen()) + "\n"

        return StreamingResponse(chunks())

    app.add_middleware(intake.SloHeaders)
    return app


async def _later(function: Any) -> Any:
    await asyncio.sleep(0)
    return function()


def told_by_headers() -> dict[str, Any]:
    params = SamplingParams()
    intake.checked(lambda: engine_request(sampling_params=params))
    return params.extra_args or {}


@asynccontextmanager
async def serving(app: FastAPI) -> Any:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def test_concurrent_requests_never_see_each_other_s_headers() -> None:
    async with serving(make_app()) as port:
        limits = httpx.Limits(max_connections=8)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, limits=limits) as http:

            async def ask(number: int) -> None:
                wait = {"wait": (number * 7 % 5) / 1000}
                mine = {} if number % 3 == 0 else {TTFT: str(number)}
                expected = {"slo_ttft_ms": number} if mine else {}
                path = "/stream" if number % 2 else "/plain"
                answer = await http.get(path, headers=mine, params=wait)
                lines = answer.text.splitlines()
                assert lines
                assert all(json.loads(line) == expected for line in lines), number

            await asyncio.gather(*(ask(number) for number in range(1, 200)))


async def test_a_pipelined_request_does_not_inherit_headers() -> None:
    """uvicorn starts it within the context of the request before it."""
    async with serving(make_app()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = f"GET /plain HTTP/1.1\r\nHost: x\r\n{TTFT}: 111\r\n\r\n"
        second = "GET /plain HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write((first + second).encode())
        text = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
    bodies = [part.split("\r\n\r\n")[1].split("HTTP/")[0] for part in split(text)]
    assert [json.loads(body) for body in bodies] == [{"slo_ttft_ms": 111}, {}]


def split(text: str) -> list[str]:
    return [f"HTTP/1.1{part}" for part in text.split("HTTP/1.1")[1:]]
