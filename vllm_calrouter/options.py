"""The router's options: what may be written, what it means, what is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import fields

PLUGIN_NAME = "calrouter"

#: Key under which the resolved options travel in vLLM's `additional_config`,
#: the one dictionary that reaches every API server and every engine.
CONFIG_KEY = "calrouter"

POLICIES = (
    "vllm",
    "round_robin",
    "least_loaded",
    "power_of_two",
    "length_threshold",
    "calibrated",
    "deadline",
    "paper",
)

#: Those that price placements in seconds.
PRICING_POLICIES = ("calibrated", "deadline", "paper")

#: vLLM's own order of what waits: nothing is hooked.
FCFS = "fcfs"

#: What engines that compute prompts may serve by, and engines that only decode.
ORDERS = (FCFS, "short_first", "deadline")
DECODE_ORDERS = (FCFS, "deadline")

PREDICTORS = ("hint", "constant", "max_tokens", "online", "oracle", "noisy")

_Count = Annotated[int, Meta(ge=1)]
_Weight = Annotated[float, Meta(ge=0, le=1_000)]
#: Milliseconds, at most a day.
_Target = Annotated[float, Meta(gt=0, le=86_400_000)]


class OptionError(ValueError):
    """A launch that cannot work as written.

    The message is one line: what is wrong, and what to write instead.
    """


class SloClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency targets that requests of one class share; None: no target."""

    ttft_ms: _Target | None = None
    tpot_ms: _Target | None = None


class ModelDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is assumed of requests for one served model that do not say."""

    slo: str | None = None
    output_tokens: _Count | None = None


class RouterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything `--router-config` accepts.

    Fields with `_tokens` or `_seqs` count tokens or sequences; shares are fractions.
    """

    policy: str = "calibrated"
    profile: str | None = None
    calibration: bool | None = None
    slot_weight: _Weight = 1.0
    kv_weight: _Weight = 1.0
    slo_weight: _Weight = 1.0
    prefix_aware: bool = True
    prefill: Annotated[int, Meta(ge=0)] = 0
    warm_up: bool = True
    first_token: bool = True
    order: str = "deadline"
    decode_order: str = FCFS
    patience: Annotated[float, Meta(ge=0, le=1e6)] | None = 2.0
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    nixl_sleep_ms: Annotated[int, Meta(ge=0, le=1000)] | None = None
    journal: str | None = None
    telemetry: str = "ipc"
    telemetry_keys: str | None = None
    prefill_max_num_seqs: _Count | None = None
    prefill_max_num_batched_tokens: _Count | None = None
    decode_max_num_seqs: _Count | None = None
    decode_max_num_batched_tokens: _Count | None = None
    admission: Annotated[float, Meta(gt=0, le=1000)] | None = None
    slo_classes: dict[str, SloClass] = {}
    default_slo: str | None = None
    defaults: dict[str, ModelDefaults] = {}
    predictor: str = "hint"
    output_tokens: _Count = 256
    online_memory: Annotated[int, Meta(ge=10)] = 500
    online_keys: Annotated[int, Meta(ge=10)] = 1000
    noise: Annotated[float, Meta(ge=0, le=10)] = 0.5
    noise_seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    length_threshold_tokens: _Count = 512
    long_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0

    @property
    def prices(self) -> bool:
        """Whether anything asks what work costs."""
        return self.listens or {self.order, self.decode_order} != {FCFS}

    @property
    def calibrates(self) -> bool:
        """Whether costs follow the engines' steps: if not said, where no profile is."""
        return self.profile is None if self.calibration is None else self.calibration

    def role_limits(self, *, prefill: bool) -> dict[str, int]:
        """Scheduler limits written for one role, by vLLM's name for each."""
        role = "prefill" if prefill else "decode"
        limits = {
            name: getattr(self, f"{role}_{name}")
            for name in ("max_num_seqs", "max_num_batched_tokens")
        }
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def listens(self) -> bool:
        """Whether a router acts on what engines tell of themselves."""
        return self.policy in PRICING_POLICIES or self.admission is not None

    def role_of(self, rank: int) -> Literal["prefill", "decode", "both"]:
        """What the engine of a rank does."""
        if not self.prefill:
            return "both"
        return "prefill" if rank < self.prefill else "decode"

    def order_of(self, role: Literal["prefill", "decode", "both"]) -> str:
        """In which order the engines of a role serve what waits."""
        return self.decode_order if role == "decode" else self.order


