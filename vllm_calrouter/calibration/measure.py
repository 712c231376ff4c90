"""Measures a running server's engines: makes them step, and reads what steps took.

Requests are forced onto one engine each; durations are the engines' own, from what they
tell the router (`GET /router/state`), so that neither HTTP nor the network counts. All
engines are measured at the same time. Traffic of others does not spoil anything: its
steps are measured, too.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from vllm_calrouter.calibration.fit import (
    CONSTANTS,
    Array,
    Fit,
    as_arrays,
    fit_steps,
    predict,
    regressors,
    values_of,
)
from vllm_calrouter.calibration.profile import FASTEST_BYTES_PER_S, EngineCosts
from vllm_calrouter.messages import StepTiming, Transfer

#: A constant is known when its standard error is below this share of it, or below that
#: share of the step in which it weighs most.
GOOD = 0.02
NEGLIGIBLE = 0.001

#: Constants that an engine of a role is asked for.
OF_ROLE = {"prefill": CONSTANTS[:3], "decode": CONSTANTS[3:], "both": CONSTANTS}

#: Prompt lengths of the prefill ladder; a longer model is measured up to the last.
_LADDER_TOKENS = (16, 64, 192, 512, 1024, 2048, 4096, 8192)

#: Decode batches: sequences, and tokens of context each; output tokens of each.
_BATCHES = (1, 4, 12, 32, 64)
_CONTEXTS = (32, 512, 1536)
_OUTPUT_TOKENS = 12

#: The share of an engine's KV cache that is filled at most.
_KV_SHARE = 0.7

#: Requests of each length whose KV cache is moved.
_TRANSFERS = 3

_TIMEOUT_S = 600.0

#: Of several API servers only the one that placed a request knows of it, and any may
#: answer: how often it is asked.
_MOST_ASKED = 30

#: Token ids that every vocabulary has, and that are plain text in most.
_IDS = (40, 240)


class MeasureError(RuntimeError):
    """A server that cannot be measured; one line that says why."""


@dataclass
class Engine:
    """One engine, and the steps and transfers it told of since measuring began."""

    rank: int
    role: str
    max_seqs: int
    kv_tokens: int
    block_tokens: int
    steps: list[StepTiming] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    _seen: tuple[int, int, int] | None = None

    def hear(self, heard: dict[str, Any]) -> None:
        """Take what is new of what a router heard of this engine."""
        now = (heard["incarnation"], heard["steps"], heard["transfers"])
        before, self._seen = self._seen, now
        if before is None or before[0] != now[0]:
            return
        if now[1] < before[1]:
            # Another API server, which has heard less so far.
            self._seen = before
            return
        new_steps, new_transfers = now[1] - before[1], now[2] - before[2]
        self.steps += _last(heard["recent_steps"], new_steps, StepTiming)
        self.transfers += _last(heard["recent_transfers"], new_transfers, Transfer)

    def wanting(self, fit: Fit) -> dict[str, float]:
        """Constants that are not known yet: their standard error, relative."""
        work, _ = as_arrays(self.steps)
        weights = _weights(work, values_of(fit.costs))
        wanting = {}
        for index, name in enumerate(CONSTANTS):
            if name not in OF_ROLE[self.role]:
                continue
            value, error = getattr(fit.costs, name), fit.standard_errors[name]
            if error > GOOD * value and error * weights[index] > NEGLIGIBLE:
                wanting[name] = error / value if value else math.inf
        return wanting


@dataclass(frozen=True)
class Measured:
    """What a server's engines were found to be.

    `transfer` has the KV transfer's constants by name, empty where none was moved.
    `seconds` is how long measuring took, on the clock's time.
    """

    engines: list[Engine]
    fits: dict[int, Fit]
    transfer: dict[str, float]
    served: dict[str, Any]
    vllm: str
    seconds: float
    rounds: int
    complete: bool


class Measurement:
    """Measures one server; use it as an asynchronous context manager.

    Args:
        url: of the server.
        prior: what is thought of the engines before.
        key: the server's API key.
        most_s: no round is begun after so many seconds.
        tell: is called with (rounds done, constants not known yet, the largest relative
            standard error among them) after each round.
        seed: of the prompts; another one for each measurement, or prefixes are cached.
        poll_s: seconds between two looks at what engines tell. They tell their last
            eight steps: what is looked at less often is seen in part.
        transport: stands for the network.
    """

    def __init__(
        self,
        url: str,
        prior: EngineCosts,
        *,
        key: str | None = None,
        most_s: float = 60.0,
        tell: Callable[[int, int, float], None] = lambda *_: None,
        seed: int | None = None,
        poll_s: float = 0.05,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=_TIMEOUT_S,
            # A server closes idle connections, and may do so as one is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            transport=transport,
        )
        self._url = url
        self._prior = prior
        self._most_s = most_s
        self._tell = tell
        self._poll_s = poll_s
        self._random = random.Random(seed)
        self._model = ""
        self._longest = 0
        self._workers = 1
        self._hosts: dict[int, str] = {}
        self._engines: list[Engine] = []

    async def __aenter__(self) -> Measurement:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def run(self) -> Measured:
        """Measure until every constant is known, or for `most_s`.

        Raises MeasureError.
        """
        served, vllm = await self._meet()
        began_s = time.monotonic()
        rounds, wanting, fits = 0, {"all": 1.0}, {}
        async with self._listening() as listening:
            while wanting and (not rounds or time.monotonic() - began_s < self._most_s):
                await self._round(rounds)
                if listening.done():
                    listening.result()
                rounds += 1
                fits = {e.rank: self._fit(e) for e in self._engines}
                wanting = {
                    f"{e.rank} {name}": error
                    for e in self._engines
                    for name, error in e.wanting(fits[e.rank]).items()
                }
                self._tell(rounds, len(wanting), max(wanting.values(), default=0.0))
            transfer = await self._transfers()
        seconds = time.monotonic() - began_s
        return Measured(
            self._engines, fits, transfer, served, vllm, seconds, rounds, not wanting
        )

    async def watch(self, traffic: Awaitable[Any]) -> list[Engine]:
        """The engines, with the steps they told of while this traffic went on.

        Raises MeasureError.
        """
        await self._meet()
        async with self._listening() as listening:
            await traffic
            if listening.done():
                listening.result()
        return self._engines

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[asyncio.Task[None]]:
        listening = asyncio.create_task(self._listen())
        try:
            yield listening
        finally:
            listening.cancel()

    async def _meet(self) -> tuple[dict[str, Any], str]:
        """Learn what is served, and by which engines."""
        state = await self._state(engines=True)
        heard = [row for row in state["heard"] if row["age_s"] is not None]
        if len(heard) < len(state["engines"]) or not heard:
            raise MeasureError(
                "the router hears nothing of its engines: start the server without "
                "--router-config.telemetry off"
            )
        for row in heard:
            engine = Engine(
                row["rank"],
                row["role"],
                row["max_seqs"],
                row["kv_total_blocks"] * row["block_tokens"],
                row["block_tokens"],
            )
            engine.hear(row)
            self._engines.append(engine)
        self._hosts = {row["rank"]: row["host"] for row in state["hosts"]}
        self._workers = state["served"]["tensor_parallel"]
        models = await self._get("/v1/models")
        self._model = models["data"][0]["id"]
        self._longest = int(models["data"][0]["max_model_len"])
        version = await self._get("/version")
        return state["served"], str(version["version"])

    async def _round(self, number: int) -> None:
        await asyncio.gather(*(self._measure(e, number) for e in self._engines))
        # What the last steps took is told a moment later.
        await asyncio.sleep(4 * self._poll_s)

    async def _measure(self, engine: Engine, number: int) -> None:
        if engine.role != "decode":
            for tokens in self._ladder(number):
                await self._ask(engine.rank, self._prompt(tokens), 1)
        if engine.role == "prefill":
            return
        for context in _CONTEXTS:
            for seqs in _BATCHES:
                whole = context + _OUTPUT_TOKENS
                room = int(_KV_SHARE * engine.kv_tokens / whole)
                if seqs > min(engine.max_seqs, room) or whole > self._longest:
                    break
                # The same prompts in each round: the prefix cache may have them.
                prompts = [self._fixed_prompt(context, each) for each in range(seqs)]
                await asyncio.gather(
                    *(self._ask(engine.rank, p, _OUTPUT_TOKENS) for p in prompts)
                )

    def _ladder(self, number: int) -> list[int]:
        """Prompt lengths of a round, a little different in each."""
        most = self._longest - 1
        lengths = {min(int(n * (1 + 0.03 * number)), most) for n in _LADDER_TOKENS}
        shuffled = sorted(lengths)
        self._random.shuffle(shuffled)
        return shuffled

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(*_IDS) for _ in range(tokens)]

    def _fixed_prompt(self, tokens: int, number: int) -> list[int]:
        draw = random.Random(f"{tokens} {number}")
        return [draw.randrange(*_IDS) for _ in range(tokens)]

    async def _transfers(self) -> dict[str, float]:
        """Have KV caches moved from prefill to decode engines, one at a time."""
        readers = [e for e in self._engines if e.role == "decode"]
        if not readers:
            return {}
        block = readers[0].block_tokens
        moved: dict[bool, list[Transfer]] = {False: [], True: []}
        sizes = []
        for tokens in self._ladder(0) * _TRANSFERS:
            if tokens + 2 > self._longest:
                continue
            before = {e.rank: len(e.transfers) for e in readers}
            name = uuid.uuid4().hex
            await self._ask(None, self._prompt(tokens), 2, name)
            await asyncio.sleep(4 * self._poll_s)
            by = [e for e in readers if len(e.transfers) > before[e.rank]]
            if len(by) != 1:
                # There was traffic of others.
                continue
            whole = self._whole(by[0].transfers[before[by[0].rank] :])
            far = await self._is_far(name, by[0].rank)
            if whole is not None and far is not None:
                moved[far].append(whole)
                sizes.append((whole.size_bytes, -(-tokens // block) * block))
        found = fit_transfers(moved[False], sizes)
        far_ones = fit_transfers(moved[True], [])
        return found | {f"far_{name}": value for name, value in far_ones.items()}

    def _whole(self, parts: Sequence[Transfer]) -> Transfer | None:
        """One transfer of the parts that an engine's workers moved at the same time."""
        if len(parts) != self._workers:
            return None
        return Transfer(
            max(part.seconds for part in parts), sum(part.size_bytes for part in parts)
        )

    async def _is_far(self, name: str, reader: int) -> bool | None:
        """Whether this request's KV cache came from another host; None: unknown."""
        if len(set(self._hosts.values())) < 2:
            return False
        for _ in range(_MOST_ASKED):
            known = await self._get(f"/router/decisions?request_id=cmpl-{name}")
            if known:
                return self._hosts[known[0]["prefill_rank"]] != self._hosts[reader]
        return None

    def _fit(self, engine: Engine) -> Fit:
        try:
            return fit_steps(engine.steps, self._prior)
        except ValueError:
            raise MeasureError(
                f"engine {engine.rank} told of no step: does the server's router run?"
            ) from None

    async def _ask(
        self, rank: int | None, prompt: list[int], tokens: int, name: str | None = None
    ) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        if name is not None:
            headers["X-Request-Id"] = name
        try:
            answer = await self._http.post(
                "/v1/completions", json=body, headers=headers
            )
        except httpx.HTTPError as error:
            raise MeasureError(f"{self._url}: {_words(error)}") from None
        if answer.status_code != 200:
            raise MeasureError(
                f"{self._url} refuses a completion: HTTP {answer.status_code} "
                f"{' '.join(answer.text.split())[:200]}"
            )

    async def _listen(self) -> None:
        by_rank = {engine.rank: engine for engine in self._engines}
        while True:
            state = await self._state(engines=False)
            for row in state["heard"]:
                if row["age_s"] is not None:
                    by_rank[row["rank"]].hear(row)
            await asyncio.sleep(self._poll_s)

    async def _state(self, *, engines: bool) -> dict[str, Any]:
        state: dict[str, Any] = await self._get(
            f"/router/state?engines={str(engines).lower()}"
        )
        return state

    async def _get(self, path: str) -> Any:
        try:
            answer = await self._http.get(path)
        except httpx.HTTPError as error:
            raise MeasureError(f"{self._url}: {_words(error)}") from None
        except httpx.InvalidURL as error:
            raise MeasureError(f"--url {self._url}: {error}") from None
        if answer.status_code == 401:
            raise MeasureError(f"{self._url} asks for a key: add --api-key")
        if answer.status_code != 200:
            raise MeasureError(
                f"{self._url}{path} answers HTTP {answer.status_code}: is it vllm "
                "serve with --router-plugin calrouter?"
            )
        try:
            return answer.json()
        except ValueError:
            raise MeasureError(f"{self._url}{path} does not answer in JSON") from None


