"""What the router costs the API server, beside the same server without the plugin.

    python -m benchmarks.overhead [--json]

Two measurements in one run, under four minutes, on this machine's CPU.

Router alone (no engines, no sockets, no event loop). One operation is
  begin      `Router.begin`: a request came in, its first leg is ready to be sent;
  add        the same from further out: all of `RouterClient.add_request_async` but the
             sending, with vLLM's own choice of the engine under the policy vllm
             (a server without the plugin makes that choice too);
  hand-over  `Router.answered` on a finished prefill leg: the decode leg is ready;
  token      `Router.answered` on a message with one token, which is passed on;
  end        the same with the last token of its request.
Metrics are on, the journal is off, 64 requests are under way.

API server (real engines, two a server, which do both phases). One operation is one
completion over HTTP; what is counted is CPU time of the API server's process, without
its engines. Servers with the plugin off, policy vllm and policy least_loaded are up at
the same time and take turns, a block of requests each, in every order.

  router share  begin, as a share of the plugin-off server's CPU time for one request
  CPU ratio     a block with the plugin on over the plugin-off block of its round
  off / off     a plugin-off block over the one before: a CPU ratio within this spread
                says nothing

What would mislead:
- Warm loops. In a tight loop all code and data are in the CPU's caches. "cold" is
  begin after 16 MiB of other memory were read; a server is between the two.
- Small blocks: the kernel tells CPU time in steps of 10 ms, 2 % of 300 requests.
- Absolute times of a shared machine. Compare within one run only.
- Wall-clock times: servers, engines and load share the cores, so they are not printed.
- Long requests. The router's work is the same for each, the server's grows: the
  requests here are short (4 tokens), which makes the share as large as it gets.
- Several API servers: their metrics live in shared files, and cost more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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

from benchmarks.quantiles import Quantiles, quantiles_us
from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router.client import RouterClient
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router

#: The plugin-off server, and the policies that are compared with it. The last one
#: makes every choice in the router, so the headline numbers are its.
OFF = "off"
POLICIES = ("vllm", "least_loaded")
HEADLINE = POLICIES[-1]

_PROMPT_TOKENS = 500
_UNDER_WAY = 64
_EVICTED_BYTES = 16 << 20
#: Evicting takes a thousand times longer than what it is there for.
_WARM_PER_COLD = 20

_MAX_TOKENS = 4
_AT_ONCE = 16
_ENGINES = 2
#: What remains of four minutes is for ending the servers.
_DEFAULT_BUDGET_S = 180.0

_KV = {
    "do_remote_prefill": True,
    "remote_block_ids": ([1, 2, 3],),
    # All of the prompt: its first token is sent at once, as it is by default.
    "remote_num_tokens": _PROMPT_TOKENS,
}

T = TypeVar("T")
Samples = dict[str, list[float]]
Spread = dict[str, float]


def spread(ratios: Sequence[float]) -> Spread:
    return {
        "median": round(statistics.median(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
    }


def ratios_of(on: Sequence[float], off: Sequence[float]) -> list[float]:
    """Round by round; both went through the same rounds."""
    return [one / other for one, other in zip(on, off, strict=True)]


def turns(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Orders to go in, so that nobody always follows the same one."""
    return itertools.cycle(itertools.permutations(names))


# --- The router alone ---------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A router to drive: `prefill` of `engines` engines only run prefill."""

    name: str
    policy: str
    prefill: int
    engines: int

    def router(self) -> Router:
        options = RouterOptions(policy=self.policy, prefill=self.prefill)
        metrics = RouterMetrics(CollectorRegistry())
        return Router(options, self.engines, metrics=metrics)


SPLIT = Scene("2+4", HEADLINE, 2, 6)
#: What a server does whose options say nothing of a policy.
DEFAULT = Scene("2+4, default", RouterOptions().policy, 2, 6)
SCENES = (*(Scene(policy, policy, 0, _ENGINES) for policy in POLICIES), SPLIT, DEFAULT)


