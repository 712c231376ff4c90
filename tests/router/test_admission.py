"""Who is let in, by what would have to be waited for."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.placement.test_ledger import message
from vllm_calrouter._core import Phase
from vllm_calrouter.calibration import load
from vllm_calrouter.options import RouterOptions, SloClass
from vllm_calrouter.router.admission import RefusedError
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.wishes import Wishes

TIGHT = Wishes(slo="tight", ttft_s=0.2)
LOOSE = Wishes(slo="loose", ttft_s=20.0)
COSTS = load("a40-qwen2.5-3b").costs


def a_router(prefill: int = 2, **options: object) -> Router:
    return Router(
        RouterOptions(
            prefill=prefill,
            slo_classes={"tight": SloClass(ttft_ms=200)},
            **options,  # type: ignore[arg-type]
        ),
        6,
        clock=lambda: 0.0,
    )


def occupy(router: Router, *ranks: int, prompt: int = 8000) -> None:
    """About a second of prefill for each of these engines."""
    for rank in ranks:
        router.placer.table.book(rank, Phase.PREFILL, prompt, 1)


def test_without_the_option_all_are_let_in() -> None:
    router = a_router()
    occupy(router, 0, 1, prompt=10**6)
    router.admit(TIGHT)


def test_who_would_wait_longer_than_its_class_allows_is_refused() -> None:
    router = a_router(admission=2.0)
    router.admit(TIGHT)
    occupy(router, 0)
    # The other prefill engine is free.
    router.admit(TIGHT)
    occupy(router, 1)
    with pytest.raises(
        RefusedError, match=r"would wait .* its SLO allows 0.4 s"
    ) as caught:
        router.admit(TIGHT)
    assert caught.value.http_status == 429
    router.admit(LOOSE)
    # Nothing is known of what it could bear.
    router.admit(Wishes())


def test_the_time_to_ask_again_is_what_is_missing() -> None:
    router = a_router(admission=1.0)
    occupy(router, 0, 1, prompt=20_000)
    wait_s = COSTS.prefill_per_token_s * 20_000
    with pytest.raises(RefusedError) as caught:
        router.admit(TIGHT)
    assert wait_s - 1 < caught.value.retry_after_s < wait_s * 2
    assert RefusedError(1e9, 1.0).retry_after_s == 60
    assert RefusedError(1.001, 1.0).retry_after_s == 1


def test_what_engines_tell_counts_and_so_does_a_slot() -> None:
    router = a_router(prefill=0, admission=1.0)
    table = router.placer.table
    for rank in range(6):
        table.hear(
            rank,
            **message(
                incarnation=1,
                sequence=1,
                running=128,
                waiting=40,
                output_tokens=168 * 200,
                context_tokens=128 * 300,
                kv_total_blocks=10_000,
                kv_free_blocks=5_000,
                block_tokens=16,
            ),
        )
    with pytest.raises(RefusedError):
        router.admit(TIGHT)


def test_the_freshest_figures_decide() -> None:
    router = a_router(admission=1.0)
    asked: list[str] = []
    router.placer.refresh = lambda: asked.append("now")
    router.admit(TIGHT)
    assert asked == ["now"]


def test_refusals_are_counted_by_class() -> None:
    router = a_router(admission=0.001)
    router.metrics = RouterMetrics(registry := CollectorRegistry())
    occupy(router, 0, 1)
    for wishes in (TIGHT, TIGHT, Wishes(ttft_s=0.1)):
        with pytest.raises(RefusedError):
            router.admit(wishes)
    name = "vllm:calrouter_refused_total"
    assert registry.get_sample_value(name, {"slo": "tight"}) == 2
    assert registry.get_sample_value(name, {"slo": "none"}) == 1
    assert router.placer.table.in_flight(0) == 1
