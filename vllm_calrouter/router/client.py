"""vLLM's data-parallel client, with the router between its API server and engines."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from vllm_calrouter import introduction, transport
from vllm_calrouter.engine.scheduler import STATE_UTILITY
from vllm_calrouter.introduction import Introduction
from vllm_calrouter.keys import Keys, load_keys
from vllm_calrouter.messages import EngineMessage
from vllm_calrouter.options import OptionError, RouterOptions
from vllm_calrouter.placement import (
    Limits,
    engine_costs,
    engine_limits,
    foreign_profile,
)
from vllm_calrouter.router import intake
from vllm_calrouter.router.calibrator import Calibrator
from vllm_calrouter.router.clocks import Clocks
from vllm_calrouter.router.first_token import first_token_rules
from vllm_calrouter.router.journal import Journal
from vllm_calrouter.router.metrics import RouterMetrics
from vllm_calrouter.router.router import Router
from vllm_calrouter.router.split import Split
from vllm_calrouter.router.subscriber import Subscriber
from vllm_calrouter.router.warm_up import warm_up
from vllm_calrouter.seam import router_options

logger = init_logger("vllm.calrouter")

_MEND_EVERY_S = 60.0

#: An engine answers between two steps.
_ANSWER_S = 10.0


class RouterClient(DPLBAsyncMPClient):  # type: ignore[misc]
    """Sends the legs a `Router` asks for and feeds it the engines' answers.

    A leg is steered by its `data_parallel_rank` through vLLM's own
    `add_request_async`, which also remembers its engine for aborts.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = router_options(vllm_config)
        assert options is not None, "this client is chosen by the router only"
        self.router: Router | None = None
        super().__init__(vllm_config, *args, **kwargs)
        self.router = Router(
            options,
            len(self.core_engines),
            index=self.client_index,
            count=self.client_count,
            first_token=first_token_rules(vllm_config, options),
            limits=_limits(vllm_config, options, len(self.core_engines)),
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            journal=Journal(options.journal) if options.journal else None,
        )
        self.split = Split(self.router.pools)
        self.introductions: list[Introduction] = []
        self._clocks: Clocks | None = None
        self.subscriber: Subscriber | None = None
        self.calibrator: Calibrator | None = None
        self._listening: list[asyncio.Task[None]] = []
        self._mending: asyncio.Task[None] | None = None
        self._started = False
        self.served = _served(vllm_config)

    async def get_supported_tasks_async(self) -> Any:
        """The first thing an API server asks of its engines, before it serves."""
        if not self._started:
            self._started = True
            await self._start()
        return await super().get_supported_tasks_async()

    async def _start(self) -> None:
        router = self._router
        router.metrics = RouterMetrics()
        pools = router.pools
        logger.info("router: policy %s, %s", router.options.policy, pools)
        self._warn_of_profile()
        await self._meet_engines()
        if router.options.telemetry != transport.OFF:
            self._listen()
        if router.options.admission is not None:
            intake.guard(router.admit)
        self._mending = asyncio.create_task(_now_and_then(router, self.split))
        if pools.disaggregated and router.options.warm_up:
            await warm_up(router, self._send, self.ensure_alive)

    def _warn_of_profile(self) -> None:
        options = self._router.options
        # Of several API servers one says it.
        if not options.prices or self.client_index:
            return
        if told := foreign_profile(options, self.served):
            # Who wrote none knows that nothing was measured.
            level = logging.WARNING if options.profile else logging.INFO
            logger.log(level, "router: %s", told)

    async def _meet_engines(self) -> None:
        """Learn where engines are, and that each was started to work with this router.

        Raises:
            OptionError: one was not.
        """
        try:
            told = await self.call_utility_all_async(introduction.UTILITY)
        except Exception as error:
            raise OptionError(
                f"an engine does not know the router ({error}): write the same "
                "--router-plugin and --router-config on every host"
            ) from None
        self.introductions = introduction.read(told)
        options = self._router.options
        introduction.check(self.introductions, options, _router_keys(options))
        self._router.placer.place_on([engine.host for engine in self.introductions])
        clocks = Clocks(
            [engine.clock for engine in self.introductions], introduction.clock_name()
        )
        self._clocks = clocks if clocks.differ else None

    def _listen(self) -> None:
        router = self._router
        if router.options.listens:
            self.calibrator = _calibrator(router)
        self.subscriber = Subscriber(
            [engine.url for engine in self.introductions if engine.url],
            router=router.uid,
            table=router.placer.table,
            keys=_router_keys(router.options),
            metrics=router.metrics,
            listener=self._heard,
        )
        router.placer.refresh = self.subscriber.refresh
        self._listening.append(asyncio.create_task(self.subscriber.run()))
        if self.calibrator is not None:
            self._listening.append(asyncio.create_task(self.calibrator.run()))

    def _stop_listening(self) -> None:
        while self._listening:
            self._listening.pop().cancel()
        if self.subscriber is not None:
            self._router.placer.refresh = None
            self.subscriber.close()

    def _heard(self, message: EngineMessage) -> None:
        self.split.hear(message)
        if self.calibrator is not None:
            self.calibrator.hear(message)

    @property
    def _router(self) -> Router:
        assert self.router is not None
        return self.router

    async def _send(self, leg: EngineCoreRequest) -> None:
        await super().add_request_async(leg)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        router = self._router
        if request.request_id in router:
            # The next part of a streaming-input session goes where the first went.
            await self._send(request)
            return
        router.placer.report(self.lb_engines)
        vllm_rank = self._vllm_rank(request) if router.leave_to_vllm(request) else None
        leg = router.begin(request, vllm_rank=vllm_rank)
        try:
            await self._send(leg)
        except asyncio.CancelledError:
            # The engine may have it already, and vLLM does not abort what it has not
            # finished adding.
            await asyncio.shield(self.abort_requests_async([request.request_id]))
            raise
        except Exception:
            router.not_sent(leg)
            raise

    def _vllm_rank(self, request: EngineCoreRequest) -> int:
        # vLLM remembers this choice by request id and repeats it when sending.
        engine = self.get_core_engine_for_request(request)
        rank: int = self.core_engines.index(engine)
        return rank

    @staticmethod
    async def process_engine_outputs(
        self: RouterClient,
        outputs: EngineCoreOutputs,
    ) -> None:
        """vLLM calls this on the class with every message of an engine."""
        await DPLBAsyncMPClient.process_engine_outputs(self, outputs)
        if self.router is None:
            return
        if self._clocks is not None:
            self._clocks.translate(outputs)
        for leg in self.router.answered(outputs):
            try:
                await self._send(self.router.still_wanted(leg))
            except Exception:
                # Raised here it would end the task that reads all engines.
                logger.exception("leg %s could not be sent", leg.request_id)
                if (output := self.router.not_sent(leg)) is not None:
                    outputs.outputs.append(output)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await super().abort_requests_async(self._router.abort(request_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        super().shutdown(timeout)
        if self.router is not None:
            self._stop_listening()
            if self._mending is not None:
                self._mending.cancel()
            self.router.close()

    async def reset_prefix_cache_async(self, *args: Any, **kwargs: Any) -> bool:
        self._router.placer.forget_prefixes()
        emptied: bool = await super().reset_prefix_cache_async(*args, **kwargs)
        return emptied

    async def pause_scheduler_async(
        self, mode: Any = "abort", clear_cache: bool = True
    ) -> None:
        await super().pause_scheduler_async(mode, clear_cache)
        if clear_cache:
            self._router.placer.forget_prefixes()

    async def sleep_async(self, level: int = 1, mode: Any = "abort") -> None:
        await super().sleep_async(level, mode)
        # At level 0 engines only stop, and keep what they have.
        if level:
            self._router.placer.forget_prefixes()

    async def engine_states(self) -> list[dict[str, Any]]:
        """What every engine holds right now (`engine/scheduler.py`).

        Empty when one does not answer: nothing tells vLLM that another host is gone.
        """
        asked = self.call_utility_all_async(STATE_UTILITY)
        states: list[dict[str, Any]] = []
        with suppress(asyncio.TimeoutError):
            states = await asyncio.wait_for(asked, _ANSWER_S)
        return states


def _router_keys(options: RouterOptions) -> Keys | None:
    folder = options.telemetry_keys
    return load_keys(folder, "router") if folder else None


def _limits(config: Any, options: RouterOptions, engines: int) -> list[Limits]:
    scheduler = config.scheduler_config
    common = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return engine_limits(options, engines, common)


def _served(config: Any) -> dict[str, Any]:
    """What runs here, as a profile names it."""
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        gpu = current_platform.get_device_name()
    except NotImplementedError:
        gpu = "unknown"
    return {
        "model": model.model,
        "dtype": dtype,
        "kv_dtype": dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "gpu": gpu or "unknown",
        "max_model_len": model.max_model_len,
    }


def _calibrator(router: Router) -> Calibrator:
    options, pools = router.options, router.pools
    return Calibrator(
        engine_costs(options, pools.engines),
        [options.role_of(rank) for rank in range(pools.engines)],
        router.placer.table,
        takes_over=options.calibrates,
        metrics=router.metrics,
    )


async def _now_and_then(router: Router, split: Split) -> None:
    while True:
        await asyncio.sleep(_MEND_EVERY_S)
        suggested = split.suggested_prefill()
        if router.metrics and suggested is not None:
            router.metrics.split_suggested(suggested)
        if dropped := router.drop_expired():
            logger.warning("%d bookings were never released, and are dropped", dropped)
