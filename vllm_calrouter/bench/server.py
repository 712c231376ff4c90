"""A vLLM server as a benchmark asks it: what it is, what it counted, one request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

_COMPLETIONS = "/v1/completions"

#: Pages other than completions answer from memory.
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=60)

#: A reset fails as long as something holds a block: transfers end within seconds.
_RESET_TRIES = 20
_RESET_PAUSE_S = 0.5

#: How much of an answer that was no answer is repeated.
_MOST_SHOWN = 200


class BenchError(ValueError):
    """A server that cannot be measured as asked; one line."""


class About(msgspec.Struct, frozen=True):
    """What a server says of itself; `policy` is None where it has no router."""

    model: str
    max_model_len: int
    policy: str | None
    prefill: int
    engines: int


class Counts(msgspec.Struct, frozen=True):
    """What a server has counted since its start; legs by phase and rank."""

    running: int
    preemptions: int
    warm_ups: int
    legs: Mapping[tuple[str, str], int]


class Usage(msgspec.Struct):
    """Tokens so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """What a stream's event tells, of all that is in it."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Server:
    """One server; use `connected` to make it.

    Args:
        name: by which its runs are known.
        http: a session with the server's address.
        timeout_s: after which a request is given up.
    """

    def __init__(
        self, name: str, http: aiohttp.ClientSession, timeout_s: float
    ) -> None:
        self.name = name
        self._http = http
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)

    async def about(self, model: str | None = None) -> About:
        """What it serves and how; raises BenchError where that cannot be measured.

        `model`: a served model's name; its first without it.
        """
        served = {one["id"]: one for one in (await self._page("/v1/models"))["data"]}
        if model is not None and model not in served:
            raise BenchError(
                f"{self.name} does not serve {model!r}: write --model with one of "
                f"{', '.join(served)}"
            )
        name = model or next(iter(served))
        longest = served[name].get("max_model_len")
        if longest is None:
            raise BenchError(
                f"{self.name} does not say how long its model is: is it a vLLM server?"
            )
        state = await self._page("/router/state?engines=false", missing={})
        return About(
            name,
            longest,
            state.get("policy"),
            state.get("prefill_engines", 0),
            len(state.get("load", ())),
        )

    async def counts(self) -> Counts:
        """What its `/metrics` say; raises BenchError."""
        async with self._asked("/metrics") as response:
            text = await response.text()
        sums: dict[str, float] = defaultdict(float)
        legs: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
                if sample.name == "vllm:calrouter_decisions_total":
                    phase, rank = sample.labels["phase"], sample.labels["engine"]
                    legs[phase, rank] += int(sample.value)
        return Counts(
            running=int(
                sums["vllm:num_requests_running"] + sums["vllm:num_requests_waiting"]
            ),
            preemptions=int(sums["vllm:num_preemptions_total"]),
            warm_ups=int(sums["vllm:calrouter_warm_up_transfers_total"]),
            legs=legs,
        )

    async def decisions(self) -> list[dict[str, Any]]:
        """The last requests that its router finished; of one API server, if several."""
        found: list[dict[str, Any]] = await self._page("/router/decisions?limit=500")
        return found

    async def reset_prefix_caches(self) -> bool:
        """Empty the engines' prefix caches; False where it does not offer that.

        Raises BenchError where it offers that and fails.
        """
        path = "/reset_prefix_cache"
        for _ in range(_RESET_TRIES):
            async with self._asked(path, "POST", or_status=404) as response:
                if response.status == 404:
                    return False
                # Releases of vLLM that say nothing have done it.
                if b"false" not in await response.read():
                    return True
            await asyncio.sleep(_RESET_PAUSE_S)
        raise BenchError(f"{self.name} cannot reset its prefix caches: is it idle?")

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One completion, whole; raises BenchError."""
        async with self._asked(
            _COMPLETIONS, "POST", json=dict(body), timeout=self._timeout
        ) as response:
            told: dict[str, Any] = await response.json()
            return told

    async def stream(
        self,
        body: Mapping[str, Any],
        request_id: str,
        delivered: Callable[[int, float], None],
    ) -> str:
        """One completion, streamed; returns why it ended.

        "refused": not admitted, a 429; "error: ...": it failed.

        Args:
            body: of the request.
            request_id: by which the router knows it.
            delivered: told of tokens that came, and when (`time.perf_counter`).
        """
        options = {"include_usage": True, "continuous_usage_stats": True}
        whole = {**body, "stream": True, "stream_options": options}
        finish, tokens = "error: the stream ended early", 0
        try:
            async with self._http.post(
                _COMPLETIONS,
                data=msgspec.json.encode(whole),
                headers={
                    "Content-Type": "application/json",
                    "X-Request-Id": request_id,
                },
                timeout=self._timeout,
            ) as response:
                if response.status == 429:
                    return "refused"
                if response.status != 200:
                    return f"error: {await _refusal(response)}"
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = _decode_event(line[6:])
                    if event.error is not None:
                        return f"error: {str(event.error)[:_MOST_SHOWN]}"
                    if event.usage and event.usage.completion_tokens > tokens:
                        delivered(
                            event.usage.completion_tokens - tokens, time.perf_counter()
                        )
                        tokens = event.usage.completion_tokens
                    for choice in event.choices:
                        finish = choice.finish_reason or finish
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            return f"error: {str(error) or type(error).__name__}"
        return finish

    async def _page(self, path: str, missing: Any = None) -> Any:
        """A page's JSON; `missing`, where there is such a thing, if it has no page."""
        or_status = 200 if missing is None else 404
        async with self._asked(path, or_status=or_status) as response:
            return missing if response.status == 404 else await response.json()

    @asynccontextmanager
    async def _asked(
        self, path: str, method: str = "GET", *, or_status: int = 200, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, of status 200 or this one; raises BenchError."""
        try:
            async with self._http.request(
                method, path, **{"timeout": _PAGE_TIMEOUT, **more}
            ) as response:
                if response.status not in (200, or_status):
                    told = await _refusal(response)
                    raise BenchError(f"{self.name}: {path} answers {told}")
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, BenchError):
                raise
            reason = str(error) or type(error).__name__
            raise BenchError(f"{self.name} does not answer: {reason}") from None


@asynccontextmanager
async def connected(
    name: str, url: str, *, api_key: str | None, timeout_s: float
) -> AsyncIterator[Server]:
    """The server at an address, as long as the context lasts; raises BenchError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        http = aiohttp.ClientSession(
            url,
            headers=headers,
            # Requests are bounded where they are sent. Each has its own connection: a
            # server closes idle ones when it likes, and loses what was just sent.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
    except (ValueError, AssertionError) as error:
        raise BenchError(f"--url {url!r}: {error}: write http://HOST:PORT") from None
    async with http:
        yield Server(name, http, timeout_s)


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = " ".join((await response.text()).split())
    return f"{response.status}: {text[:_MOST_SHOWN]}"
