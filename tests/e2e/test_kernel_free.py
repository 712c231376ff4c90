"""Whole servers on engines without kernels: also run against other vLLM releases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from examples.cpu_cluster import Cluster
from tests.cpu.kernel_free_worker import next_token
from tests.e2e.talk import Server, gather, prompt_ids

pytestmark = pytest.mark.kernel_free

PAIRS = {(0, 2), (0, 3), (1, 2), (1, 3)}


@pytest.fixture(scope="module")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kernel-free")
    journal = folder / "journal.jsonl"
    cluster = Cluster(
        model,
        engines=4,
        prefill=2,
        policy="power_of_two",
        api_servers=2,
        arguments=[
            *("--router-config.journal", str(journal)),
            *("--worker-cls", "tests.cpu.kernel_free_worker.KernelFreeWorker"),
        ],
        log=folder / "server.log",
    )
    with cluster:
        yield Server(cluster, journal)


def expected(prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 700, 3000])
def test_output_shows_that_the_whole_cache_arrived(split: Server, length: int) -> None:
    prompt = prompt_ids(length, seed=length)
    for _ in range(4):
        done = split.complete(prompt, max_tokens=6, ignore_eos=True)
        assert done["token_ids"] == expected(prompt, 6)


def test_all_pairs_were_used(split: Server) -> None:
    for seed in range(12):
        split.complete(prompt_ids(5, seed), max_tokens=2)
    lines = split.journal_lines(12)
    pairs = {(line["prefill_rank"], line["decode_rank"]) for line in lines}
    assert pairs >= PAIRS


def test_one_leg_requests_answer_too(split: Server) -> None:
    prompt = prompt_ids(40, seed=1)
    for rank in (None, 0, 3):
        done = split.complete(prompt, rank=rank, max_tokens=1)
        assert done["token_ids"] == expected(prompt, 1)


async def test_aborts_leave_nothing_behind(split: Server) -> None:
    draw = random.Random(3)

    async def ask_and_leave(http: httpx.AsyncClient, seed: int) -> None:
        body = {
            "model": "tiny",
            "prompt": prompt_ids(draw.randrange(1, 900), 100 + seed),
            "max_tokens": 300,
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(draw.choice([0.01, 0.05, 0.2, 0.5])):
                await http.post("/v1/completions", json=body)
        except TimeoutError:
            pass

    async with split.async_http() as http:
        await gather(40, [ask_and_leave(http, seed) for seed in range(60)])
    assert split.settle() == ""
