"""TTFT with the first token straight from prefill, beside TTFT without it.

    python -m benchmarks.first_token [--json]

One server on this machine's CPU, two prefill and two decode engines, a tiny model. Each
request is sent twice, once as it is and once with `vllm_xargs.first_token` off, which
makes the same server throw the prefill engine's token away as every proxy does; who
goes first changes from request to request. All are greedy, and their outputs (text,
token ids, finish reason, log-probabilities) must be equal.

  low load      one request at a time
  scarce slots  more requests at a time than the decode engines have slots, and KV
                caches so small that they preempt

What would mislead:
- TTFT alone. The second token comes when the first would have come: the pause between
  the two is printed beside it, and in it is all that TTFT has lost.
- Prefix caches: the second sending would hit what the first left. They are off.
- Absolute times: a shared CPU and a tiny model. Compare within one run.
- Requests that step aside (grammars, penalties) are among the equal ones, but not in
  TTFT, which would be the same with and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model

_PREFILL, _ENGINES = 2, 4
_DECODE_SLOTS = 3
_KV_BLOCKS = 24
_MODEL_LEN = 512
_LONGEST_PROMPT_TOKENS = 400
#: Where slots are scarce: three such requests do not fit into the KV cache.
_LONG_PROMPT_TOKENS = 150
_TIMEOUT_S = 120.0

#: Kinds of requests by name; the ones that step aside are marked by `ASIDE`.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probabilities": {"logprobs": 3},
    "stop token": {"stop_token_ids": list(range(100, 140))},
    "stop string": {"stop": ["e", "the"]},
    "minimum of tokens": {"min_tokens": 6},
    "bias": {"logit_bias": {"17": 3.0, "2": 4.0}},
    "ignore the end": {"ignore_eos": True},
    "repetition penalty": {"repetition_penalty": 1.2},
    "allowed tokens": {"allowed_token_ids": list(range(40, 300))},
    "two tokens": {"max_tokens": 2},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "grammar": {"structured_outputs": {"regex": "[a-z ]{3,9}"}},
}
ASIDE = ("penalties", "grammar")


@dataclass
class Answer:
    """What came of one sending; seconds from its start."""

    output: list[Any] = field(default_factory=list)
    ttft_s: float | None = None
    pause_s: float | None = None

    def take(self, event: dict[str, Any], since_s: float) -> None:
        for choice in event["choices"]:
            if not choice["token_ids"]:
                self.output.append(choice["finish_reason"])
                continue
            if self.ttft_s is None:
                self.ttft_s = since_s
            elif self.pause_s is None:
                self.pause_s = since_s - self.ttft_s
            self.output.append([choice[key] for key in ("text", "token_ids")])
            self.output.append([choice["logprobs"], choice["finish_reason"]])


@dataclass
class Pair:
    """A request's kind and body, and its two answers."""

    kind: str
    body: dict[str, Any]
    on: Answer = field(default_factory=Answer)
    off: Answer = field(default_factory=Answer)

    @property
    def identical(self) -> bool:
        return joined(self.on.output) == joined(self.off.output)


def joined(output: list[Any]) -> tuple[Any, ...]:
    """An output whatever pieces it came in: text, ids, scores, finish reasons.

    A stream may put two tokens in one event when the reader is late.
    """
    parts = [part for part in output if isinstance(part, list)]
    text = "".join(part[0] for part in parts[::2])
    ids = [number for part in parts[::2] for number in part[1]]
    scores = [
        round(score, 3)
        for part in parts[1::2]
        for score in (part[0] or {}).get("token_logprobs", [])
    ]
    reasons = [part[1] for part in parts[1::2]]
    reasons += [part for part in output if not isinstance(part, list)]
    return text, ids, scores, [reason for reason in reasons if reason]


def requests(count: int, seed: int, shortest_tokens: int = 1) -> list[Pair]:
    """Requests of every kind in turn, prompts and lengths drawn."""
    draw = random.Random(seed)
    names = list(KINDS)
    pairs = []
    for number in range(count):
        kind = names[number % len(names)]
        span = _LONGEST_PROMPT_TOKENS / shortest_tokens
        tokens = int(shortest_tokens * span ** draw.uniform(0, 1))
        body = {
            "model": "tiny",
            "prompt": [draw.randrange(3, 400) for _ in range(tokens)],
            "max_tokens": draw.choice([6, 12, 24, 40]),
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **KINDS[kind],
        }
        pairs.append(Pair(kind, body))
    return pairs


async def send(http: httpx.AsyncClient, pair: Pair, *, on: bool) -> None:
    answer = Answer()
    switch = {} if on else {"vllm_xargs": {"first_token": "off"}}
    began_s = time.perf_counter()
    body = pair.body | switch
    async with http.stream("POST", "/v1/completions", json=body) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                answer.take(json.loads(line[6:]), time.perf_counter() - began_s)
    if on:
        pair.on = answer
    else:
        pair.off = answer


