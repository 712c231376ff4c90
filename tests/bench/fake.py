"""A server that answers like vLLM with the router, as well or badly as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


class Fake:
    """Its behaviour by attribute, and what it was asked.

    Attributes:
        ttft_s, tpot_s: seconds it takes.
        policy: of its router; None: it has none.
        missing_tokens: by how many its answers are too short.
        wavers: whether it gives another text each time.
        cold_pairs: pairs that never moved a KV cache.
        running: requests of others.
        secretive: whether it keeps its decisions to itself.
        dev: whether it resets prefix caches.
        refuses: which requests, by their numbers in a run, it does not serve.
        refusal: what it answers to them.
    """

    def __init__(self) -> None:
        self.ttft_s, self.tpot_s = 0.02, 0.002
        self.policy: str | None = "least_loaded"
        self.missing_tokens = 0
        self.wavers = False
        self.cold_pairs = 0
        self.running = 0
        self.secretive = False
        self.dev = True
        self.refusal: type[web.HTTPException] = web.HTTPBadRequest
        self.refuses: Callable[[int], bool] = lambda number: False
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.resets = 0
        self.at_once = self.most_at_once = 0
        self._ended: list[dict[str, Any]] = []
        self._legs: Counter[tuple[str, int]] = Counter()

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """Requests that were measured."""
        return [body for body in self.bodies if body.get("stream")]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/router/state", self._state)
        app.router.add_get("/router/decisions", self._decisions)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 16_000}]})

    async def _state(self, _: web.Request) -> web.Response:
        if self.policy is None:
            raise web.HTTPNotFound
        state = {"policy": self.policy, "prefill_engines": 1, "load": [{}, {}, {}]}
        return web.json_response(state)

    async def _decisions(self, _: web.Request) -> web.Response:
        if self.secretive:
            raise web.HTTPServiceUnavailable
        return web.json_response(self._ended[-500:])

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {self.running}',
            f"vllm:calrouter_warm_up_transfers_total {2 - self.cold_pairs}",
            'vllm:num_preemptions_total{engine="0"} 7',
        ]
        lines += [
            f'vllm:calrouter_decisions_total{{phase="{phase}",engine="{rank}",'
            f'policy="x"}} {count}'
            for (phase, rank), count in self._legs.items()
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _reset(self, _: web.Request) -> web.Response:
        if not self.dev:
            raise web.HTTPNotFound
        self.resets += 1
        return web.json_response({"success": True})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        tokens = body["max_tokens"] - self.missing_tokens
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        if not body.get("stream"):
            text = str(len(self.bodies)) if self.wavers else str(body["prompt"])
            return web.json_response({"choices": [{"text": text}], "usage": usage})
        request_id = request.headers["X-Request-Id"]
        number = int(request_id.rpartition("-")[2])
        if self.refuses(number):
            raise self.refusal(text="no\nsuch thing")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, tokens + 1):
            await asyncio.sleep(self.ttft_s if count == 1 else self.tpot_s)
            finish = "length" if count == tokens else None
            await _event(response, count, [{"text": "", "finish_reason": finish}])
        await _event(response, tokens, [])
        await response.write(b"data: [DONE]\n\n")
        self.at_once -= 1
        self._note(request_id, 1 + number % 2)
        return response

    def _note(self, request_id: str, decode_rank: int) -> None:
        self._legs["prefill", 0] += 1
        self._legs["decode", decode_rank] += 1
        self._ended.append(
            {
                "request_id": f"cmpl-{request_id}-0",
                "prefill_rank": 0,
                "decode_rank": decode_rank,
            }
        )


async def _event(
    response: web.StreamResponse, tokens: int, choices: list[dict[str, Any]]
) -> None:
    told = {"choices": choices, "usage": {"completion_tokens": tokens}}
    await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The server on a free port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(fake.app())

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
