"""Prefill and decode on separate real engines behind one `vllm serve`, in two minutes.

    python -m examples.demo

Starts a server with two prefill and two decode engines on this machine's CPU and a tiny
model, sends a mixture of requests, and shows which engines served each, and whether the
text equals what a single engine writes. Exit code 0 only if all of it does and no KV
block stays behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model

_PREFILL = 2
_ENGINES = 4
_AT_ONCE = 6
#: A request that names an engine runs there as a whole: the answer to compare with.
_ONE_ENGINE = {"X-data-parallel-rank": str(_PREFILL)}
_ABORTED = 9

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


@dataclass
class Asked:
    """One request of the demo and what came of it."""

    name: str
    path: str
    body: dict[str, Any]
    stream: bool
    aborted: bool = False
    text: str | None = None
    journal: dict[str, Any] = field(default_factory=dict)
    same: bool | None = None


def mixture(count: int, seed: int) -> list[Asked]:
    """Chats and completions of many sizes, half of them streamed, one to be aborted."""
    draw = random.Random(seed)
    asked = []
    for number in range(count):
        prompt = " ".join(draw.choices(_WORDS, k=draw.choice([1, 4, 12, 60, 250])))
        tokens = draw.choice([2, 6, 12, 24, 48])
        body: dict[str, Any] = {
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if number % 3 == 0:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            path = "/v1/completions"
            body["prompt"] = prompt
        aborted = number == _ABORTED
        if aborted:
            body["max_tokens"] = 2000
        stream = number % 2 == 1
        asked.append(Asked(f"demo-{number:02}", path, body, stream, aborted))
    return asked


async def ask(http: httpx.AsyncClient, asked: Asked) -> None:
    """Send one request; the aborted one hangs up after a few tokens."""
    body = {"model": "tiny", "stream": asked.stream, **asked.body}
    headers = {"X-Request-Id": asked.name}
    if not asked.stream:
        answer = await http.post(asked.path, json=body, headers=headers)
        asked.text = text_of(answer.raise_for_status().json())
        return
    parts: list[str] = []
    async with http.stream("POST", asked.path, json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                parts.append(text_of(json.loads(line[6:])))
            if asked.aborted and len(parts) > 4:
                return
    asked.text = "".join(parts)


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    message = choice.get("message") or choice.get("delta") or choice
    text: str = message.get("text") or message.get("content") or ""
    return text


async def compare(http: httpx.AsyncClient, asked: Asked) -> None:
    """Ask one engine for the same, and note whether the texts are equal."""
    if asked.aborted:
        return
    body = {"model": "tiny", **asked.body}
    answer = await http.post(asked.path, json=body, headers=_ONE_ENGINE)
    asked.same = text_of(answer.raise_for_status().json()) == asked.text


Step = Callable[[httpx.AsyncClient, Asked], Awaitable[None]]


async def for_all(url: str, everything: list[Asked], step: Step, title: str) -> None:
    """Run a step for all requests, a few at a time, under a progress bar."""
    gate = asyncio.Semaphore(_AT_ONCE)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(title, total=len(everything))

            async def one(asked: Asked) -> None:
                async with gate:
                    await step(http, asked)
                progress.advance(bar)

            await asyncio.gather(*map(one, everything))


def read_journal(path: Path, everything: list[Asked]) -> None:
    """Give each request its journal line, once the journal has them all."""
    for _ in range(50):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for asked in everything:
            ours = (line for line in lines if asked.name in line["request_id"])
            asked.journal = next(ours, {})
        if all(asked.journal for asked in everything):
            return
        time.sleep(0.1)


def leaked_blocks(url: str) -> int:
    """KV blocks still held; waits a moment, but far less than NIXL's lease of 30 s."""
    for _ in range(50):
        engines = httpx.get(f"{url}/router/state").json()["engines"]
        held = sum(e["kv_total_blocks"] - e["kv_free_blocks"] for e in engines)
        if held == 0:
            break
        time.sleep(0.1)
    return int(held)


