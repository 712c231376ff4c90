from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from tests.calibration.test_fit import worst
from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.calibration.command import make_profile, proposed_slo, report
from vllm_calrouter.calibration.measure import (
    GOOD,
    Measured,
    MeasureError,
    Measurement,
    fit_transfers,
)
from vllm_calrouter.calibration.profile import FASTEST_BYTES_PER_S
from vllm_calrouter.messages import MOST_TIMINGS, StepTiming, Transfer

A40 = load("a40-qwen2.5-3b").costs
BYTES_PER_TOKEN = 1000


class FakeServer(httpx.MockTransport):
    """A server whose engines report steps of known cost, at once.

    Requests that are open at the same time are one batch.
    """

    def __init__(self, costs: list[EngineCosts], roles: list[str]) -> None:
        super().__init__(self.answer)
        self.costs, self.roles = costs, roles
        self.open = [0] * len(costs)
        self.steps = [0] * len(costs)
        self.moved = [0] * len(costs)
        self.recent: list[deque[StepTiming]] = [
            deque(maxlen=MOST_TIMINGS) for _ in costs
        ]
        self.transfers: list[deque[Transfer]] = [
            deque(maxlen=MOST_TIMINGS) for _ in costs
        ]
        self.hosts = ["here"] * len(costs)
        self.workers = 1
        self.turn = 0
        self.draw = random.Random(0)
        self.key: str | None = None
        self.hears = True
        self.completions = 200

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401)
        path = request.url.path
        if path == "/router/state":
            return httpx.Response(200, json=self.state())
        if path == "/v1/models":
            model = {"id": "tiny", "max_model_len": 4096}
            return httpx.Response(200, json={"data": [model]})
        if path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        if path == "/router/decisions":
            return httpx.Response(200, json=[{"prefill_rank": 0}])
        assert path == "/v1/completions"
        if self.completions != 200:
            return httpx.Response(self.completions, text="no\nmore")
        rank = request.headers.get("X-data-parallel-rank")
        body = json.loads(request.content)
        if rank is None:
            await self.split(len(body["prompt"]))
        else:
            await self.serve(int(rank), len(body["prompt"]), body["max_tokens"])
        return httpx.Response(200, json={})

    async def serve(self, rank: int, tokens: int, output_tokens: int) -> None:
        self.open[rank] += 1
        self.step(rank, tokens, 0, 0)
        for _ in range(min(output_tokens - 1, 3)):
            await asyncio.sleep(0.002)
            self.step(rank, 0, self.open[rank], self.open[rank] * tokens)
        await asyncio.sleep(0.003)
        self.open[rank] -= 1

    async def split(self, tokens: int) -> None:
        self.turn += 1
        readers = [rank for rank, role in enumerate(self.roles) if role == "decode"]
        rank = readers[self.turn % len(readers)]
        size = -(-tokens // 16) * 16 * BYTES_PER_TOKEN
        slower = 1 if self.hosts[rank] == self.hosts[0] else 5
        for _ in range(self.workers):
            seconds = slower * (0.002 + size / 1e9)
            self.transfers[rank].append(Transfer(seconds, size // self.workers))
            self.moved[rank] += 1
        self.step(0, tokens, 0, 0)
        self.step(rank, 0, 1, tokens)

    def step(self, rank: int, tokens: int, seqs: int, context: int) -> None:
        costs = self.costs[rank]
        seconds = costs.step_s(tokens, tokens**2, seqs, context)
        seconds *= self.draw.gauss(1.0, 0.001)
        self.recent[rank].append(StepTiming(tokens, seqs, context, seconds, tokens**2))
        self.steps[rank] += 1

    def state(self) -> dict[str, Any]:
        served = {
            "model": "M",
            "dtype": "float32",
            "kv_dtype": "float32",
            "tensor_parallel": self.workers,
            "gpu": "none",
        }
        hosts = [{"rank": rank, "host": host} for rank, host in enumerate(self.hosts)]
        heard = [
            {
                "rank": rank,
                "role": role,
                "age_s": 0.1 if self.hears else None,
                "incarnation": 1,
                "max_seqs": 64,
                "kv_total_blocks": 4000,
                "block_tokens": 16,
                "steps": self.steps[rank],
                "recent_steps": [msgspec.structs.asdict(s) for s in self.recent[rank]],
                "transfers": self.moved[rank],
                "recent_transfers": [
                    msgspec.structs.asdict(t) for t in self.transfers[rank]
                ],
            }
            for rank, role in enumerate(self.roles)
        ]
        engines = [{"rank": rank} for rank in range(len(self.roles))]
        return {"served": served, "hosts": hosts, "heard": heard, "engines": engines}


async def measured(server: FakeServer, **more: Any) -> Measured:
    prior = A40.faster(7.4)
    async with Measurement(
        "http://server", prior, seed=1, poll_s=0.001, transport=server, **more
    ) as measurement:
        return await measurement.run()


async def test_each_engine_s_constants_are_found_until_they_are_known() -> None:
    slow = A40.faster(1 / 1.5)
    found = await measured(FakeServer([A40, slow], ["both", "both"]))
    assert found.complete
    for rank, true in enumerate((A40, slow)):
        assert worst(found.fits[rank].costs, true) < 4 * GOOD
    profile = make_profile(found, A40)
    assert profile.costs.kv_capacity_tokens == 64_000
    assert profile.costs.transfer_base_s == A40.transfer_base_s
    assert "transfer_base_s" in profile.notes
    assert profile.model == "M"
    told = report(found, profile)
    assert json.loads(json.dumps(told)) == told
    assert told["engines"][1]["median_abs_residual"] < 0.01


async def test_split_engines_are_asked_for_what_they_do_and_for_transfers() -> None:
    found = await measured(FakeServer([A40] * 3, ["prefill", "decode", "decode"]))
    assert found.complete
    prefill = found.engines[0].steps
    assert not any(step.decode_seqs for step in prefill)
    profile = make_profile(found, A40.faster(7.4))
    assert worst(profile.costs, A40) < 4 * GOOD
    assert profile.costs.transfer_base_s == pytest.approx(0.002, rel=0.01)
    assert profile.costs.transfer_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert profile.costs.kv_bytes_per_token == BYTES_PER_TOKEN
    assert not profile.notes


async def test_transfers_from_another_host_have_constants_of_their_own() -> None:
    server = FakeServer([A40] * 3, ["prefill", "decode", "decode"])
    server.hosts = ["here", "here", "there"]
    server.workers = 2
    profile = make_profile(await measured(server, most_s=0.1), A40)
    costs = profile.costs
    assert costs.kv_bytes_per_token == BYTES_PER_TOKEN
    assert costs.transfer_base_s == pytest.approx(0.002, rel=0.01)
    assert costs.far_transfer_base_s == pytest.approx(0.01, rel=0.01)
    assert costs.far_transfer_bytes_per_s == pytest.approx(2e8, rel=0.01)


async def test_it_stops_in_time_and_says_what_is_open() -> None:
    server = FakeServer([A40], ["both"])
    server.draw.gauss = lambda *_: server.draw.uniform(0.5, 1.5)  # type: ignore[method-assign]
    told: list[Any] = []
    found = await measured(server, most_s=0.01, tell=lambda *said: told.append(said))
    assert not found.complete
    assert found.rounds == 1
    assert told[0][0] == 1
    assert told[0][1] > 0


async def test_what_cannot_be_measured_is_one_line() -> None:
    def server() -> FakeServer:
        return FakeServer([A40], ["both"])

    locked, deaf, full = server(), server(), server()
    locked.key = "secret"
    deaf.hears = False
    full.completions = 503
    for one, says in (
        (locked, "--api-key"),
        (deaf, "telemetry"),
        (full, "HTTP 503 no more"),
        (httpx.MockTransport(lambda _: httpx.Response(404)), "router-plugin"),
        (httpx.MockTransport(lambda _: httpx.Response(200, text="x")), "JSON"),
    ):
        with pytest.raises(MeasureError, match=says) as error:
            await measured(one)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    assert (await measured(locked, key="secret")).rounds


def test_transfers_of_one_size_tell_no_bandwidth() -> None:
    assert fit_transfers([], []) == {}
    same = [Transfer(0.01, 1000)] * 5
    assert fit_transfers(same, [(1000, 10)]) == {"kv_bytes_per_token": 100.0}


def test_transfers_that_take_no_longer_when_larger_tell_their_seconds() -> None:
    moved = [Transfer(0.03 - size / 1e9, size) for size in (10**6, 10**7)]
    found = fit_transfers(moved, [])
    assert found["transfer_base_s"] == pytest.approx(0.0245)
    assert found["transfer_bytes_per_s"] == FASTEST_BYTES_PER_S
    costs = A40.changed(**found)
    assert costs.transfer_s(10**6) == pytest.approx(0.0245, rel=0.01)


@pytest.mark.parametrize(
    ("moved", "far", "unmeasured"),
    [
        ([], False, {"transfer_base_s", "transfer_bytes_per_s", "kv_bytes_per_token"}),
        # One size tells the bytes of a token, and nothing of the link.
        ([(0.01, 1000)] * 5, False, {"transfer_base_s", "transfer_bytes_per_s"}),
        # As fast when large: measured, and noted.
        ([(0.02, 1000), (0.01, 9000)], False, set()),
        ([(0.01, 1000), (0.02, 9000)], False, set()),
        (
            [(0.01, 1000), (0.02, 9000)],
            True,
            {"far_transfer_base_s", "far_transfer_bytes_per_s"},
        ),
    ],
)
async def test_the_profile_says_what_of_transfers_was_not_measured(
    moved: list[tuple[float, int]], far: bool, unmeasured: set[str]
) -> None:
    found = await measured(FakeServer([A40], ["both"]))
    sizes = [(size, size // 10) for _, size in moved]
    transfer = fit_transfers([Transfer(*one) for one in moved], sizes)
    prior = A40.changed(far_transfer_base_s=0.1, far_transfer_bytes_per_s=1e8)
    found = replace(found, transfer=transfer)
    profile = make_profile(found, prior if far else A40)
    told = report(found, profile)
    assert set(told["not_measured"]) == unmeasured
    flat = len(moved) == 2 and moved[0][0] > moved[1][0]
    assert set(told["notes"]) == unmeasured | (
        {"transfer_bytes_per_s"} if flat else set()
    )


def test_a_few_slow_transfers_change_little() -> None:
    draw = random.Random(3)
    moved = [
        Transfer((0.004 + size / 2e9) * draw.gauss(1, 0.01), size)
        for size in (10**6 * n for n in range(1, 60))
    ]
    moved[5] = Transfer(3.0, moved[5].size_bytes)
    moved[40] = Transfer(2.0, moved[40].size_bytes)
    found = fit_transfers(moved, [])
    assert found["transfer_bytes_per_s"] == pytest.approx(2e9, rel=0.05)
    assert found["transfer_base_s"] == pytest.approx(0.004, rel=0.05)


def test_the_proposed_targets_are_the_study_s_own() -> None:
    study = load("a40-qwen2.5-3b")
    proposed = proposed_slo(study.costs)
    for name, target in study.slo.items():
        assert proposed[name].tpot_s == pytest.approx(target.tpot_s, rel=0.01)
        assert proposed[name].ttft_s == pytest.approx(target.ttft_s, rel=0.01)
