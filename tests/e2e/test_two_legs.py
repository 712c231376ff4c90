"""Requests split over a prefill and a decode engine, against one engine's answers.

The reference is the same server's engine 2, asked for by `X-data-parallel-rank`: a
request that names an engine runs there as a whole.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.e2e.talk import Server, ask_and_leave, gather, prompt_ids

ONE_ENGINE = 2
PAIRS = {(0, 2), (0, 3), (1, 2), (1, 3)}
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 127, 500, 1023, 1024, 2000]


def pair(line: dict[str, Any]) -> tuple[int, int]:
    return line["prefill_rank"], line["decode_rank"]


def test_every_pair_was_warmed_up_by_every_api_server(split: Server) -> None:
    assert split.warm_ups(3 * len(PAIRS)) == 3 * len(PAIRS)


def test_ranks_play_one_role_each_under_their_own_limits(split: Server) -> None:
    engines = split.state()["engines"]
    roles = [engine["kv_role"] for engine in engines]
    assert roles == ["kv_producer"] * 2 + ["kv_consumer"] * 2
    assert [engine["max_num_seqs"] for engine in engines] == [64, 64, 16, 16]


def test_greedy_ids_equal_one_engine_s_on_every_pair(split: Server) -> None:
    before = len(split.journal_lines())
    for seed, length in enumerate(LENGTHS):
        prompt = prompt_ids(length, seed)
        expected = split.complete(prompt, rank=ONE_ENGINE, max_tokens=8)["token_ids"]
        # Every repetition may hit the prefix cache of either side, or of both.
        for _ in range(6):
            assert split.complete(prompt, max_tokens=8)["token_ids"] == expected, length
    lines = split.journal_lines(before + 7 * len(LENGTHS))[before:]
    assert {pair(line) for line in lines if not line["one_leg"]} == PAIRS


async def test_500_concurrent_requests_get_exactly_their_tokens(split: Server) -> None:
    draw = random.Random(1)
    wanted = [draw.randrange(1, 12) for _ in range(500)]

    async def ask(http: httpx.AsyncClient, seed: int, tokens: int) -> int:
        body = {
            "model": "tiny",
            "prompt": prompt_ids(draw.randrange(1, 120), seed),
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        got: int = answer.json()["usage"]["completion_tokens"]
        return got

    async with split.async_http() as http:
        jobs = [ask(http, seed, tokens) for seed, tokens in enumerate(wanted)]
        assert await gather(250, jobs) == wanted
    assert split.settle() == ""


async def test_200_aborts_at_random_moments_leave_nothing_behind(split: Server) -> None:
    draw = random.Random(2)

    async def ask(http: httpx.AsyncClient, seed: int) -> None:
        prompt = prompt_ids(draw.randrange(1, 600), 1000 + seed)
        await asyncio.sleep(draw.uniform(0, 2))
        seconds = draw.choice([0.01, 0.05, 0.1, 0.3, 1.0])
        await ask_and_leave(
            http, seconds, prompt=prompt, max_tokens=200, ignore_eos=True
        )

    async with split.async_http() as http:
        await gather(200, [ask(http, seed) for seed in range(200)])
    assert split.settle() == ""
    # Each moment of a request's life was hit, the hand-over included.
    assert split.metric("vllm:calrouter_aborts_total", stage="prefill") > 0
    assert split.metric("vllm:calrouter_aborts_total", stage="decode") > 0
    assert split.complete([5, 6, 7], max_tokens=3)["finish_reason"] == "length"


SAME_ON_ONE_ENGINE: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probabilities": {"logprobs": 3},
    "seeded sampling": {"temperature": 1.0, "seed": 7},
    "several choices": {"temperature": 1.0, "seed": 7, "n": 3},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "repetition penalty": {"repetition_penalty": 1.3},
    "minimum of tokens": {"min_tokens": 12},
    "stop token": {"stop_token_ids": list(range(100, 300))},
    "bias": {"logit_bias": {"17": 60.0}},
    "priority": {"priority": 3},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "echo": {"echo": True},
    "echo with scores": {"echo": True, "logprobs": 2},
    "prompt scores": {"prompt_logprobs": 2},
    "choice grammar": {"structured_outputs": {"choice": ["red fox", "lazy dog"]}},
    "JSON schema": {
        "structured_outputs": {"json": {"type": "object", "maxProperties": 1}}
    },
    "adapter": {"model": "adapter"},
    "beam search": {"use_beam_search": True, "n": 2},
    "length hint": {"vllm_xargs": {"output_tokens": 30}},
}


@pytest.mark.parametrize("name", SAME_ON_ONE_ENGINE)
def test_answer_equals_one_engine_s(split: Server, name: str) -> None:
    body = {"max_tokens": 16, **SAME_ON_ONE_ENGINE[name]}
    body = {"temperature": 0, "return_token_ids": True, **body}
    prompt = prompt_ids(50, seed=77)
    ask = {"path": "/v1/completions", "prompt": prompt, **body}
    expected = split.post(rank=ONE_ENGINE, **ask)
    assert without_names(split.post(**ask)) == without_names(expected)


def without_names(answer: dict[str, Any]) -> Any:
    """An answer less what differs between any two: ids, times, cache hits."""
    if isinstance(answer, dict):
        differs = ("id", "created", "created_at", "prompt_tokens_details", "metrics")
        return {k: without_names(v) for k, v in answer.items() if k not in differs}
    if isinstance(answer, list):
        return [without_names(item) for item in answer]
    if isinstance(answer, float):
        return pytest.approx(answer, abs=1e-3)
    return answer


def test_adapter_changes_the_output(split: Server) -> None:
    prompt = prompt_ids(50, seed=77)
    plain = split.complete(prompt, max_tokens=16)
    adapted = split.complete(prompt, max_tokens=16, model="adapter")
    assert plain["token_ids"] != adapted["token_ids"]


def test_stop_string_is_found_and_frees_all(split: Server) -> None:
    prompt = prompt_ids(40, seed=5)
    text = split.complete(prompt, max_tokens=24, ignore_eos=True)["text"]
    stop = text[6:8]
    stopped = split.complete(prompt, max_tokens=24, ignore_eos=True, stop=[stop])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]
    assert split.settle() == ""


def test_prompt_at_the_model_s_limit(split: Server) -> None:
    prompt = prompt_ids(4094, seed=6)
    expected = split.complete(prompt, rank=ONE_ENGINE, max_tokens=2)["token_ids"]
    assert split.complete(prompt, max_tokens=2)["token_ids"] == expected
    too_long = {"model": "tiny", "prompt": prompt_ids(4096, seed=6), "max_tokens": 1}
    assert split.http.post("/v1/completions", json=too_long).status_code == 400


def test_streamed_text_equals_the_whole(split: Server) -> None:
    body = {"prompt": prompt_ids(70, seed=8), "max_tokens": 20, "temperature": 0}
    whole = split.post("/v1/completions", **body)["choices"][0]["text"]
    request = {"model": "tiny", "stream": True, **body}
    with split.http.stream("POST", "/v1/completions", json=request) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == whole


WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO = [{"role": "user", "content": "what is the weather in Paris"}]

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 12},
    "/v1/responses": {"input": "hello", "max_output_tokens": 12},
    "/v1/messages": {"messages": HELLO, "max_tokens": 12},
}


@pytest.mark.parametrize("route", ROUTES)
def test_routes_answer_as_one_engine_does(split: Server, route: str) -> None:
    body = {"temperature": 0, **ROUTES[route]}
    texts = {json.dumps(texts_in(split.post(route, r, **body))) for r in (None, 2)}
    assert len(texts) == 1


def texts_in(answer: dict[str, Any]) -> Any:
    for key in ("choices", "output", "content"):
        if key in answer:
            return [part for part in json_leaves(answer[key]) if isinstance(part, str)]
    raise AssertionError(answer)


def json_leaves(node: Any) -> Any:
    if isinstance(node, dict):
        for key, value in node.items():
            if key != "id":
                yield from json_leaves(value)
    elif isinstance(node, list):
        for item in node:
            yield from json_leaves(item)
    else:
        yield node


def test_tool_call_equals_one_engine_s(split: Server) -> None:
    def calls(rank: int | None) -> list[tuple[str, str]]:
        answer = split.post(
            "/v1/chat/completions",
            rank,
            messages=HELLO,
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=100,
            temperature=0,
        )
        made = answer["choices"][0]["message"]["tool_calls"]
        return [(c["function"]["name"], c["function"]["arguments"]) for c in made]

    assert calls(None) == calls(ONE_ENGINE)
    assert [name for name, _ in calls(None)] == ["get_weather"]


ONE_LEG = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "single_token": {"max_tokens": 1},
    "forced_rank": {"rank": 3},
}


@pytest.mark.parametrize("cause", ONE_LEG)
def test_what_cannot_be_split_is_counted_by_cause(split: Server, cause: str) -> None:
    count = split.metric("vllm:calrouter_one_leg_total", cause=cause)
    split.complete(prompt_ids(20), **{"max_tokens": 4, **ONE_LEG[cause]})
    assert split.metric("vllm:calrouter_one_leg_total", cause=cause) == count + 1


def test_a_transferred_prompt_is_not_reported_as_cached(split: Server) -> None:
    ask = {"prompt": prompt_ids(300, seed=99), "max_tokens": 3, "temperature": 0}
    first = split.post("/v1/completions", **ask)["usage"]["prompt_tokens_details"]
    assert (first or {}).get("cached_tokens", 0) == 0


def test_decisions_and_times_are_told(split: Server) -> None:
    before = len(split.journal_lines())
    split.complete(prompt_ids(60, seed=3), max_tokens=5)
    line = split.journal_lines(before + 1)[-1]
    assert pair(line) in PAIRS
    assert line["prompt_tokens"] == 60
    assert line["output_tokens"] == 5
    assert 0 < line["prefill_s"] == line["ttft_s"] < line["e2e_s"]
    assert line["first_token_bypass"] is None
    assert line["ttft_s"] + line["pause_s"] <= line["e2e_s"]
    assert [d["policy"] for d in line["decisions"]] == ["power_of_two"] * 2
    assert all(len(d["candidates"]) == 2 for d in line["decisions"])


def test_nothing_leaked_in_all_of_this(split: Server) -> None:
    assert split.settle() == ""
    assert split.metric("vllm:calrouter_handovers_without_kv_total") == 0
