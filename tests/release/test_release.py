"""Split requests on the vLLM in use, whichever release it is, with a made-up model.

The servers, schedulers, KV caches and NIXL transfers are real; what the forward pass
would compute is known here beforehand (`made_up_model`). `make test-vllm` runs this on
a release that has no kernels for this machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

import httpx
import pytest
import vllm
from packaging.version import Version

from examples.cpu_cluster import Cluster
from examples.tiny_model import make_tiny_model
from tests.e2e.talk import Server, ask_and_leave, gather, prompt_ids
from vllm_calrouter.emulation.made_up_model import continuation

pytestmark = pytest.mark.e2e

API_SERVERS = 3
PAIRS = {(0, 2), (0, 3), (1, 2), (1, 3)}

#: Around the ends of blocks (32 tokens) and of a step's budget (2048).
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 128, 500, 2047, 2048, 2049, 4000]

_START_S = 120.0

#: 256 blocks: the longest text fits twice, and many short ones preempt each other.
_KV_CACHE_BYTES = 8 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two prefill and two decode engines behind three API servers."""
    folder = tmp_path_factory.mktemp("release")
    journal = folder / "journal.jsonl"
    cluster = Cluster(
        make_tiny_model(folder / "tiny"),
        engines=4,
        prefill=2,
        # Draws at random among idle engines, so every pair gets its share.
        policy="power_of_two",
        api_servers=API_SERVERS,
        arguments=[
            *("--worker-cls", "vllm_calrouter.emulation.kernel_free.KernelFreeWorker"),
            *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)),
            *("--router-config.journal", str(journal)),
        ],
        environ=_as_on_gpus(),
        log=folder / "server.log",
    )
    with cluster:
        server = Server(cluster, journal)
        wait_for_all_api_servers(server)
        yield server


