"""The policy `calibrated` on real engines: prices come true, and picks move away."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.cpu_cluster import Cluster
from tests.e2e.talk import Server, gather, prompt_ids

PREFILL, DECODE = {0}, {1, 2}


@pytest.fixture(scope="module")
def priced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One prefill and two decode engines behind one API server that prices."""
    folder = tmp_path_factory.mktemp("priced")
    journal = folder / "journal.jsonl"
    cluster = Cluster(
        model,
        engines=3,
        prefill=1,
        policy="calibrated",
        arguments=["--router-config.journal", str(journal)],
        log=folder / "server.log",
    )
    with cluster:
        yield Server(cluster, journal)


async def ask(http: httpx.AsyncClient, tokens: int, output: int, seed: int) -> str:
    """One completion whose length the router is told; the id it has in the journal."""
    name = uuid.uuid4().hex
    body = {
        "model": "tiny",
        "prompt": prompt_ids(tokens, seed),
        "max_tokens": output,
        "ignore_eos": True,
        "vllm_xargs": {"output_tokens": output},
    }
    headers = {"X-Request-Id": name}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == output
    return name


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


async def test_predicted_seconds_order_requests_as_measured_ones_do(
    priced: Server,
) -> None:
    draw = random.Random(5)
    jobs = [
        (draw.randrange(5, 800), int(2 * 100 ** draw.uniform(0, 1)), 500 + number)
        for number in range(120)
    ]
    async with priced.async_http() as http:
        names = await gather(6, [ask(http, *job) for job in jobs])
    lines = [priced.line_of(name) for name in names]
    for line in lines:
        for decision in line["decisions"]:
            (chosen,) = (
                one for one in decision["candidates"] if one["rank"] == decision["rank"]
            )
            assert chosen["score"] == pytest.approx(sum(chosen["terms"].values()))
    predicted = ranks([line["predicted_e2e_s"] for line in lines])
    measured = ranks([line["e2e_s"] for line in lines])
    # Rank correlation (Spearman).
    assert np.corrcoef(predicted, measured)[0, 1] > 0.8


async def busiest(server: Server) -> int:
    """The decode engine that runs most, as soon as one runs anything."""
    async with asyncio.timeout(30):
        while True:
            heard = (await asyncio.to_thread(server.state))["heard"]
            held = {engine["rank"]: engine["running"] for engine in heard}
            rank = max(DECODE, key=lambda rank: held[rank])
            if held[rank]:
                return rank
            await asyncio.sleep(0.02)


async def test_picks_leave_a_stuck_engine_and_nothing_is_lost(priced: Server) -> None:
    async with priced.async_http() as http:
        # Long enough that they still run when their engine stops.
        running = [asyncio.create_task(ask(http, 30, 300, 700 + n)) for n in range(8)]
        # Whichever has work: prices may prefer one engine for all.
        stuck_rank = await busiest(priced)
        stuck = priced.cluster.engine(stuck_rank)
        stuck.suspend()
        try:
            # Its messages have stopped, and what it was given stays unfinished.
            burst = [asyncio.create_task(ask(http, 30, 4, 720 + n)) for n in range(10)]
            await asyncio.sleep(0.5)
            later = []
            for number in range(10):
                later.append(asyncio.create_task(ask(http, 30, 4, 740 + number)))
                await asyncio.sleep(0.1)
            assert not all(task.done() for task in running)
        finally:
            stuck.resume()
        names = await asyncio.gather(*running, *burst, *later)
    chosen = [priced.line_of(name)["decode_rank"] for name in names]
    assert stuck_rank in chosen[: len(running)]
    assert chosen[-len(later) :].count(stuck_rank) <= 2
    assert priced.settle(20) == ""


def wait_for(what: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(what())


def test_idle_books_are_zero_and_every_engine_is_heard(priced: Server) -> None:
    def heard() -> bool:
        engines = priced.state()["heard"]
        return {e["rank"] for e in engines if e["age_s"] is not None} == (
            PREFILL | DECODE
        )

    assert wait_for(heard)
    assert wait_for(lambda: priced.state()["idle"])


def test_the_decision_is_explained(priced: Server, capsys: Any) -> None:
    from vllm_calrouter.cli import main

    name = uuid.uuid4().hex
    priced.complete(prompt_ids(60, seed=3), request_id=name, max_tokens=5)
    line = priced.line_of(name)
    assert priced.journal is not None
    main(["explain", str(priced.journal), line["request_id"]], standalone_mode=False)
    text = capsys.readouterr().out
    for word in ("prefill", "transfer", "decode", "score", "->", "end to end"):
        assert word in text