class EnginelessClient(RouterClient):
    """The router's client without what it sends to; has what vLLM chooses from."""

    def __init__(self, router: Router, engines: int) -> None:
        self.router = router
        self._clocks = None
        self.lb_engines = [[0, 0, 0.0] for _ in range(engines)]
        self.core_engines = [rank.to_bytes(2, "little") for rank in range(engines)]
        self.reqs_in_flight: dict[str, bytes] = {}
        self.engine_inflight: Counter[bytes] = Counter()
        # Open streaming-input sessions; vLLM 0.33 looks here, 0.32 does not.
        self.streaming_reqs: set[str] = set()
        self.eng_start_index = 0
        self.client_count = 1

    async def _send(self, leg: EngineCoreRequest) -> None:
        pass


def finish_now(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for, without an event loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("the coroutine waits for something")


def timed(times_s: list[float], action: Callable[[], T]) -> T:
    """Call and note how long it took (0.1 microseconds of it are this function's)."""
    began_s = time.perf_counter()
    result = action()
    times_s.append(time.perf_counter() - began_s)
    return result


def a_request(number: int) -> EngineCoreRequest:
    """As the API server makes one of a completion with a long prompt."""
    external = f"cmpl-{number:032x}-0"
    return EngineCoreRequest(
        request_id=f"{external}-{number:08x}",
        external_req_id=external,
        prompt_token_ids=list(range(_PROMPT_TOKENS)),
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def message(
    leg_id: str,
    finish: FinishReason | None = None,
    kv_params: dict[str, Any] | None = None,
) -> EngineCoreOutputs:
    """An engine's message with one token of one leg."""
    output = EngineCoreOutput(
        leg_id, [7], finish_reason=finish, kv_transfer_params=kv_params
    )
    return EngineCoreOutputs(
        outputs=[output], finished_requests={leg_id} if finish else None
    )


def drive(scene: Scene, count: int, before_begin: Callable[[], object]) -> Samples:
    """Take `count` requests through a router, from begin to end; seconds of each step.

    `before_begin` is called, untimed, before each of them.
    """
    router = scene.router()
    times: Samples = {"begin": [], "hand_over": [], "token": [], "end": []}
    under_way: deque[str] = deque()
    for number in range(count):
        request = a_request(number)
        rank = number % scene.engines if router.leave_to_vllm(request) else None
        before_begin()
        leg = timed(times["begin"], lambda: router.begin(request, vllm_rank=rank))  # noqa: B023 (called at once)
        if scene.prefill:
            hand_over(router, leg, times)
        under_way.append(request.request_id)
        if len(under_way) > _UNDER_WAY:
            end(router, under_way.popleft(), times)
    for name in under_way:
        end(router, name, times)
    assert router.placer.table.is_idle()
    return times


def hand_over(router: Router, leg: EngineCoreRequest, times: Samples) -> None:
    done = message(leg.request_id, FinishReason.LENGTH, _KV)
    timed(times["hand_over"], lambda: router.answered(done))


def end(router: Router, name: str, times: Samples) -> None:
    one_more, last = message(name), message(name, FinishReason.STOP)
    timed(times["token"], lambda: router.answered(one_more))
    timed(times["end"], lambda: router.answered(last))


def add_times(scene: Scene, count: int) -> list[float]:
    """Seconds of `RouterClient.add_request_async` up to the sending."""
    client = EnginelessClient(scene.router(), scene.engines)
    times_s: list[float] = []
    under_way: deque[str] = deque()
    for number in range(count):
        request = a_request(number)
        timed(times_s, lambda: finish_now(client.add_request_async(request)))  # noqa: B023 (called at once)
        under_way.append(request.request_id)
        if len(under_way) > _UNDER_WAY:
            last = message(under_way.popleft(), FinishReason.STOP)
            finish_now(RouterClient.process_engine_outputs(client, last))
    return times_s


def router_times(scene: Scene, count: int) -> dict[str, Quantiles]:
    """All of one scene, as quantiles in microseconds."""
    evicting = bytes(_EVICTED_BYTES)
    drive(scene, count // 10, int)
    times = drive(scene, count, int)
    cold = drive(scene, max(count // _WARM_PER_COLD, 1), lambda: evicting.count(1))
    times["begin_cold"] = cold["begin"]
    if not scene.prefill:
        times["add"] = add_times(scene, count)
    return {f"{step}_us": quantiles_us(each) for step, each in times.items() if each}


def all_router_times(count: int) -> dict[str, dict[str, Quantiles]]:
    # As vLLM's server does, lest every collection looks through all of vLLM.
    gc.collect()
    gc.freeze()
    scenes = tqdm(SCENES, desc="router alone", unit="scene", file=sys.stderr)
    return {scene.name: router_times(scene, count) for scene in scenes}


# --- The API server -----------------------------------------------------------------


@dataclass
class Server:
    """One server, and CPU seconds a request of its API server, block by block."""

    name: str
    cluster: Cluster
    cpu_s: list[float] = field(default_factory=list)

    def block(self, requests: int) -> None:
        # With one API server, it is the process that was started.
        process = self.cluster.processes()[0]
        before = process.cpu_times()
        asyncio.run(load(self.cluster.url, requests))
        after = process.cpu_times()
        spent_s = after.user + after.system - before.user - before.system
        self.cpu_s.append(spent_s / requests)


async def load(url: str, requests: int) -> None:
    """Send short completions, a few at a time."""
    body = {
        "model": "tiny",
        "prompt": "the quick brown fox jumps over the lazy dog",
        "max_tokens": _MAX_TOKENS,
        "ignore_eos": True,
    }
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def one() -> None:
            async with gate:
                answer = await http.post("/v1/completions", json=body)
                answer.raise_for_status()

        await asyncio.gather(*(one() for _ in range(requests)))


def a_server(name: str, model: Path) -> Server:
    on = name != OFF
    cluster = Cluster(
        model,
        engines=_ENGINES,
        prefill=0 if on else None,
        policy=name if on else None,
        api_servers=1,
        log=Path(f".cache/overhead-{name}.log"),
    )
    return Server(name, cluster)


@contextmanager
def running(names: Sequence[str], deadline_s: float) -> Iterator[list[Server]]:
    """Servers that are up; ended by process id, whatever happens.

    Raises:
        TimeoutError: they are not up at `deadline_s` of the monotonic clock.
    """

    def tell(waited_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the servers need too long to start: see --budget-s")

    model = make_tiny_model(Path(".cache/tiny"))
    servers = [a_server(name, model) for name in names]
    with ExitStack() as stack:
        stack.callback(stop, servers)
        for server in servers:
            server.cluster.start()
        for server in tqdm(servers, desc="starting", unit="server", file=sys.stderr):
            server.cluster.wait_until_healthy(tell)
        yield servers


def stop(servers: Sequence[Server]) -> None:
    """End all at the same time: each may take half a minute when cores are busy."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda server: server.cluster.stop(), servers))


def cpu_times(rounds: int, requests: int, deadline_s: float) -> dict[str, list[float]]:
    """CPU seconds a request of every server, round by round.

    Begins no round that would not end before `deadline_s`, but makes two at least.
    """
    names = (OFF, *POLICIES)
    with running(names, deadline_s) as servers:
        for server in servers:
            asyncio.run(load(server.cluster.url, requests))
        by_name = {server.name: server for server in servers}
        longest_s = 0.0
        numbers = tqdm(range(rounds), desc="API servers", unit="round", file=sys.stderr)
        for number, order in zip(numbers, turns(names), strict=False):
            began_s = time.monotonic()
            if number >= 2 and began_s + longest_s > deadline_s:
                break
            for name in order:
                by_name[name].block(requests)
            longest_s = max(longest_s, time.monotonic() - began_s)
    return {server.name: server.cpu_s for server in servers}


# --- The result ---------------------------------------------------------------------


def summary(
    router_us: dict[str, dict[str, Quantiles]],
    cpu_s: dict[str, list[float]],
    requests: int,
) -> dict[str, Any]:
    """Everything that is told; the headline numbers are the last policy's."""
    off_s = cpu_s[OFF]
    off_us = statistics.median(off_s) * 1e6
    policies = {}
    for policy in POLICIES:
        times = router_us[policy]
        policies[policy] = {
            "router_share": round(times["begin_us"]["p50"] / off_us, 5),
            "router_share_cold": round(times["begin_cold_us"]["p50"] / off_us, 5),
            "cpu_ratio": spread(ratios_of(cpu_s[policy], off_s)),
            **times,
        }
    split = router_us[SPLIT.name]
    return {
        **policies[HEADLINE],
        "hand_over_us": split["hand_over_us"],
        "off_over_off": spread(ratios_of(off_s[1:], off_s[:-1])),
        "off_cpu_us": round(off_us, 1),
        "requests": requests * len(off_s),
        "rounds": len(off_s),
        "policies": policies,
        "split_2_4": split,
        "default_2_4": router_us[DEFAULT.name],
    }


_STEPS = ("begin", "begin_cold", "add", "hand_over", "token", "end")


def table(result: dict[str, Any]) -> str:
    scenes = {
        **result["policies"],
        SPLIT.name: result["split_2_4"],
        DEFAULT.name: result["default_2_4"],
    }
    lines = [f"{'us, p50 / p99':24}" + "".join(f"{name:>18}" for name in scenes)]
    for step in _STEPS:
        cells = (cell(scene.get(f"{step}_us")) for scene in scenes.values())
        lines.append(f"  {step.replace('_', ' '):22}" + "".join(cells))
    lines.append(f"{'of the API server':24}")
    for key in ("router_share", "router_share_cold"):
        shares = (f"{each[key]:>18.2%}" for each in result["policies"].values())
        lines.append(f"  {key.replace('_', ' '):22}" + "".join(shares))
    ratios = (f"{each['cpu_ratio']['median']:>18}" for each in policies_of(result))
    lines.append(f"  {'CPU ratio, on / off':22}" + "".join(ratios))
    ranges = (f"{range_of(each['cpu_ratio']):>18}" for each in policies_of(result))
    lines.append(f"  {'  least to most':22}" + "".join(ranges))
    lines.append(f"  {'off / off':22}{range_of(result['off_over_off']):>18}")
    lines.append(
        f"{result['rounds']} rounds, {result['requests']} requests a server, "
        f"{result['off_cpu_us']} us CPU a request with the plugin off"
    )
    return "\n".join(lines)


def policies_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return list(result["policies"].values())


def cell(quantiles: Quantiles | None) -> str:
    if quantiles is None:
        return f"{'-':>18}"
    return f"{quantiles['p50']:>9.1f} /{quantiles['p99']:>7.1f}"


def range_of(ratios: Spread) -> str:
    return f"{ratios['min']:.3f} to {ratios['max']:.3f}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def count(flag: str, default: int, least: int, text: str) -> None:
        def parse(word: str) -> int:
            if int(word) < least:
                raise argparse.ArgumentTypeError(f"must be at least {least}")
            return int(word)

        text = f"{text} (default {default})"
        parser.add_argument(flag, type=parse, default=default, metavar="N", help=text)

    count("--requests", 300, 1, "requests of a block")
    count("--rounds", 12, 2, "blocks of each server; 6 are one of each order")
    count("--iterations", 10_000, 100, "requests of each loop of the router alone")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=_DEFAULT_BUDGET_S,
        metavar="S",
        help="seconds after which no more rounds begin (default %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="end the output with one JSON object"
    )
    return parser.parse_args(words)


def main() -> None:
    deadline_s = time.monotonic()
    options = arguments()
    deadline_s += options.budget_s
    end_servers_when_terminated()
    router_us = all_router_times(options.iterations)
    cpu_s = cpu_times(options.rounds, options.requests, deadline_s)
    result = summary(router_us, cpu_s, options.requests)
    print(table(result))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
