"""How the end-to-end tests talk to a server and look into it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from examples.cpu_cluster import Cluster

_TIMEOUT_S = 180.0

#: Ids that are neither special tokens nor anything the tests look for.
_FIRST_PLAIN_ID = 3
_PLAIN_IDS = 400


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    """`count` random token ids; no two seeds share a prefix worth caching."""
    draw = random.Random(seed * 10_007 + count)
    return [draw.randrange(_FIRST_PLAIN_ID, _PLAIN_IDS) for _ in range(count)]


@dataclass
class Server:
    """A running cluster, the journal it writes, and an HTTP client for it."""

    cluster: Cluster
    journal: Path | None
    key: str | None = None
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(**self._settings())

    def _settings(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # Without keep-alive each request may reach another API server.
        limits = httpx.Limits(max_keepalive_connections=0)
        return {
            "base_url": self.cluster.url,
            "timeout": _TIMEOUT_S,
            "headers": headers,
            "limits": limits,
        }

    def async_http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._settings())

    def post(
        self,
        path: str,
        rank: int | None = None,
        *,
        request_id: str | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """Post to a route, on one engine if `rank` names it; the answer as JSON."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        answer = self.http.post(path, json={"model": "tiny", **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def complete(
        self, prompt: list[int] | str, rank: int | None = None, **body: Any
    ) -> dict[str, Any]:
        """One greedy completion; its first choice, with the token ids."""
        settings = {"temperature": 0, "return_token_ids": True, **body}
        answer = self.post("/v1/completions", rank, prompt=prompt, **settings)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def state(self) -> dict[str, Any]:
        answer = self.http.get("/router/state")
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels, over all API servers."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            match = re.match(rf"{re.escape(name)}(\{{.*\}})? (\S+)$", line)
            wanted = (f'{key}="{value}"' for key, value in labels.items())
            if match and all(pair in (match[1] or "") for pair in wanted):
                total += float(match[2])
        return total

    def warm_ups(self, count: int, seconds: float = 120.0) -> float:
        """Warm-up transfers so far, once there are `count`.

        `/health` answers as soon as the first API server is ready.
        """
        name = "vllm:calrouter_warm_up_transfers_total"
        deadline = time.monotonic() + seconds
        while (made := self.metric(name)) < count and time.monotonic() < deadline:
            time.sleep(0.2)
        return made

    def leaks(self) -> str:
        """What is still held although nothing should be; empty when nothing is."""
        held = [
            f"engine {engine['rank']} holds {blocks} blocks, {engine['held']} requests"
            for engine in self.state()["engines"]
            if (blocks := engine["kv_total_blocks"] - engine["kv_free_blocks"])
            or engine["held"]
        ]
        if legs := self.metric("vllm:calrouter_legs_in_flight"):
            held.append(f"{legs} legs in flight")
        return ", ".join(held)

    def settle(self, seconds: float = 5.0) -> str:
        """Wait until nothing is held; what still is after `seconds`.

        Far less than NIXL's lease of 30 s, so what only the lease frees is a leak.
        """
        deadline = time.monotonic() + seconds
        while (held := self.leaks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return held

    def journal_lines(self, count: int = 0) -> list[dict[str, Any]]:
        """The journal, once it has at least `count` lines."""
        assert self.journal is not None
        deadline = time.monotonic() + 5
        while True:
            lines = self.journal.read_text().splitlines()
            if len(lines) >= count or time.monotonic() > deadline:
                return [json.loads(line) for line in lines]
            time.sleep(0.1)

    def line_of(self, request_id: str) -> dict[str, Any]:
        """The journal's line of a request, once it is there."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for line in reversed(self.journal_lines()):
                if request_id in line["request_id"]:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{request_id} is not in the journal")


async def ask_and_leave(http: httpx.AsyncClient, seconds: float, **body: Any) -> None:
    """Stream a completion, and hang up after so long if it is not done by then."""
    try:
        async with asyncio.timeout(seconds):
            request = {"model": "tiny", "stream": True, **body}
            async with http.stream("POST", "/v1/completions", json=request) as answer:
                async for _ in answer.aiter_lines():
                    pass
    except TimeoutError:
        pass


async def gather(limit: int, jobs: list[Any]) -> list[Any]:
    """Await all coroutines, at most `limit` at a time."""
    gate = asyncio.Semaphore(limit)

    async def run(job: Any) -> Any:
        async with gate:
            return await job

    return await asyncio.gather(*(run(job) for job in jobs))
