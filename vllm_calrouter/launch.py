"""What a launch must look like for the router to work: the checks before the start."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_calrouter import options as opt
from vllm_calrouter.calibration import ProfileError, load
from vllm_calrouter.hosts import Launch, check_part, check_reach, launch_of
from vllm_calrouter.options import OptionError, RouterOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.calrouter")

#: Launch modes in which requests do not pass the client the router extends, or
#: pass one that sees only part of the engines: flag, and what to do instead.
_BYPASSES = {
    "grpc": "serve HTTP: drop --grpc",
    "data_parallel_external_lb": "drop --data-parallel-external-lb",
    "data_parallel_hybrid_lb": "drop --data-parallel-hybrid-lb",
    "data_parallel_multi_port_external_lb": (
        "drop --data-parallel-multi-port-external-lb"
    ),
    "enable_elastic_ep": "drop --enable-elastic-ep: the set of ranks must not change",
}

#: Keys that mean something under some policies only.
_POLICY_KEYS = {
    "length_threshold_tokens": ("length_threshold",),
    "long_share": ("length_threshold",),
    "seed": ("power_of_two",),
    "prefix_aware": opt.PRICING_POLICIES,
    "slot_weight": ("calibrated", "deadline"),
    "kv_weight": opt.PRICING_POLICIES,
    "slo_weight": opt.PRICING_POLICIES,
}

#: Keys that mean something only where prefill has engines of its own.
_SPLIT_KEYS = ("warm_up", "first_token", "kv_load_failure", "nixl_sleep_ms")

#: Keys that mean something under one predictor only.
_PREDICTOR_KEYS = {
    "online_memory": "online",
    "online_keys": "online",
    "noise": "noisy",
    "noise_seed": "noisy",
}

#: Where the connector is that gives each rank its role.
CONNECTOR_MODULE = "vllm_calrouter.engine.connector"

_NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector")


def resolve(args: Namespace, environ: Mapping[str, str]) -> RouterOptions | None:
    """Options of a parsed command line, or None when it does not ask for the router.

    Raises:
        OptionError: the launch cannot work as written, or part of it has no effect.
    """
    config = _written_config(args)
    if args.router_plugin is None:
        if config:
            raise OptionError(
                "--router-policy and --router-config have no effect without a "
                f"plugin: add --router-plugin {opt.PLUGIN_NAME}"
            )
        return None
    if args.router_plugin != opt.PLUGIN_NAME:
        raise OptionError(
            f"unknown router plugin {args.router_plugin!r}: "
            f"write --router-plugin {opt.PLUGIN_NAME}"
        )
    options = opt.parse(config)
    check_effect(config, options)
    _check_launch_mode(args, environ)
    _check_engines(args.data_parallel_size, options.prefill)
    _check_models(args, options)
    launch = launch_of(args)
    if not launch.headless:
        # Only routers have one.
        _check_journal(options.journal)
    if not launch.headless or _has_orders(options, launch):
        _check_profile(options)
    check_part(launch, options, environ)
    check_telemetry(options, launch)
    _check_telemetry_free(options, launch)
    return options


def _written_config(args: Namespace) -> dict[str, Any]:
    config = dict(args.router_config or {})
    policy = args.router_policy
    if policy is not None and config.setdefault("policy", policy) != policy:
        raise OptionError(
            f"--router-policy {policy} and --router-config.policy "
            f"{config['policy']} contradict each other: write one of them"
        )
    return config


def check_effect(config: Mapping[str, Any], options: RouterOptions) -> None:
    """Refuse what is written and cannot act; raises OptionError."""
    orders = {options.order, options.decode_order}
    if "patience" in config and "deadline" not in orders:
        raise OptionError(
            "--router-config.patience has no effect without deadlines: drop it "
            "or write --router-config.order deadline"
        )
    if "profile" in config and not options.prices:
        raise OptionError(
            "--router-config.profile has no effect under the policy "
            f"{options.policy} and the order {opt.FCFS}: drop it or write "
            f"--router-policy {' or '.join(opt.PRICING_POLICIES)}, "
            "--router-config.order short_first or deadline, or "
            "--router-config.admission X"
        )
    for key, policies in _POLICY_KEYS.items():
        if key in config and options.policy not in policies:
            raise OptionError(
                f"--router-config.{key} has no effect under the policy "
                f"{options.policy}: drop it or write --router-policy "
                f"{' or '.join(policies)}"
            )
    for key, predictor in _PREDICTOR_KEYS.items():
        if key in config and options.predictor != predictor:
            raise OptionError(
                f"--router-config.{key} has no effect under the predictor "
                f"{options.predictor}: drop it or write "
                f"--router-config.predictor {predictor}"
            )
    if "calibration" in config:
        _check_calibration(options)
    if options.policy == "deadline" and not (
        options.prefill and options.order == "deadline"
    ):
        raise OptionError(
            "the policy deadline acts only where prefill engines serve by deadline: "
            "add --router-config.prefill N and drop --router-config.order, or write "
            "--router-policy calibrated"
        )
    if options.prefill:
        return
    for key in config:
        if key.startswith(("prefill_", "decode_")) or key in _SPLIT_KEYS:
            raise OptionError(
                f"--router-config.{key} has no effect when every engine does both: "
                "add --router-config.prefill N"
            )


def _check_calibration(options: RouterOptions) -> None:
    from vllm_calrouter import transport

    if not options.listens:
        raise OptionError(
            "--router-config.calibration has no effect under the policy "
            f"{options.policy}: drop it or write "
            f"--router-policy {' or '.join(opt.PRICING_POLICIES)}, or "
            "--router-config.admission X"
        )
    if options.calibration and options.telemetry == transport.OFF:
        raise OptionError(
            "--router-config.calibration on has no effect without what engines tell: "
            "drop it or --router-config.telemetry off"
        )


def _check_launch_mode(args: Namespace, environ: Mapping[str, str]) -> None:
    for flag, advice in _BYPASSES.items():
        if getattr(args, flag, False):
            raise OptionError(f"the router cannot work with this launch: {advice}")
    if getattr(args, "data_parallel_rank", None) is not None:
        raise OptionError(
            "the router needs all ranks behind one server: drop --data-parallel-rank"
        )
    if getattr(args, "nnodes", 1) > 1:
        raise OptionError(
            "--nnodes has not been tried with the router: drop it, and say which ranks "
            "a host has with --data-parallel-size-local and --data-parallel-start-rank"
        )
    if getattr(args, "data_parallel_backend", "mp") != "mp":
        raise OptionError(
            f"--data-parallel-backend {args.data_parallel_backend} has not been "
            "tried with the router: write --data-parallel-backend mp"
        )
    if environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() not in ("0", "false", ""):
        raise OptionError(
            "the Rust front-end does not pass through the router: "
            "unset VLLM_USE_RUST_FRONTEND"
        )


def _check_engines(engines: int, prefill: int) -> None:
    if engines < 2:
        raise OptionError(
            f"the router needs at least two engines, got {engines}: "
            "add --data-parallel-size N"
        )
    if prefill >= engines:
        raise OptionError(
            f"{prefill} prefill of {engines} engines leave none to decode: write "
            f"--router-config.prefill {engines - 1} or less, "
            f"or --data-parallel-size {prefill + 1} or more"
        )


def _check_models(args: Namespace, options: RouterOptions) -> None:
    """Refuse defaults for models that no request can name."""
    if getattr(args, "enable_lora", False):
        # Adapters may be loaded while the server runs.
        return
    model = getattr(args, "model_tag", None) or getattr(args, "model", None)
    served = getattr(args, "served_model_name", None) or [model]
    served = [served] if isinstance(served, str) else served
    for name in options.defaults:
        if name not in served:
            raise OptionError(
                f"--router-config.defaults are for the model {name!r}, which is not "
                f"served: write one of {', '.join(map(repr, served))}"
            )


def _has_orders(options: RouterOptions, launch: Launch) -> bool:
    """Whether engines of this launch price what waits."""
    roles = {options.role_of(rank) for rank in launch.ranks}
    return any(options.order_of(role) != opt.FCFS for role in roles)


def _check_profile(options: RouterOptions) -> None:
    if options.profile is None:
        return
    try:
        profile = load(options.profile)
    except ProfileError as error:
        raise OptionError(f"--router-config.profile: {error}") from None
    opt.check_slo_names(options, options.slo_classes or profile.slo)


def _check_journal(journal: str | None) -> None:
    """Say now what would otherwise fail when all engines have loaded their models."""
    if journal is None:
        return
    try:
        Path(journal).parent.mkdir(parents=True, exist_ok=True)
        with open(journal, "a"):
            pass
    except OSError as error:
        raise OptionError(
            f"--router-config.journal {json.dumps(journal)} cannot be written "
            f"({error.strerror}): name a file in a folder of yours"
        ) from None


def check_telemetry(options: RouterOptions, launch: Launch) -> None:
    """Check what can be checked while engines use the addresses, too.

    Raises:
        OptionError: as `resolve`.
    """
    # Needs ZeroMQ, which nothing needs before the router is chosen.
    from vllm_calrouter import keys, transport

    transport.check_address(options.telemetry, launch.engines)
    if options.telemetry != transport.OFF and launch.is_part:
        check_reach(launch, options.telemetry, transport.host_of(options.telemetry))
    folder = options.telemetry_keys
    if folder is None:
        return
    if options.telemetry == transport.OFF:
        raise OptionError(
            "--router-config.telemetry_keys has no effect with telemetry off: drop it"
        )
    keys.check_keys(folder, launch.sides)


def _check_telemetry_free(options: RouterOptions, launch: Launch) -> None:
    from vllm_calrouter import transport

    address = options.telemetry
    # This launch's own folder is new.
    if address in (transport.OFF, transport.IPC):
        return
    address = transport.located(address)
    transport.check_free(address, launch.ranks)
    if transport.is_open_to_strangers(address, options.telemetry_keys):
        logger.warning(
            "whoever reaches %s can read how loaded the engines are: add "
            "--router-config.telemetry_keys FOLDER",
            address,
        )


def check_config(
    config: VllmConfig, options: RouterOptions, *, headless: bool = False
) -> None:
    """Check what only the finished configuration tells (model, connector, limits).

    Args:
        headless: whether the launch has engines only.

    Raises:
        OptionError: as `resolve`.
    """
    parallel = config.parallel_config
    engines = parallel.data_parallel_size
    _check_engines(engines, options.prefill)
    first = parallel.data_parallel_rank
    ranks = range(first, first + parallel.data_parallel_size_local)
    address = parallel.data_parallel_master_ip
    check_telemetry(options, Launch(engines, ranks, headless, address))
    if not options.prefill:
        return
    _check_model(config)
    _check_connector(config)
    _check_role_limits(config, options)


def _check_model(config: VllmConfig) -> None:
    if config.model_config.is_moe:
        raise OptionError(
            f"{config.model_config.model} is a mixture of experts, whose ranks step "
            "together, so prefill and decode would hold each other up: "
            "write --router-config.prefill 0"
        )
    if config.model_config.runner_type == "pooling":
        raise OptionError(
            f"{config.model_config.model} is served for pooling and never decodes: "
            "write --router-config.prefill 0"
        )


def _check_connector(config: VllmConfig) -> None:
    transfer = config.kv_transfer_config
    name = transfer.kv_connector if transfer else None
    if name not in _NIXL_CONNECTORS:
        found = f"the connector is {name}" if name else "no KV connector is configured"
        raise OptionError(
            f"separate prefill engines hand KV caches over with NIXL, but {found}: "
            'add --kv-transfer-config \'{"kv_connector":"NixlConnector",'
            '"kv_role":"kv_both"}\' or write --router-config.prefill 0'
        )
    module = transfer.kv_connector_module_path
    if module not in (None, CONNECTOR_MODULE):
        raise OptionError(
            f"the router has to bring its own NIXL connector and would replace that of "
            f"{module}: drop kv_connector_module_path"
        )
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        raise OptionError(
            "bidirectional_kv_xfer pins KV caches on decode engines that the router "
            "does not read back: drop it from kv_connector_extra_config"
        )


def _check_role_limits(config: VllmConfig, options: RouterOptions) -> None:
    scheduler = config.scheduler_config
    for role in ("prefill", "decode"):
        for name, value in options.role_limits(prefill=role == "prefill").items():
            flag = f"--{name.replace('_', '-')}"
            most = getattr(scheduler, name)
            if value > most:
                raise OptionError(
                    f"--router-config.{role}_{name} {value} is more than the engines "
                    f"are built for ({most}): add {flag} {value}"
                )
    whole_prompts = not scheduler.enable_chunked_prefill
    least = config.model_config.max_model_len
    for role in ("prefill", "decode"):
        # Decode engines run whole prompts, too: of requests that cannot be split.
        budget = getattr(options, f"{role}_max_num_batched_tokens")
        if whole_prompts and budget is not None and budget < least:
            raise OptionError(
                f"without chunked prefill a step must hold a whole prompt: write "
                f"--router-config.{role}_max_num_batched_tokens {least} or more"
            )