def request_table(everything: list[Asked]) -> Table:
    table = Table(
        title="Which engines served what (tokens, engines, ms)", box=box.SIMPLE_HEAD
    )
    for heading in ("request", "route"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt", "output", "prefill", "decode", "TTFT", "TPOT"):
        table.add_column(heading, justify="right")
    table.add_column("equal")
    for asked in everything:
        table.add_row(*row(asked))
    return table


def row(asked: Asked) -> list[str]:
    line = asked.journal
    route = "chat" if "chat" in asked.path else "completion"
    route += " stream" if asked.stream else ""
    verdict = {None: "aborted", True: "[green]yes", False: "[red]NO"}[asked.same]
    numbers = [
        *(line[key] for key in ("prompt_tokens", "output_tokens")),
        *(line[key] for key in ("prefill_rank", "decode_rank")),
    ]
    times = [f"{line['ttft_s'] * 1e3:.0f}", tpot_ms(line)]
    return [asked.name, route, *map(str, numbers), *times, verdict]


def tpot_ms(line: dict[str, Any]) -> str:
    gaps = line["output_tokens"] - 1
    if gaps < 1:
        return "-"
    return f"{(line['e2e_s'] - line['ttft_s']) / gaps * 1e3:.1f}"


def pool_table(everything: list[Asked]) -> Table:
    legs: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for asked in everything:
        for phase, size in (("prefill", "prompt_tokens"), ("decode", "output_tokens")):
            rank = asked.journal[f"{phase}_rank"]
            legs[rank] += 1
            tokens[rank] += asked.journal[size]
    table = Table(title="What each engine did", box=box.SIMPLE_HEAD)
    for heading in ("engine", "role", "requests", "tokens"):
        table.add_column(heading, justify="right")
    for rank in range(_ENGINES):
        role = "prefill" if rank < _PREFILL else "decode"
        table.add_row(str(rank), role, str(legs[rank]), str(tokens[rank]))
    return table


def run(cluster: Cluster, journal: Path, count: int) -> int:
    """Run the demo on a server that is starting; returns the exit code."""
    what = f"{_PREFILL} prefill and {_ENGINES - _PREFILL} decode engines"
    with console.status(f"starting {what} (about a minute)") as status:
        cluster.wait_until_healthy(
            lambda waited: status.update(f"starting {what}: {waited:.0f} s")
        )
    everything = mixture(count, seed=1)
    asyncio.run(for_all(cluster.url, everything, ask, "requests over both pools"))
    read_journal(journal, everything)
    asyncio.run(for_all(cluster.url, everything, compare, "the same, on one engine "))
    return report(everything, leaked_blocks(cluster.url))


def report(everything: list[Asked], leaked: int) -> int:
    console.print(request_table(everything))
    console.print(pool_table(everything))
    compared = [asked.same for asked in everything if not asked.aborted]
    console.print(
        f"equal to one engine's output: {sum(map(bool, compared))} of {len(compared)}"
    )
    console.print(f"KV blocks leaked: {leaked}")
    return 0 if all(compared) and leaked == 0 else 1


console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=36, help="how many to send")
    parser.add_argument("--policy", default="least_loaded", help="the routing policy")
    options = parser.parse_args()
    end_servers_when_terminated()
    if options.requests <= _ABORTED:
        parser.error(f"--requests must be more than {_ABORTED}")
    model = make_tiny_model(Path(".cache/tiny"))
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        cluster = Cluster(
            model,
            engines=_ENGINES,
            prefill=_PREFILL,
            policy=options.policy,
            arguments=["--router-config.journal", str(journal)],
            log=Path(".cache/demo.log"),
        )
        console.print(f"the server's own output goes to {cluster.log}")
        cluster.start()
        try:
            return run(cluster, journal, options.requests)
        finally:
            cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
