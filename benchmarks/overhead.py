"""What the router costs the API server, side by side with the plugin off.

    python -m benchmarks.overhead [--json]

Two measurements in one run:

- **Router alone.** One operation is `Router.begin` (a request comes in, its first leg
  goes out) or `Router.answered` with a finished prefill leg (the hand-over), with
  metrics on and without engines, sockets, or the event loop. Microseconds of this
  machine.
- **API server.** CPU seconds of the API server's process for one short request over
  HTTP, two engines that do both, plugin off and plugin on, in alternating blocks. Both
  servers are up all the time, so both see the same noise.

`router_share` is the router's `begin` as a share of the API server's CPU time a request
with the plugin off. What would mislead: wall-clock times (two cores serve two servers
and the load), and requests longer than these (they make the share smaller).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from tqdm import tqdm
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)

from examples.cpu_cluster import Cluster
from examples.tiny_model import make_tiny_model
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router

_PROMPT_TOKENS = 500
_AT_ONCE = 16
_KV = {"do_remote_prefill": True, "remote_block_ids": ([1, 2, 3],)}

Quantiles = dict[str, float]


def quantiles_us(seconds: list[float]) -> Quantiles:
    """Median and 99th percentile, in microseconds."""
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1e6, 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 2),
    }


def timed(action: Callable[[], Any], seconds: list[float]) -> Any:
    began = time.perf_counter()
    result = action()
    seconds.append(time.perf_counter() - began)
    return result


def router_times(prefill: int, engines: int, count: int) -> dict[str, Quantiles]:
    """Drive a router through `count` requests, ten of them under way at a time."""
    options = RouterOptions(policy="least_loaded", prefill=prefill)
    router = Router(options, engines, metrics=RouterMetrics(CollectorRegistry()))
    begin_s: list[float] = []
    hand_over_s: list[float] = []
    token_s: list[float] = []
    for first in tqdm(range(0, count, 10), desc="router alone", leave=False):
        names = [f"r{number}" for number in range(first, first + 10)]
        for name in names:
            request = a_request(name)
            timed(lambda r=request: router.begin(r), begin_s)  # type: ignore[misc]
        for name in names if prefill else ():
            outputs = prefilled(name)
            timed(lambda o=outputs: router.answered(o), hand_over_s)  # type: ignore[misc]
        for name in names:
            outputs = ended(name)
            timed(lambda o=outputs: router.answered(o), token_s)  # type: ignore[misc]
    assert router.placer.table.is_idle()
    times = {"begin_us": begin_s, "hand_over_us": hand_over_s, "end_us": token_s}
    return {name: quantiles_us(times_s) for name, times_s in times.items() if times_s}


def a_request(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(_PROMPT_TOKENS)),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=100),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def prefilled(name: str) -> EngineCoreOutputs:
    output = EngineCoreOutput(
        f"{name}-prefill",
        [7],
        finish_reason=FinishReason.LENGTH,
        kv_transfer_params=_KV,
    )
    return EngineCoreOutputs(outputs=[output], finished_requests={f"{name}-prefill"})


def ended(name: str) -> EngineCoreOutputs:
    output = EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH)
    return EngineCoreOutputs(outputs=[output], finished_requests={name})


async def load(url: str, count: int) -> None:
    """Send `count` short completions, a few at a time."""
    body = {"model": "tiny", "prompt": "hello " * 20, "max_tokens": 4}
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one() -> None:
            async with gate:
                answer = await http.post("/v1/completions", json=body)
                answer.raise_for_status()

        await asyncio.gather(*(one() for _ in range(count)))


def cpu_s_a_request(cluster: Cluster, count: int) -> float:
    """CPU seconds of the API server's process a request, over `count` requests."""
    server = cluster.processes()[0]

    def spent() -> float:
        times = server.cpu_times()
        return float(times.user + times.system)

    before = spent()
    asyncio.run(load(cluster.url, count))
    return (spent() - before) / count


def api_server_times(blocks: int, count: int) -> tuple[list[float], list[float]]:
    """CPU seconds a request, block by block: plugin off, plugin on."""
    model = make_tiny_model(Path(".cache/tiny"))
    off_s: list[float] = []
    on_s: list[float] = []
    with ExitStack() as servers:
        clusters = [
            Cluster(model, engines=2, prefill=p, log=Path(f".cache/overhead-{p}.log"))
            for p in (None, 0)
        ]
        for cluster in tqdm(clusters, desc="starting servers", leave=False):
            servers.enter_context(cluster)
            asyncio.run(load(cluster.url, count // 4))
        for block in tqdm(range(blocks), desc="blocks of requests", leave=False):
            pairs = list(zip(clusters, (off_s, on_s), strict=True))
            # Whoever goes second finds warmer caches: take turns.
            for cluster, times in pairs[:: 1 if block % 2 else -1]:
                times.append(cpu_s_a_request(cluster, count))
    return off_s, on_s


def measure(blocks: int, count: int, iterations: int) -> dict[str, Any]:
    unified = router_times(0, 2, iterations)
    split = router_times(2, 6, iterations)
    off_s, on_s = api_server_times(blocks, count)
    ratios = [on / off for on, off in zip(on_s, off_s, strict=True)]
    request_us = statistics.median(off_s) * 1e6
    return {
        "router_share": round(unified["begin_us"]["p50"] / request_us, 4),
        "begin_us": unified["begin_us"],
        "split_2_4": split,
        "api_server_us": round(request_us, 1),
        "cpu_ratio": {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
        },
        "requests": blocks * count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each server")
    parser.add_argument("--requests", type=int, default=200, help="requests a block")
    parser.add_argument("--iterations", type=int, default=20_000, help="router alone")
    options = parser.parse_args()
    if min(options.blocks, options.requests // 4, options.iterations) < 1:
        parser.error("--blocks and --iterations must be at least 1, --requests 4")
    result = measure(options.blocks, options.requests, options.iterations)
    if options.json:
        print(json.dumps(result))
        return
    split = result["split_2_4"]
    ratio = result["cpu_ratio"]
    print(f"router, request to first leg     {result['begin_us']} us")
    print(f"  the same, 2 + 4 engines        {split['begin_us']} us")
    print(f"  hand-over, 2 + 4 engines       {split['hand_over_us']} us")
    print(f"API server, plugin off           {result['api_server_us']} us a request")
    print(f"router's share of it             {result['router_share']:.2%}")
    print(
        f"CPU a request, plugin on / off   {ratio['median']} "
        f"({ratio['min']} to {ratio['max']} in {options.blocks} blocks)"
    )


if __name__ == "__main__":
    main()
