from __future__ import annotations

import pytest
from vllm.v1.engine import EngineCoreRequest, FinishReason

from tests.router.requests import answer, prefilled, token
from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router import warm_up as module
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.warm_up import warm_up


class Engines:
    """Answers legs at once, as engines would; `broken` pairs lose the KV cache."""

    def __init__(self, router: Router, broken: set[tuple[int, int]]) -> None:
        self.router = router
        self.broken = broken
        self.moved: list[tuple[int, int]] = []
        self._prefilled_by: dict[str, int] = {}

    async def send(self, leg: EngineCoreRequest) -> None:
        rank = leg.data_parallel_rank
        assert rank is not None
        name = leg.request_id.removesuffix("-prefill")
        if name != leg.request_id:
            self._prefilled_by[name] = rank
            for next_leg in self.router.answered(answer(prefilled(name))):
                await self.send(next_leg)
            return
        pair = (self._prefilled_by[name], rank)
        self.moved.append(pair)
        broken = pair in self.broken
        finish = FinishReason.ERROR if broken else FinishReason.LENGTH
        self.router.answered(answer(token(name, finish)))


def make(broken: set[tuple[int, int]]) -> tuple[Router, Engines]:
    router = Router(RouterOptions(prefill=2), 5)
    return router, Engines(router, broken)


async def test_every_pair_moves_one_cache_and_nothing_is_left() -> None:
    router, engines = make(broken=set())
    await warm_up(router, engines.send, lambda: None)
    assert sorted(engines.moved) == [(p, d) for p in (0, 1) for d in (2, 3, 4)]
    assert router.placer.table.is_idle()


async def test_a_pair_that_cannot_is_named() -> None:
    router, engines = make(broken={(1, 3)})
    with pytest.raises(RuntimeError, match="prefill engine 1 to decode engine 3"):
        await warm_up(router, engines.send, lambda: None)


async def test_a_dead_engine_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    router, _ = make(broken=set())

    async def lost(leg: EngineCoreRequest) -> None:
        pass

    def dead() -> None:
        raise ConnectionError("engine is dead")

    monkeypatch.setattr(module, "_TIMEOUT_S", 30.0)
    with pytest.raises(ConnectionError):
        await warm_up(router, lost, dead)
