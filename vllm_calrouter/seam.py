"""Where the plugin meets vLLM: every function of vLLM's that it wraps, and the check
that what it leans on is there.

Wrapped here:

===============================================  =====================================
`EngineArgs.add_cli_args`                        adds the option group. vLLM has no
                                                 hook for a plugin's options.
`EngineArgs.create_engine_config`                checks the launch, puts the scheduler
                                                 and connector classes in place.
`EngineCoreClient.make_async_mp_client`          returns the router's client. vLLM
                                                 chooses the class in this one place.
`vllm.plugins.load_endpoint_plugins`             adds the router's pages, which vLLM
                                                 loads only if VLLM_PLUGINS names them.
`to_sampling_params` of the OpenAI requests,     tell the router what the body says; a
`to_beam_search_params`                          bad wish is HTTP 400, streaming or not.
                                                 vLLM hands the client a request without
                                                 its body.
`InputProcessor.process_inputs`                  the same check for all other routes,
                                                 before the request is registered.
===============================================  =====================================

Extended elsewhere, by subclass, with the names each subclass uses listed in `NEEDS`:
`router/client.py` (the data-parallel client), `engine/observer.py` and
`engine/ordered.py` (the scheduler), `ordering/queue.py` (its waiting queue) and
`engine/connector.py` (NIXL). A hook of vLLM's own for any of these lets the
matching row go. `engine/nixl_sleep.py` replaces the class by which NIXL's Python API
configures an agent, which has no option for what it changes.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_calrouter import launch
from vllm_calrouter import options as opt
from vllm_calrouter.options import CONFIG_KEY, OptionError, RouterOptions

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

TRIED_VERSIONS = ("0.32.0", "0.33.0")

#: module, class, and the attributes of it that the plugin calls or overrides.
NEEDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.engine.core_client",
        "DPLBAsyncMPClient",
        (
            "add_request_async",
            "abort_requests_async",
            "process_engine_outputs",
            "get_supported_tasks_async",
            "call_utility_all_async",
            "ensure_alive",
            "get_core_engine_for_request",
        ),
    ),
    ("vllm.v1.engine.core_client", "EngineCoreClient", ("make_async_mp_client",)),
    ("vllm.v1.engine.core", "EngineCore", ("abort_requests",)),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        (
            "schedule",
            "update_from_output",
            "add_request",
            "finish_requests",
            "set_pause_state",
            "pause_state",
            "get_request_counts",
            "shutdown",
        ),
    ),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", ("schedule",)),
    ("vllm.v1.request", "RequestStatus", ("PREEMPTED", "WAITING_FOR_REMOTE_KVS")),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        ("get_blocks", "get_computed_blocks"),
    ),
    (
        "vllm.v1.core.sched.request_queue",
        "RequestQueue",
        (
            "add_request",
            "pop_request",
            "peek_request",
            "prepend_request",
            "prepend_requests",
            "remove_request",
            "remove_requests",
        ),
    ),
    ("vllm.v1.core.sched.request_queue", "FCFSRequestQueue", ()),
    ("vllm.v1.core.sched.request_queue", "PriorityRequestQueue", ()),
    ("vllm.v1.core.sched.request_queue", "", ("create_request_queue",)),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
        "NixlPullConnector",
        ("request_finished_all_groups", "get_num_new_matched_tokens"),
    ),
    (
        "vllm.v1.engine",
        "EngineCoreRequest",
        ("abort_immediately", "data_parallel_rank", "external_req_id", "resumable"),
    ),
    (
        "vllm.v1.engine",
        "EngineCoreOutput",
        ("kv_transfer_params", "prefill_stats", "finish_reason"),
    ),
    ("vllm.v1.engine", "EngineCoreOutputs", ("engine_index", "timestamp")),
    ("vllm.v1.engine", "EngineCoreEvent", ("timestamp",)),
    ("vllm.utils.network_utils", "", ("get_ip",)),
    (
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer",
        ("from_new_request", "update"),
    ),
    (
        "vllm.sampling_params",
        "SamplingParams",
        ("_bad_words_token_ids", "thinking_token_budget", "repetition_detection"),
    ),
    ("vllm.tokenizers", "", ("cached_tokenizer_from_config",)),
    ("vllm.plugins", "", ("load_endpoint_plugins",)),
    ("vllm.v1.engine.input_processor", "InputProcessor", ("process_inputs",)),
    ("vllm.exceptions", "VLLMValidationError", ()),
    (
        "vllm.entrypoints.serve.middleware.authenticate",
        "AuthenticationMiddleware",
        ("verify_token",),
    ),
)

#: The requests whose bodies carry wishes: module, class.
_BODIES = (
    ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
)
NEEDS += tuple((*body, ("to_sampling_params", "model_extra")) for body in _BODIES)

_SCHEDULER = "vllm_calrouter.engine.scheduler.build_scheduler"


def extend_engine_args() -> None:
    """Wrap `EngineArgs` once, so that launches can choose and configure the router."""
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "add_cli_args", _with_router_group, static=True)
    _wrap(EngineArgs, "create_engine_config", _with_router)


def missing_needs() -> list[str]:
    """Names in `NEEDS` that the installed vLLM lacks; empty when all is well."""
    missing = []
    for module_name, class_name, attributes in NEEDS:
        where = f"{module_name}.{class_name}".rstrip(".")
        try:
            owner = importlib.import_module(module_name)
            owner = getattr(owner, class_name) if class_name else owner
        except (ImportError, AttributeError):
            missing.append(where)
            continue
        missing += [f"{where}.{a}" for a in attributes if not hasattr(owner, a)]
    return missing


def router_options(config: VllmConfig) -> RouterOptions | None:
    """The options that a configuration carries, or None when the router is off."""
    extra = config.additional_config
    if not isinstance(extra, dict) or CONFIG_KEY not in extra:
        return None
    return opt.parse(extra[CONFIG_KEY])


def add_engine_utility(name: str, function: Callable[[Any], Any]) -> None:
    """Let API servers call `function(engine_core)` by name in an engine process.

    vLLM looks utilities up on `EngineCore` and has no registry for them.
    """
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, function)


def _wrap(
    owner: Any, name: str, around: Callable[..., Any], *, static: bool = False
) -> None:
    original = getattr(owner, name)
    if hasattr(original, "_calrouter_wrapped"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper._calrouter_wrapped = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)


def _with_router_group(
    original: Callable[..., Any], parser: FlexibleArgumentParser
) -> FlexibleArgumentParser:
    parser = original(parser)
    group = parser.add_argument_group(
        title="RouterConfig",
        description="Routing of requests to engines (vllm-calrouter).",
    )
    group.add_argument(
        "--router-plugin",
        metavar="NAME",
        help=f"The router to use: {opt.PLUGIN_NAME}. Without it vLLM chooses engines.",
    )
    group.add_argument(
        "--router-policy",
        metavar="NAME",
        help=f"{opt.HELP['policy']} Short for --router-config.policy.",
    )
    keys = "\n".join(f"- {key}: {text}" for key, text in opt.HELP.items())
    group.add_argument(
        "--router-config",
        type=_json_option,
        metavar="JSON",
        help=f"The router's options, as JSON or as --router-config.KEY VALUE:\n{keys}",
    )
    _check_after_parsing(parser)
    return parser


def _json_option(text: str) -> dict[str, Any]:
    from argparse import ArgumentTypeError

    try:
        return opt.parse_json(text)
    except OptionError as error:
        # argparse prints only this type's message; others lose theirs.
        raise ArgumentTypeError(str(error)) from None


def _check_after_parsing(parser: FlexibleArgumentParser) -> None:
    """Check a command line as soon as it is parsed, before anything is built.

    Every launch mode parses the same arguments but takes its own way afterwards,
    some past `create_engine_config`: this is the one point they share.
    """
    original = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[Namespace, list[str]]:
        namespace, rest = original(*args, **kwargs)
        try:
            _carry_options(namespace, launch.resolve(namespace, os.environ))
        except OptionError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_known_args


def _carry_options(args: Namespace, options: RouterOptions | None) -> None:
    """Put the options where every API server and engine finds them."""
    if options is None:
        return
    _make_socket_folder(options)
    extra = dict(args.additional_config or {})
    extra[CONFIG_KEY] = opt.to_config(options)
    args.additional_config = extra


def _make_socket_folder(options: RouterOptions) -> None:
    from vllm import envs

    from vllm_calrouter import transport

    if options.telemetry == transport.IPC:
        transport.make_folder(envs.VLLM_RPC_BASE_PATH)


def _with_router(
    original: Callable[..., VllmConfig], engine_args: Any, *args: Any, **kwargs: Any
) -> VllmConfig:
    config = original(engine_args, *args, **kwargs)
    try:
        options = router_options(config)
        if options is not None:
            _activate(config, options, headless=kwargs.get("headless", False))
    except OptionError as error:
        # The launcher has no handler of its own here: end with the one line.
        raise SystemExit(f"vllm serve: error: {error}") from None
    return config


def _activate(config: VllmConfig, options: RouterOptions, *, headless: bool) -> None:
    from vllm_calrouter import transport

    _check_vllm()
    launch.check_config(config, options, headless=headless)
    if not transport.has_folder():
        # No command line was parsed for this launch.
        _make_socket_folder(options)
    if options.prefill:
        # vLLM compares the connector's name in several places, so the name stays
        # and the module changes.
        config.kv_transfer_config.kv_connector = "NixlConnector"
        config.kv_transfer_config.kv_connector_module_path = launch.CONNECTOR_MODULE
        config.kv_transfer_config.kv_load_failure_policy = options.kv_load_failure
    tells = options.telemetry != transport.OFF
    orders = not options.order == options.decode_order == opt.FCFS
    _install_scheduler(config, extends=tells or orders)
    _install_client()
    _install_endpoints()
    _install_wishes(options)


def _check_vllm() -> None:
    import vllm

    if missing := missing_needs():
        raise OptionError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}, which the router "
            f"extends: install vLLM {' or '.join(TRIED_VERSIONS)}"
        )


def _install_scheduler(config: VllmConfig, *, extends: bool) -> None:
    chosen = config.scheduler_config.scheduler_cls
    if chosen == _SCHEDULER:
        return
    if chosen is not None and extends:
        _check_extensible(config.scheduler_config.get_scheduler_cls())
    if chosen is not None and not isinstance(chosen, str):
        chosen = f"{chosen.__module__}.{chosen.__qualname__}"
    config.additional_config[CONFIG_KEY + "_scheduler"] = chosen
    config.scheduler_config.scheduler_cls = _SCHEDULER


def _check_extensible(scheduler: type) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if not issubclass(scheduler, Scheduler):
        raise OptionError(
            f"{scheduler.__name__} does not derive from vLLM's Scheduler, so that "
            "engines can neither tell what they hold nor order it: drop "
            "--scheduler-cls, or write --router-config.telemetry off and "
            f"--router-config.order {opt.FCFS}"
        )


def _install_client() -> None:
    from vllm.v1.engine.core_client import EngineCoreClient

    def make(
        original: Callable[..., Any], vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> Any:
        options = router_options(vllm_config)
        if options is None:
            return original(vllm_config, *args, **kwargs)
        from vllm_calrouter.router.client import RouterClient

        return RouterClient(vllm_config, *args, **kwargs)

    _wrap(EngineCoreClient, "make_async_mp_client", make, static=True)


def _install_endpoints() -> None:
    from vllm import plugins

    def load(original: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> Any:
        from vllm_calrouter.router.endpoints import RouterEndpoints

        return [*original(*args, **kwargs), RouterEndpoints()]

    _wrap(plugins, "load_endpoint_plugins", load)


def _install_wishes(options: RouterOptions) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_calrouter.router import intake

    intake.activate(options)
    for module_name, class_name in _BODIES:
        body = getattr(importlib.import_module(module_name), class_name)
        _wrap(body, "to_sampling_params", intake.told_by_body)
        if hasattr(body, "to_beam_search_params"):
            _wrap(body, "to_beam_search_params", intake.told_by_beam_search)
    _wrap(InputProcessor, "process_inputs", intake.checked)