async def one_at_a_time(url: str, pairs: Sequence[Pair]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
        for number, pair in enumerate(tqdm(pairs, desc="low load", file=sys.stderr)):
            for on in (True, False) if number % 2 else (False, True):
                await send(http, pair, on=on)


async def at_once(url: str, pairs: Sequence[Pair], limit: int) -> None:
    """Blocks of requests all with, then all without, and the other way round."""
    gate = asyncio.Semaphore(limit)
    size = 4 * limit
    blocks = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:

        async def one(pair: Pair, on: bool) -> None:
            async with gate:
                await send(http, pair, on=on)

        for number, block in enumerate(
            tqdm(blocks, desc="scarce slots", file=sys.stderr)
        ):
            for on in (True, False) if number % 2 else (False, True):
                await asyncio.gather(*(one(pair, on) for pair in block))


def preemptions(url: str) -> int:
    lines = httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S).text.splitlines()
    name = "vllm:num_preemptions_total"
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


def phase(pairs: Sequence[Pair]) -> dict[str, Any]:
    """TTFT of both ways and the pause, of requests that can have the token early."""
    early = [pair for pair in pairs if pair.kind not in ASIDE]
    on_s = [pair.on.ttft_s for pair in early if pair.on.ttft_s is not None]
    off_s = [pair.off.ttft_s for pair in early if pair.off.ttft_s is not None]
    pauses_s = [pair.on.pause_s for pair in early if pair.on.pause_s is not None]
    return {
        "ttft_ratio": round(float(np.median(on_s) / np.median(off_s)), 3),
        "ttft_p99_ratio": round(
            float(np.percentile(on_s, 99) / np.percentile(off_s, 99)), 3
        ),
        "ttft_on_ms": milliseconds(on_s),
        "ttft_off_ms": milliseconds(off_s),
        "pause_ms": milliseconds(pauses_s),
    }


def milliseconds(times_s: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times_s, [50, 99]) * 1e3
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}


def summary(low: Sequence[Pair], scarce: Sequence[Pair], preempted: int) -> Any:
    everything = [*low, *scarce]
    at_low, at_scarce = phase(low), phase(scarce)
    return {
        "ttft_ratio": at_low["ttft_ratio"],
        "identical": sum(pair.identical for pair in everything),
        "requests": len(everything),
        "pause_p99_ms": at_low["pause_ms"]["p99"],
        "preemptions": preempted,
        "low_load": at_low,
        "scarce_slots": at_scarce,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="First token from prefill, with against without (client side)")
    for heading in ("", "TTFT with", "without", "ratio", "ratio P99", "pause after it"):
        shown.add_column(heading, justify="left" if not heading else "right")
    for name in ("low_load", "scarce_slots"):
        each = result[name]
        cells = (
            f"{each[key]['p50']:.0f} / {each[key]['p99']:.0f} ms"
            for key in ("ttft_on_ms", "ttft_off_ms", "pause_ms")
        )
        with_it, without, pause = cells
        shown.add_row(
            name.replace("_", " "),
            with_it,
            without,
            f"{each['ttft_ratio']:.2f}",
            f"{each['ttft_p99_ratio']:.2f}",
            pause,
        )
    shown.caption = (
        "P50 / P99; compare within one run. "
        f"{result['identical']} of {result['requests']} outputs identical, "
        f"{result['preemptions']} preemptions."
    )
    return shown


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    least = len(KINDS)

    def count(word: str) -> int:
        if int(word) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(word)

    for flag, default, text in (
        ("--low", 264, "requests at low load"),
        ("--scarce", 264, "requests where decode slots are scarce"),
    ):
        text += " (default %(default)s)"
        parser.add_argument(flag, type=count, default=default, metavar="N", help=text)
    parser.add_argument("--at-once", type=int, default=16, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", action="store_true", help="end the output with one JSON object"
    )
    return parser.parse_args(words)


def a_cluster(model: Path) -> Cluster:
    return Cluster(
        model,
        engines=_ENGINES,
        prefill=_PREFILL,
        policy="least_loaded",
        arguments=[
            *("--router-config.decode_max_num_seqs", str(_DECODE_SLOTS)),
            *("--max-model-len", str(_MODEL_LEN)),
            *("--num-gpu-blocks-override", str(_KV_BLOCKS)),
            "--no-enable-prefix-caching",
        ],
        log=Path(".cache/first-token.log"),
    )


def main() -> int:
    options = arguments()
    end_servers_when_terminated()
    low = requests(options.low, options.seed)
    scarce = requests(options.scarce, options.seed + 1, _LONG_PROMPT_TOKENS)
    print("starting two prefill and two decode engines", file=sys.stderr)
    with a_cluster(make_tiny_model(Path(".cache/tiny"))) as cluster:
        # vLLM compiles some of its sampling at the first request that needs it.
        asyncio.run(at_once(cluster.url, scarce[: 4 * len(KINDS)], options.at_once))
        asyncio.run(one_at_a_time(cluster.url, low))
        asyncio.run(at_once(cluster.url, scarce, options.at_once))
        preempted = preemptions(cluster.url)
    result = summary(low, scarce, preempted)
    Console().print(table(result))
    for pair in [*low, *scarce]:
        if not pair.identical:
            print(f"differs: {pair.kind}: {pair.on.output} {pair.off.output}")
    if options.json:
        print(json.dumps(result))
    return 0 if result["identical"] == result["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
