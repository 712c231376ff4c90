"""Prefill on one host, decode on another, as vLLM starts them.

The hosts are network namespaces of this machine; the second one also has a monotonic
clock of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.cpu_cluster import Cluster
from tests.e2e.network import AHEAD_S, Network, other_clock, why_not
from tests.e2e.stranger import ENOUGH
from tests.e2e.talk import Server, prompt_ids
from vllm_calrouter.keys import make_keys

TELEMETRY_PORT = 5600

#: A failing test's time.
PATIENCE_S = 60.0

#: A block holds 32 tokens: prompts that end in, at and after one.
PROMPTS = [prompt_ids(count, 31) for count in (1, 20, 31, 32, 33, 64, 200)]


@dataclass
class Hosts:
    network: Network
    server: Server
    keys: Path
    own_clock: bool


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Rank 0 and the API server on host a, rank 1 on host b."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    keys = folder / "keys"
    make_keys(keys)
    clock = other_clock()
    with ExitStack() as held:
        network = held.enter_context(Network())
        head = _launch(model, folder, network, "a", host=network.entrance)
        other = _launch(
            *(model, folder, network, "b"),
            headless=True,
            inside=[*network.inside("b"), *clock],
            arguments=["--data-parallel-start-rank", "1"],
        )
        held.callback(other.stop)
        other.start()
        held.enter_context(head)
        yield Hosts(network, Server(head, None), keys, bool(clock))


def _launch(
    model: Path,
    folder: Path,
    network: Network,
    name: str,
    arguments: list[str] | None = None,
    **settings: Any,
) -> Cluster:
    address = network.address[name]
    settings.setdefault("inside", network.inside(name))
    return Cluster(
        model,
        engines=2,
        prefill=1,
        policy="least_loaded",
        arguments=[
            *("--data-parallel-size-local", "1"),
            *("--data-parallel-address", network.address["a"]),
            *("--data-parallel-rpc-port", "29550"),
            *("--router-config.telemetry", f"tcp://*:{TELEMETRY_PORT}"),
            *("--router-config.telemetry_keys", str(folder / "keys")),
            *(arguments or []),
        ],
        environ={
            "VLLM_HOST_IP": address,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
            # Otherwise NIXL finds that both hosts share this machine's memory.
            "UCX_TLS": "tcp",
        },
        log=folder / f"{name}.log",
        **settings,
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_output_is_one_engine_s(hosts: Hosts, prompt: list[int]) -> None:
    split, first, second = (
        hosts.server.complete(prompt, rank, max_tokens=24, ignore_eos=True)["token_ids"]
        for rank in (None, 0, 1)
    )
    assert split == first == second
    assert len(split) == 24


def test_kv_caches_cross_the_wire(hosts: Hosts) -> None:
    received = hosts.network.received_bytes("b")
    moved = _heard(hosts)[1]["transfer_bytes"]
    hosts.server.complete(prompt_ids(1_000, 5), max_tokens=4)
    deadline_s = time.monotonic() + PATIENCE_S
    while (now := _heard(hosts)[1]["transfer_bytes"]) == moved:
        assert time.monotonic() < deadline_s
    # 2 layers of keys and values of 64 numbers, 4 bytes each.
    assert now - moved >= 1_000 * 2 * 2 * 64 * 4
    assert hosts.network.received_bytes("b") - received >= now - moved
    assert hosts.server.metric("vllm:calrouter_handovers_without_kv_total") == 0


def test_each_engine_is_heard_from_its_own_host(hosts: Hosts) -> None:
    state = hosts.server.state()
    a, b = (hosts.network.address[name] for name in "ab")
    assert state["hosts"] == [
        {"rank": 0, "host": a, "telemetry": f"tcp://{a}:{TELEMETRY_PORT}"},
        {"rank": 1, "host": b, "telemetry": f"tcp://{b}:{TELEMETRY_PORT + 1}"},
    ]
    assert [engine["role"] for engine in state["heard"]] == ["prefill", "decode"]
    assert [engine["kv_role"] for engine in state["engines"]] == [
        "kv_producer",
        "kv_consumer",
    ]
    before = [engine["sequence"] for engine in _heard(hosts)]
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(
        engine["sequence"] > sequence
        for engine, sequence in zip(_heard(hosts), before, strict=True)
    ):
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_hears_and_changes_nothing(hosts: Hosts, rank: int) -> None:
    expected = hosts.server.complete(PROMPTS[-1], 1, max_tokens=8)["token_ids"]
    before = hosts.server.metric(_MESSAGES, engine=str(rank), outcome="heard")
    incarnation = _heard(hosts)[rank]["incarnation"]
    url = hosts.server.state()["hosts"][rank]["telemetry"]
    done = subprocess.run(
        [
            *hosts.network.inside("b"),
            *(sys.executable, "-m", "tests.e2e.stranger", url, str(hosts.keys)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    heard = json.loads(done.stdout)
    assert heard["router"] >= ENOUGH
    assert heard["no keys"] == heard["own keys"] == 0
    for outcome in ("garbage", "wrong_version", "wrong_rank", "stale"):
        assert hosts.server.metric(_MESSAGES, engine=str(rank), outcome=outcome) == 0, (
            outcome
        )
    assert _heard(hosts)[rank]["incarnation"] == incarnation
    after = hosts.server.metric(_MESSAGES, engine=str(rank), outcome="heard")
    assert after > before
    again = hosts.server.complete(PROMPTS[-1], max_tokens=8)["token_ids"]
    assert again == expected


def test_intervals_across_hosts_are_what_passed(hosts: Hosts) -> None:
    if not hosts.own_clock:
        pytest.skip("the kernel has no time namespaces: both hosts have one clock")
    names = ("request_decode_time", "request_inference_time", "inter_token_latency")
    metrics = [f"vllm:{name}_seconds_sum" for name in names]
    before = [hosts.server.metric(name) for name in metrics]
    began_s = time.monotonic()
    hosts.server.complete(prompt_ids(40, 8), max_tokens=30, ignore_eos=True)
    took_s = time.monotonic() - began_s
    assert took_s < AHEAD_S
    for name, start in zip(metrics, before, strict=True):
        assert 0 < hosts.server.metric(name) - start <= took_s, name


def test_nothing_is_held_afterwards(hosts: Hosts) -> None:
    assert hosts.server.settle() == ""


_MESSAGES = "vllm:calrouter_messages_total"


def _heard(hosts: Hosts) -> list[dict[str, Any]]:
    heard: list[dict[str, Any]] = hosts.server.state()["heard"]
    return heard