def fit_transfers(
    transfers: Sequence[Transfer], sizes: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """Constants of KV transfers, by the median of the slopes between all pairs.

    (P. K. Sen, Journal of the American Statistical Association 63, 1968.)

    Args:
        transfers: as engines told them.
        sizes: (bytes moved, tokens in the blocks moved) of single ones.

    Returns what can be told, by name of `EngineCosts`. Where larger transfers took no
    longer than smaller ones, `transfer_bytes_per_s` is the highest that can be written.
    """
    found: dict[str, float] = {}
    if sizes:
        found["kv_bytes_per_token"] = float(np.median([b / t for b, t in sizes if t]))
    size = np.array([t.size_bytes for t in transfers], dtype=np.float64)
    seconds = np.array([t.seconds for t in transfers], dtype=np.float64)
    above, below = np.triu_indices(len(size), 1)
    apart = size[above] != size[below]
    if not apart.any():
        return found
    rises = (seconds[above] - seconds[below])[apart]
    slope = float(np.median(rises / (size[above] - size[below])[apart]))
    slope = max(slope, 0.0)
    rate = 1.0 / slope if slope * FASTEST_BYTES_PER_S > 1.0 else FASTEST_BYTES_PER_S
    found["transfer_bytes_per_s"] = rate
    found["transfer_base_s"] = max(0.0, float(np.median(seconds - slope * size)))
    return found


def _weights(work: Array, values: Array) -> Array:
    """By constant, what a second of it is at most as a share of a step's seconds."""
    rows = regressors(work, values) / predict(work, values)[:, None]
    largest: Array = rows.max(axis=0)
    return largest


def _last(rows: list[dict[str, Any]], count: int, kind: type[Any]) -> list[Any]:
    return (
        [msgspec.convert(_as_array(row, kind), kind) for row in rows[-count:]]
        if (count > 0)
        else []
    )


def _as_array(row: dict[str, Any], kind: type[Any]) -> list[Any]:
    return [row[name] for name in kind.__struct_fields__]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
