"""One KV cache over every prefill-decode pair before the server reports healthy.

The first transfer between two engines sets their NIXL connection up; a user's request
should not be the one to wait for it, nor the one to find out that it fails.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_calrouter._core import Phase

if TYPE_CHECKING:
    from vllm_calrouter.router.router import Router

logger = init_logger("vllm.calrouter")

#: Pairs warmed at the same time, and how long one may take.
_AT_ONCE = 16
_TIMEOUT_S = 120.0

Send = Callable[[EngineCoreRequest], Awaitable[None]]


async def warm_up(router: Router, send: Send, check_alive: Callable[[], None]) -> None:
    """Move one KV cache over every pair.

    Args:
        router: whose pairs.
        send: sends a leg to its engine.
        check_alive: raises when an engine has died.

    Raises:
        RuntimeError: a pair could not; says which, and where to look.
    """
    pairs = list(
        itertools.product(
            router.pools.ranks(Phase.PREFILL), router.pools.ranks(Phase.DECODE)
        )
    )
    began = time.monotonic()
    gate = asyncio.Semaphore(_AT_ONCE)
    await asyncio.gather(
        *(_warm(router, send, check_alive, pair, gate) for pair in pairs)
    )
    seconds = time.monotonic() - began
    if router.metrics:
        router.metrics.warmed_up(len(pairs), seconds)
    logger.info(
        "warm-up: %d prefill-decode pairs moved a KV cache in %.1f s",
        len(pairs),
        seconds,
    )


async def _warm(
    router: Router,
    send: Send,
    check_alive: Callable[[], None],
    pair: tuple[int, int],
    gate: asyncio.Semaphore,
) -> None:
    async with gate:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        request = _tiny_request(f"warm-up-{router.index}-{pair[0]}-{pair[1]}")
        await send(router.begin(request, pair=pair, done=done))
        finish = await _finish(done, check_alive)
    if finish != "length":
        raise RuntimeError(
            f"warm-up: no KV cache came from prefill engine {pair[0]} to decode engine "
            f"{pair[1]} ({finish}). See the log of both engines; between machines set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST. --router-config.warm_up false skips this."
        )


async def _finish(done: asyncio.Future[str], check_alive: Callable[[], None]) -> str:
    """How the request ended; raises what `check_alive` does when an engine is gone."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        await asyncio.wait((done,), timeout=1.0)
        if done.done():
            return done.result()
        check_alive()
    return f"no answer in {_TIMEOUT_S:.0f} s"


def _tiny_request(request_id: str) -> EngineCoreRequest:
    # One token fills no block, so no prefix cache can answer in the transfer's place.
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=2, min_tokens=2, ignore_eos=True, temperature=0.0
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