HELP = {
    "policy": f"How an engine is chosen: {', '.join(POLICIES)}.",
    "profile": "calibrated, deadline, paper, admission, and every order but fcfs: what "
    "work costs on these engines; the name of a shipped profile or a file. Without it "
    "an A40's figures stand in; orders correct them by what engines' own steps take.",
    "calibration": "calibrated, deadline, paper, admission: on or off: fit what work "
    "costs to the steps that engines report, beginning with the profile. Off: only "
    "tell when it is wrong. On where no profile is written, unless said otherwise.",
    "slot_weight": "calibrated, deadline: how much the use of an engine's slots "
    "counts in its price; 0: not at all (docs/pricing.md).",
    "kv_weight": "calibrated, deadline, paper: the same of its KV cache after "
    "admission.",
    "slo_weight": "calibrated, deadline, paper: the same of a target that would be "
    "missed.",
    "prefix_aware": "calibrated, deadline, paper: on or off: expect an engine to have "
    "cached the prompts that this router sent there, and price only what it has to "
    "compute.",
    "prefill": "Engines (the first ranks) that only run prefill; the others decode. "
    "0: every engine does both.",
    "warm_up": "Move one KV cache over every prefill-decode pair before the server "
    "reports healthy.",
    "first_token": "on or off: send a request's first token straight from its prefill "
    "engine, where that is exact. Off: every token comes from the decode engine.",
    "order": "In which order an engine that computes prompts serves those that wait: "
    f"{', '.join(ORDERS)}.",
    "decode_order": "The same for engines that only decode: "
    f"{', '.join(DECODE_ORDERS)}.",
    "patience": "The order deadline: prompts that came later may go ahead of a request "
    "for so many times the seconds its own prompt takes. More: more requests in time, "
    "and a longer tail; null: no bound.",
    "kv_load_failure": "recompute or fail: what a decode engine does with a request "
    "whose KV cache it could not read (vLLM's kv_load_failure_policy).",
    "nixl_sleep_ms": "Milliseconds that NIXL's progress thread may sleep while nothing "
    "moves; 0: it never sleeps, as NIXL has it, and takes a core for each engine. Not "
    "given: 1 where engines run on the CPU, 0 elsewhere.",
    "journal": "File that gets one JSON line a request: pair, candidates, times.",
    "telemetry": "Where engines tell routers what they hold: ipc (a private folder), "
    "ipc:///FOLDER, tcp://HOST:PORT (rank N on port PORT + N), tcp://*:PORT (the same "
    "on each engine's own host, for several), or off.",
    "telemetry_keys": "Folder of CURVE keys that close telemetry to strangers; "
    "python -m vllm_calrouter.keys FOLDER makes them.",
    "prefill_max_num_seqs": "max_num_seqs of the prefill engines.",
    "prefill_max_num_batched_tokens": "max_num_batched_tokens of the prefill engines.",
    "decode_max_num_seqs": "max_num_seqs of the decode engines.",
    "decode_max_num_batched_tokens": "max_num_batched_tokens of the decode engines.",
    "admission": "Answer 429 with Retry-After to a request that would wait longer than "
    "so many times its TTFT target before an engine begins with it. Not given: all are "
    "let in.",
    "slo_classes": "Latency targets by class, which vllm_xargs.slo names: "
    '{"tight": {"ttft_ms": 175, "tpot_ms": 40}}. Without it those of the profile, '
    "where one is written.",
    "default_slo": "Class of requests that name none and state no targets.",
    "defaults": "By served model or adapter, what its requests have unless they say "
    'otherwise: {"MODEL": {"slo": "tight", "output_tokens": 100}}.',
    "predictor": "How an output's length is predicted where its client gives none: "
    f"{', '.join(PREDICTORS)}.",
    "output_tokens": "Output length assumed where nothing better is known.",
    "online_memory": "online: finished requests of a kind after which an older one "
    "weighs 1/e.",
    "online_keys": "online: kinds of requests remembered; the least recent go.",
    "noise": "noisy: standard deviation of the error, relative to the true length.",
    "noise_seed": "noisy: seed of the errors.",
    "length_threshold_tokens": "length_threshold: a longer predicted output is long.",
    "long_share": "length_threshold: share of the decode engines kept for long ones.",
    "seed": "power_of_two: seed of the draws.",
}


