"""The hook on an engine's scheduler: limits by role, the order of what waits, and the
state an engine tells."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_calrouter import introduction, transport
from vllm_calrouter.engine.observer import Observer, observed
from vllm_calrouter.engine.ordered import order_queue, ordered
from vllm_calrouter.engine.publisher import Publisher
from vllm_calrouter.keys import Keys, load_keys
from vllm_calrouter.options import CONFIG_KEY, FCFS, RouterOptions
from vllm_calrouter.placement.costs import engine_costs
from vllm_calrouter.seam import add_engine_utility, router_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_calrouter.calibration import EngineCosts

STATE_UTILITY = "calrouter_state"


def build_scheduler(
    vllm_config: VllmConfig,
    *,
    costs: EngineCosts | None = None,
    clock: Callable[[], float] = time.monotonic,
    **kwargs: Any,
) -> Any:
    """What vLLM calls as the scheduler class: the class in use, under our limits.

    Args:
        vllm_config: vLLM's, with the router's options in it.
        costs: of this engine; those of the options' profile without it.
        clock: seconds, by which deadlines are kept.
        kwargs: vLLM's, for the scheduler class.

    Raises:
        ProfileError: the options' profile cannot be used.
    """
    options = router_options(vllm_config)
    assert options is not None, "this scheduler is chosen by the router only"
    tells = options.telemetry != transport.OFF
    scheduler_class = _base_class(vllm_config)
    rank = vllm_config.parallel_config.data_parallel_index
    order = options.order_of(options.role_of(rank))
    if order != FCFS:
        scheduler_class = ordered(scheduler_class)
    if tells:
        scheduler_class = observed(scheduler_class)
    scheduler = scheduler_class(vllm_config=vllm_config, **kwargs)
    if options.prefill:
        limits = options.role_limits(prefill=rank < options.prefill)
        apply_limits(scheduler, limits)
    if order != FCFS:
        costs = costs or engine_costs(options, rank + 1)[rank]
        order_queue(scheduler, order, options.patience, costs, clock)
    if tells:
        observe(scheduler, options, rank)
    add_engine_utility(STATE_UTILITY, engine_state)
    about = introduce(options, rank)
    add_engine_utility(introduction.UTILITY, lambda engine_core: about)
    return scheduler


def observe(scheduler: Any, options: RouterOptions, rank: int) -> None:
    """Let routers hear from now on what this engine holds.

    Raises:
        OSError, OptionError: as `Publisher` and `load_keys`.
    """
    address = transport.located(options.telemetry)
    publisher = Publisher(address, rank, keys=_keys(options))
    scheduler.observer = Observer(
        scheduler, rank=rank, role=options.role_of(rank), to=publisher
    )
    # A router that starts later hears an idle engine, too.
    scheduler.observer.tell()


def introduce(options: RouterOptions, rank: int) -> dict[str, Any]:
    """What this engine tells routers of itself, as plain data."""
    tells = options.telemetry != transport.OFF
    address = transport.located(options.telemetry)
    about = introduction.Introduction(
        rank=rank,
        host=transport.own_host(),
        url=transport.endpoint(address, rank) if tells else None,
        keys=introduction.public_keys(_keys(options)),
        clock=introduction.clock_name(),
        options=introduction.shared_options(options),
    )
    plain: dict[str, Any] = msgspec.to_builtins(about)
    return plain


def _keys(options: RouterOptions) -> Keys | None:
    folder = options.telemetry_keys
    return load_keys(folder, "engine") if folder else None


def _base_class(vllm_config: VllmConfig) -> Any:
    chosen = vllm_config.additional_config.get(CONFIG_KEY + "_scheduler")
    if chosen is not None:
        module, _, name = chosen.rpartition(".")
        return getattr(importlib.import_module(module), name)
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


#: vLLM's option, and the scheduler's attribute that it ends up in. The model runner's
#: buffers stay sized by the common option; what a step holds, the scheduler says.
_LIMITS = {
    "max_num_seqs": "max_num_active_reqs",
    "max_num_batched_tokens": "max_num_scheduled_tokens",
}


def apply_limits(scheduler: Any, limits: dict[str, int]) -> None:
    """Set a role's limits; raises AttributeError when this vLLM has no such limit."""
    for option, value in limits.items():
        attribute = _LIMITS[option]
        getattr(scheduler, attribute)
        setattr(scheduler, attribute, value)


def engine_state(engine_core: Any) -> dict[str, Any]:
    """What an engine holds right now; counts of requests and of KV blocks.

    `held` counts finished requests whose blocks wait for a reader (`kv_free_blocks`
    counts blocks that only the prefix cache still remembers as free).
    """
    scheduler = engine_core.scheduler
    config = engine_core.vllm_config
    running, waiting = scheduler.get_request_counts()
    pool = scheduler.kv_cache_manager.block_pool
    transfer = config.kv_transfer_config
    return {
        "rank": config.parallel_config.data_parallel_index,
        "kv_role": transfer.kv_role if transfer else None,
        "running": running,
        "waiting": waiting,
        "held": len(scheduler.requests) - running - waiting,
        # One block is the null block, which is never free.
        "kv_total_blocks": pool.num_gpu_blocks - 1,
        "kv_free_blocks": pool.get_num_free_blocks(),
        "max_num_seqs": scheduler.max_num_active_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
    }