def _as_on_gpus() -> dict[str, str]:
    """Schedule for the second model runner, as on GPUs: it is told other things.

    The configuration of 0.32 refuses it on a machine without Triton.
    """
    refused = Version(vllm.__version__) < Version("0.33")
    return {} if refused else {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def wait_for_all_api_servers(server: Server) -> None:
    """The first API server that is ready answers `/health`; wait for the last."""
    deadline = time.monotonic() + _START_S
    while warmed_up(server) < API_SERVERS * len(PAIRS) and time.monotonic() < deadline:
        time.sleep(0.2)


def warmed_up(server: Server) -> float:
    return server.metric("vllm:calrouter_warm_up_transfers_total")


def test_the_servers_run_the_vllm_in_use(server: Server) -> None:
    version = server.http.get("/version").json()["version"]
    assert version.partition("+")[0] == vllm.__version__.partition("+")[0]


def test_every_pair_was_warmed_up_by_every_api_server(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    assert warmed_up(server) == API_SERVERS * len(PAIRS)


def test_ranks_play_one_role_each(server: Server) -> None:
    roles = [engine["kv_role"] for engine in server.state()["engines"]]
    assert roles == ["kv_producer"] * 2 + ["kv_consumer"] * 2


def test_tokens_are_the_expected_ones_on_every_pair(server: Server) -> None:
    before = len(server.journal_lines())
    for seed, length in enumerate(LENGTHS):
        prompt = prompt_ids(length, seed)
        expected = continuation(prompt, 8)
        # Every repetition may hit the prefix cache of either side, or of both.
        for _ in range(4):
            choice = server.complete(prompt, max_tokens=8)
            assert (length, choice["token_ids"]) == (length, expected)
            assert choice["finish_reason"] == "length"
    lines = server.journal_lines(before + 4 * len(LENGTHS))[before:]
    assert not [line for line in lines if line["one_leg"]]
    assert {(line["prefill_rank"], line["decode_rank"]) for line in lines} == PAIRS


@pytest.mark.parametrize("rank", range(4))
def test_a_named_engine_serves_the_whole_request(server: Server, rank: int) -> None:
    count = server.metric("vllm:calrouter_one_leg_total", cause="forced_rank")
    prompt = prompt_ids(100, seed=50 + rank)
    choice = server.complete(prompt, rank=rank, max_tokens=8)
    assert choice["token_ids"] == continuation(prompt, 8)
    after = server.metric("vllm:calrouter_one_leg_total", cause="forced_rank")
    assert after == count + 1


@pytest.mark.parametrize("length", [1, 32, 33, 64])
@pytest.mark.parametrize("max_tokens", [1, 2, 33])
def test_short_and_longer_answers_at_block_boundaries(
    server: Server, length: int, max_tokens: int
) -> None:
    prompt = prompt_ids(length, seed=60 + max_tokens)
    choice = server.complete(prompt, max_tokens=max_tokens)
    assert choice["token_ids"] == continuation(prompt, max_tokens)


def test_streams_bring_the_same_tokens(server: Server) -> None:
    for seed in range(8):
        prompt = prompt_ids(70, seed=100 + seed)
        assert streamed(server, prompt, 20) == (continuation(prompt, 20), 20)


def streamed(server: Server, prompt: list[int], count: int) -> tuple[list[int], int]:
    """The token ids of a streamed completion, and the number its usage tells."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    tokens: list[int] = []
    told = 0
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for event in map(json.loads, lines):
        for choice in event["choices"]:
            tokens += choice["token_ids"] or []
        if event.get("usage"):
            told = event["usage"]["completion_tokens"]
    return tokens, told


async def test_100_concurrent_requests_get_exactly_their_tokens(server: Server) -> None:
    draw = random.Random(1)
    asked = [
        (prompt_ids(draw.randrange(1, 150), 200 + seed), draw.randrange(1, 20))
        for seed in range(100)
    ]
    assert await answers(server, asked) == [continuation(*ask) for ask in asked]
    assert server.settle() == ""


async def test_preempted_requests_go_on_with_the_right_tokens(server: Server) -> None:
    preemptions = server.metric("vllm:num_preemptions_total")
    # Twice what the decode engines have room for, once all have grown.
    asked = [(prompt_ids(60, 400 + seed), 250) for seed in range(100)]
    assert await answers(server, asked) == [continuation(*ask) for ask in asked]
    assert server.metric("vllm:num_preemptions_total") > preemptions
    assert server.settle() == ""


async def answers(
    server: Server, asked: list[tuple[list[int], int]]
) -> list[list[int]]:
    """The token ids for all (prompt, number of tokens), asked for at the same time."""

    async def ask(http: httpx.AsyncClient, prompt: list[int], count: int) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async with server.async_http() as http:
        return await gather(len(asked), [ask(http, *one) for one in asked])


async def test_40_aborts_at_random_moments_leave_nothing_behind(
    server: Server,
) -> None:
    draw = random.Random(2)

    async def ask(http: httpx.AsyncClient, seed: int) -> None:
        prompt = prompt_ids(draw.randrange(1, 600), 1000 + seed)
        await asyncio.sleep(draw.uniform(0, 1))
        seconds = draw.choice([0.01, 0.03, 0.1, 0.3, 1.0])
        await ask_and_leave(http, seconds, prompt=prompt, max_tokens=2000)

    aborts = server.metric("vllm:calrouter_aborts_total")
    async with server.async_http() as http:
        await gather(40, [ask(http, seed) for seed in range(40)])
    assert server.settle() == ""
    assert server.metric("vllm:calrouter_aborts_total") > aborts


def test_nothing_leaked_in_all_of_this(server: Server) -> None:
    assert server.settle() == ""
    assert server.metric("vllm:calrouter_legs_in_flight") == 0
    assert server.metric("vllm:calrouter_handovers_without_kv_total") == 0
    prompt = prompt_ids(40, seed=3)
    assert server.complete(prompt, max_tokens=3)["token_ids"] == continuation(prompt, 3)