def parse_json(text: str) -> dict[str, Any]:
    """Read the value of `--router-config`; raises OptionError when it is no object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"--router-config is not JSON ({error.msg} at character {error.pos}): "
            "write --router-config '{\"prefill\": 2}' or --router-config.prefill 2"
        ) from None
    if not isinstance(value, dict):
        raise OptionError(
            f"--router-config must be a JSON object, got {type(value).__name__}: "
            "write --router-config '{\"prefill\": 2}' or --router-config.prefill 2"
        )
    return value


def parse(config: Mapping[str, Any]) -> RouterOptions:
    """Check a configuration; raises OptionError naming the key and what to write."""
    if not isinstance(config, Mapping):
        raise OptionError(f"the router's options must be an object, not {config!r}")
    for key in config:
        if key not in HELP:
            raise OptionError(_unknown_key(key))
    try:
        options = msgspec.convert(_switches(config), RouterOptions)
    except msgspec.ValidationError as error:
        raise OptionError(_bad_value(config, error)) from None
    if options.policy not in POLICIES:
        raise OptionError(
            f"unknown routing policy {options.policy!r}: "
            f"write --router-policy with one of {', '.join(POLICIES)}"
        )
    if options.predictor not in PREDICTORS:
        raise OptionError(
            f"unknown predictor {options.predictor!r}: "
            f"write --router-config.predictor with one of {', '.join(PREDICTORS)}"
        )
    _check_order("order", options.order, ORDERS)
    _check_order("decode_order", options.decode_order, DECODE_ORDERS)
    if options.slo_classes or options.profile is None:
        # A profile's own classes are known where it can be read.
        check_slo_names(options, options.slo_classes)
    return options


def _check_order(key: str, order: str, known: tuple[str, ...]) -> None:
    if order not in known:
        raise OptionError(
            f"unknown order {order!r}: write --router-config.{key} with one of "
            f"{', '.join(known)}"
        )


def check_slo_names(options: RouterOptions, classes: Collection[str]) -> None:
    """Raises OptionError for a default of a class that is not there."""
    named = {"default_slo": options.default_slo}
    named |= {f"defaults.{model}": one.slo for model, one in options.defaults.items()}
    for key, name in named.items():
        if name is not None and name not in classes:
            known = ", ".join(map(repr, classes)) or "none"
            raise OptionError(
                f"the SLO class {name!r} that --router-config {key!r} names is not in "
                f"slo_classes ({known}): add it there, or name another"
            )


def to_config(options: RouterOptions) -> dict[str, Any]:
    """The plain dictionary that travels to every process; `parse` reads it back."""
    config: dict[str, Any] = msgspec.to_builtins(options)
    return config


def _switches(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with on and off read as true and false, where those are asked for."""
    read = {"on": True, "off": False}
    switches = [
        field.name
        for field in fields(RouterOptions)
        if field.type in (bool, bool | None)
    ]
    return {
        key: read.get(value, value)
        if key in switches and isinstance(value, str)
        else value
        for key, value in config.items()
    }


def _unknown_key(key: str) -> str:
    close = difflib.get_close_matches(key, HELP, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(HELP)}"
    return f"unknown key {key!r} in --router-config: {advice}"


def _bad_value(config: Mapping[str, Any], error: msgspec.ValidationError) -> str:
    # msgspec ends its message with the place of the fault, "... - at `$.prefill`".
    reason, _, place = str(error).partition(" - at `$.")
    # Of a dictionary's entry the place is "slo_classes[...].ttft_ms".
    key = place.rstrip("`").partition("[")[0]
    return (
        f"--router-config.{key} {json.dumps(config.get(key))} is wrong "
        f"({reason[0].lower()}{reason[1:]}): {HELP.get(key, '')}"
    )
