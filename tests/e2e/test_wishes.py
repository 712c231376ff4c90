"""SLOs and length hints over HTTP: bad ones are refused, good ones reach the router."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import pytest

from tests.e2e.talk import Server, prompt_ids

TTFT = "x-llm-d-slo-ttft-ms"
TPOT = "x-llm-d-slo-tpot-ms"

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt_ids(5), "max_tokens": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
    },
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
    },
}
OPENAI = ["/v1/completions", "/v1/chat/completions"]


def ask(
    server: Server, path: str, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"model": "tiny", **BODIES[path], **body}
    return server.http.post(path, json=body, headers=headers)


def named(
    server: Server, path: str, headers: dict[str, str] | None = None, **body: Any
) -> list[dict[str, Any]]:
    """Ask under an id of its own; what the decisions page then tells of it."""
    name = uuid.uuid4().hex
    answer = ask(server, path, {"X-Request-Id": name, **(headers or {})}, **body)
    assert answer.status_code == 200, answer.text
    return told(server, path, name)


def told(server: Server, path: str, name: str) -> list[dict[str, Any]]:
    prefix = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}[path]
    query = {"request_id": prefix + name}
    page = server.http.get("/router/decisions", params=query)
    assert page.status_code == 200, page.text
    records: list[dict[str, Any]] = page.json()
    return records


BAD_XARGS = [
    {"slo": "none such"},
    {"slo": 3},
    {"slo_ttft_ms": "fast"},
    {"slo_ttft_ms": 0},
    {"slo_tpot_ms": -1},
    {"slo_tpot_ms": 1e12},
    {"output_tokens": -5},
    {"output_tokens": "many"},
    {"output_tokens": 10**9},
    {"true_output_tokens": 0},
]
BAD: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    *((next(iter(xargs)), {}, {"vllm_xargs": xargs}) for xargs in BAD_XARGS),
    (TTFT, {TTFT: "fast"}, {}),
    (TTFT, {TTFT: "nan"}, {}),
    (TPOT, {TPOT: "-3"}, {}),
    ("osl", {}, {"nvext": {"agent_hints": {"osl": "long"}}}),
    ("osl", {}, {"nvext": {"agent_hints": {"osl": 0}}}),
    ("nvext", {}, {"nvext": "x"}),
]


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("stream", [False, True])
def test_every_bad_value_is_a_400_that_names_it(
    unified: Server, path: str, stream: bool
) -> None:
    before = len(unified.journal_lines())
    for name, headers, body in BAD:
        answer = ask(unified, path, headers, stream=stream, **body)
        assert answer.status_code == 400, (name, body, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "BadRequestError"
        assert error["param"] == name
        assert "must be" in error["message"]
    assert len(unified.journal_lines()) == before
    assert unified.settle() == ""
    # vLLM's own count of requests under way: nothing stayed registered.
    assert unified.metric("vllm:num_requests_running") == 0
    assert unified.metric("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_other_routes_refuse_and_serve_alike(
    unified: Server, path: str, stream: bool
) -> None:
    xargs = {"slo": "tight", "output_tokens": 7}
    good = ask(unified, path, {TPOT: "50"}, vllm_xargs=xargs, stream=stream)
    assert good.status_code == 200, good.text
    assert "error" not in good.text.lower() or '"error":null' in good.text
    for headers, bad in (({}, {"slo": "none such"}), ({TTFT: "fast"}, {})):
        answer = ask(unified, path, headers, vllm_xargs=bad, stream=stream)
        assert answer.status_code == 400, answer.text
    line = unified.journal_lines()[-1]
    assert line["predicted_output_tokens"] == 3
    assert line["slo"] == {"class": "tight", "ttft_s": 0.175, "tpot_s": 0.05}


def test_the_tokens_in_route_is_guarded_too(unified: Server) -> None:
    params = {"max_tokens": 3, "extra_args": {"slo_ttft_ms": -1}}
    body = {"model": "tiny", "token_ids": prompt_ids(5), "sampling_params": params}
    answer = unified.http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert "slo_ttft_ms" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("stream", [False, True])
def test_good_ones_reach_the_router_from_wherever_they_came(
    unified: Server, path: str, stream: bool
) -> None:
    (plain,) = named(unified, path, stream=stream)
    assert plain["slo"] == {"class": "loose", "ttft_s": 0.525, "tpot_s": None}
    assert plain["predicted_by"] == "online"

    (from_body,) = named(
        unified,
        path,
        stream=stream,
        vllm_xargs={"slo": "tight", "slo_tpot_ms": 25, "output_tokens": 2, "mine": "x"},
    )
    assert from_body["slo"] == {"class": "tight", "ttft_s": 0.175, "tpot_s": 0.025}
    assert from_body["predicted_output_tokens"] == 2
    assert from_body["predicted_by"] == "hint"

    headers = {TTFT: "99", TPOT: "11.5"}
    (from_headers,) = named(unified, path, headers, stream=stream)
    assert from_headers["slo"] == {"class": "loose", "ttft_s": 0.099, "tpot_s": 0.0115}

    nvext = {"agent_hints": {"osl": 1}}
    (from_nvext,) = named(unified, path, stream=stream, nvext=nvext)
    assert from_nvext["predicted_output_tokens"] == 1
    assert from_nvext["predicted_by"] == "hint"

    # The journal on disk has the same.
    lines = unified.journal_lines()
    assert all(record in lines for record in (plain, from_body, from_headers))


def test_all_prompts_and_choices_of_one_request_share_its_wishes(
    unified: Server,
) -> None:
    records = named(
        unified,
        "/v1/completions",
        {TTFT: "70"},
        prompt=[prompt_ids(4, seed) for seed in range(3)],
        n=2,
        temperature=1.0,
        vllm_xargs={"output_tokens": 2},
    )
    assert len(records) == 6
    assert {record["slo"]["ttft_s"] for record in records} == {0.07}
    assert {record["predicted_output_tokens"] for record in records} == {2}


async def test_concurrent_requests_keep_their_own(unified: Server) -> None:
    async with unified.async_http() as http:

        async def one(number: int) -> tuple[str, str, float | None]:
            name, path = uuid.uuid4().hex, OPENAI[number % 2]
            mine = {} if number % 3 == 0 else {TTFT: str(number)}
            body = {**BODIES[path], "model": "tiny", "stream": number % 4 < 2}
            headers = {"X-Request-Id": name, **mine}
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return path, name, number / 1e3 if mine else 0.525

        asked = await asyncio.gather(*(one(number) for number in range(1, 61)))
    for path, name, ttft_s in asked:
        (record,) = told(unified, path, name)
        assert record["slo"]["ttft_s"] == ttft_s


def test_a_split_request_keeps_its_wishes_on_both_legs(split: Server) -> None:
    before = len(split.journal_lines())
    split.complete(
        prompt_ids(70), max_tokens=4, vllm_xargs={"slo_ttft_ms": 300, "mine": 1}
    )
    (line,) = split.journal_lines(before + 1)[before:]
    assert line["slo"]["ttft_s"] == 0.3
    assert None not in (line["prefill_rank"], line["decode_rank"])


def test_the_online_predictor_learns_what_outputs_are_like(unified: Server) -> None:
    name = "vllm:calrouter_output_tokens_ratio_count"
    before = unified.metric(name, source="online")
    lines = len(unified.journal_lines())
    for seed in range(30):
        # Any token ends the output: one token each, finished by itself.
        ends = [*range(512)]
        unified.complete(
            prompt_ids(600, seed),
            max_tokens=200,
            stop_token_ids=ends,
            # Of whom nothing was learned from other tests' requests.
            user="somebody",
        )
    assert unified.metric(name, source="online") == before + 30
    said = unified.journal_lines(lines + 30)[lines:]
    assert {line["output_tokens"] for line in said} == {1}
    predicted = [line["predicted_output_tokens"] for line in said]
    assert predicted[-1] < predicted[0] / 3


def test_the_decisions_page_asks_for_the_server_s_key(unified: Server) -> None:
    url = f"{unified.cluster.url}/router/decisions"
    assert httpx.get(url).status_code == 401
