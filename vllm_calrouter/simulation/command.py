"""`calrouter simulate`: options in, a table or JSON out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from vllm_calrouter.calibration import (
    EngineCosts,
    Profile,
    ProfileError,
    SloClass,
    load,
    shipped,
)
from vllm_calrouter.options import POLICIES, OptionError, RouterOptions, parse
from vllm_calrouter.workloads import (
    FAMILIES,
    Arrival,
    Replay,
    WorkloadError,
    generate,
    replay,
    with_hints,
)

if TYPE_CHECKING:
    from vllm_calrouter.simulation.results import Served

_FAMILY_HELP = "\n".join(
    f"  {name:<10} {family.about}; {family.rate:g} req/s"
    for name, family in FAMILIES.items()
)

_HELP = f"""Run a workload through the router on a cluster in virtual time.

Each engine is vLLM's own scheduler and KV-cache manager without a model; how long a
step takes is the profile's word. The router is the one that runs in the API server. It
needs no GPU and runs much faster than real time. The same options give the same result,
bit for bit.

\b
Workloads (--workload), with the rates at which the shipped profile's 2 + 4 engines
come under pressure:
{_FAMILY_HELP}

Or replay a recorded trace (--trace FILE): CSV, gzipped or not, with the columns
arrival_s, input_tokens, output_tokens and, for shared prefixes, hash_ids.

Goodput is the share of requests whose first token came within the TTFT target of their
SLO class and whose other tokens came within its TPOT target on average.

\b
Examples:
  calrouter simulate --workload mixed --policy least_loaded --prefill 2 --decode 4
  calrouter simulate --workload chat --policy round_robin --policy least_loaded \\
      --seed 1 --seed 2 --seed 3
  calrouter simulate --trace azure.csv.gz --start 600 --duration 300 --rate 10

Several --policy or --seed compare: every policy sees the same requests of each seed,
and differences are taken seed by seed against the first policy.
"""


class _Wrong(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"calrouter simulate: error: {self.message}", err=True)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run depends on but policy and seed, as written."""

    workload: str | None
    trace: Path | None
    start: float
    duration: float | None
    rate: float | None
    burst_factor: float | None
    spread: float
    hash_block_tokens: int
    skip_too_long: bool
    slo_mix: str | None
    slo_targets: bool
    length_hints: bool
    length_error: float
    profile: str
    router_profile: str | None
    slo: tuple[str, ...]
    prefill: int
    decode: int
    speed: tuple[str, ...]
    kv_tokens: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    prefix_caching: bool
    router_config: tuple[str, ...]
    routers: int
    report_ms: float
    state_age_ms: float


_PLURAL = " May be given several times, to compare."


@click.command(help=_HELP)
@click.option("--workload", metavar="NAME", help=f"One of {', '.join(FAMILIES)}.")
@click.option("--trace", type=click.Path(path_type=Path), help="Replay this file.")
@click.option(
    "--start", type=float, default=0.0, help="Trace: begin at this second of it."
)
@click.option(
    "--duration",
    type=float,
    help="Seconds of arrivals; 90 for a workload, all of a trace. Of a trace, in its "
    "own time.",
)
@click.option(
    "--rate",
    type=float,
    help="Mean requests a second; the workload's own, or as recorded, without it.",
)
@click.option(
    "--burst-factor",
    type=float,
    help="Workload: how many times the calm rate arrives in a burst; 1 for a Poisson "
    "process.",
)
@click.option(
    "--spread",
    type=float,
    default=0.0,
    help="Trace: move each request later by a random part of so many seconds, for "
    "coarse stamps.",
)
@click.option(
    "--hash-block-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Trace: tokens a name in hash_ids stands for.",
)
@click.option(
    "--skip-too-long",
    is_flag=True,
    help="Trace: leave out requests longer than --max-model-len.",
)
@click.option(
    "--slo-mix",
    metavar="CLASS=WEIGHT,...",
    help="Classes of the profile by weight; tight=1,loose=1 without it.",
)
@click.option(
    "--slo-targets/--no-slo-targets",
    default=True,
    show_default=True,
    help="Whether clients state the targets of their class.",
)
@click.option(
    "--length-hints/--no-length-hints",
    default=True,
    show_default=True,
    help="Whether clients say how long their outputs will be.",
)
@click.option(
    "--length-error",
    type=float,
    default=0.0,
    show_default=True,
    help="Relative error of these hints (0.5: half, as a standard deviation).",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("least_loaded",),
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(POLICIES)}.{_PLURAL}",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    type=click.IntRange(0, 2**31 - 1),
    default=(1,),
    show_default=True,
    help="Of workload and policy." + _PLURAL,
)
@click.option(
    "--prefill",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Engines that only prefill; 0: every engine does both.",
)
@click.option(
    "--decode",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Engines that decode.",
)
@click.option(
    "--profile",
    default="a40-qwen2.5-3b",
    show_default=True,
    metavar="NAME|FILE",
    help=f"What the engines are: {', '.join(shipped())}, or a file.",
)
@click.option(
    "--router-profile",
    metavar="NAME|FILE",
    help="What the router takes the engines for, where that is wrong; without it what "
    "they are. It prices with this profile and orders by it; --speed does not apply.",
)
@click.option(
    "--slo",
    multiple=True,
    metavar="CLASS=TTFT_MS/TPOT_MS",
    help="Promise a class of the profile these targets instead, the same for prompts "
    "of any length. Several times.",
)
@click.option(
    "--speed",
    multiple=True,
    metavar="RANK=FACTOR",
    help="An engine that is faster or slower than the profile's. Several times.",
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(16),
    help="KV cache of an engine in tokens; the profile's without it.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="As of vllm serve.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="As of vllm serve.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    default=32768,
    show_default=True,
    help="As of vllm serve.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="As of vllm serve.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="As of vllm serve.",
)
@click.option(
    "--router-config",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any option of the router, as of vllm serve. Several times.",
)
@click.option(
    "--routers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="API servers, each with a router; requests go to them in turn.",
)
@click.option(
    "--report-ms",
    type=click.FloatRange(1, 60_000),
    default=100.0,
    show_default=True,
    help="Time between two reports of what engines hold.",
)
@click.option(
    "--state-age-ms",
    type=click.FloatRange(0, 60_000),
    default=1.0,
    show_default=True,
    help="How late routers hear what engines tell them, for policies that price.",
)
@click.option(
    "--requests-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one JSON line a request here.",
)
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON, a line a run.")
def simulate(
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    requests_file: Path | None,
    as_json: bool,
    **written: Any,
) -> None:
    setup = Setup(**written)
    # Everything that can be wrong is looked at before vLLM is imported.
    try:
        profile = promised(setup, load(setup.profile))
        costs = engine_costs(setup, profile)
        believed = believed_costs(setup)
        options = {
            (policy, seed): router_options(setup, policy, seed)
            for policy in policies
            for seed in seeds
        }
        arrivals = {seed: make_arrivals(setup, profile, seed) for seed in seeds}
    except (ProfileError, OptionError, WorkloadError, ValueError) as error:
        raise _Wrong(str(error)) from None
    runs = []
    with _lines_to(requests_file) as write:
        for (_, seed), chosen in options.items():
            run = _run(
                setup, profile, costs, believed, chosen, arrivals[seed], seed, write
            )
            runs.append(run)
            if as_json:
                click.echo(json.dumps(run))
    if not as_json:
        from vllm_calrouter.simulation.tables import show

        show(runs)


def promised(setup: Setup, profile: Profile) -> Profile:
    """The profile with the targets that were written; raises ValueError."""
    slo = dict(profile.slo)
    for text in setup.slo:
        name, targets = _pair(text, "--slo", "tight=175/39.7")
        _check_class(setup, profile, name, "--slo")
        ttft_ms, sign, tpot_ms = targets.partition("/")
        if not sign:
            raise ValueError(f"--slo {text}: write --slo {name}=175/39.7")
        where = "--slo " + text
        slo[name] = SloClass(
            _number(ttft_ms, where) / 1e3, _number(tpot_ms, where) / 1e3
        )
    return msgspec.structs.replace(profile, slo=slo)


def engine_costs(setup: Setup, profile: Profile) -> list[EngineCosts]:
    """One engine's constants each, by rank; raises ValueError."""
    costs = _costs(setup, profile)
    for text in setup.speed:
        rank, factor = _pair(text, "--speed", "0=0.5")
        if not rank.isdecimal() or int(rank) >= len(costs):
            raise ValueError(f"--speed {text}: there is no engine {rank!r}")
        costs[int(rank)] = costs[int(rank)].faster(_number(factor, "--speed " + text))
    return costs


def believed_costs(setup: Setup) -> list[EngineCosts] | None:
    """What the router takes the engines for, by rank; None: for what they are.

    Raises ProfileError.
    """
    if setup.router_profile is None:
        return None
    return _costs(setup, load(setup.router_profile))


def _costs(setup: Setup, profile: Profile) -> list[EngineCosts]:
    engines = setup.prefill + setup.decode
    costs = [profile.costs_of(prefill=rank < setup.prefill) for rank in range(engines)]
    if setup.kv_tokens is None:
        return costs
    return [
        msgspec.structs.replace(one, kv_capacity_tokens=setup.kv_tokens)
        for one in costs
    ]


def router_options(setup: Setup, policy: str, seed: int) -> RouterOptions:
    """The router's options of one run; raises OptionError, ValueError."""
    config: dict[str, Any] = {"seed": seed}
    for text in setup.router_config:
        key, value = _pair(text, "--router-config", "output_tokens=128")
        try:
            config[key] = json.loads(value)
        except json.JSONDecodeError:
            config[key] = value
    for key, option in (("policy", "--policy"), ("prefill", "--prefill")):
        if key in config:
            raise ValueError(f"--router-config {key}=...: write {option}")
    return parse({**config, "policy": policy, "prefill": setup.prefill})


def make_arrivals(setup: Setup, profile: Profile, seed: int) -> list[Arrival]:
    """What arrives in a run; raises WorkloadError, ValueError."""
    if (setup.workload is None) == (setup.trace is None):
        raise ValueError(
            "say what arrives: --workload NAME or --trace FILE, one of both"
        )
    mix = _slo_mix(setup, profile)
    if setup.trace is None:
        assert setup.workload is not None
        arrivals = generate(
            setup.workload,
            rate=setup.rate,
            duration_s=90.0 if setup.duration is None else setup.duration,
            seed=seed,
            slo_mix=mix,
            burst_factor=setup.burst_factor,
        )
    else:
        how = Replay(
            start_s=setup.start,
            duration_s=setup.duration,
            rate=setup.rate,
            spread_s=setup.spread,
            prefix_block_tokens=setup.hash_block_tokens,
            skip_over_tokens=setup.max_model_len if setup.skip_too_long else None,
            slo_mix=mix,
            seed=seed,
        )
        arrivals = replay(setup.trace, how)
    _check_lengths(setup, arrivals)
    if not setup.length_hints:
        return arrivals
    return with_hints(arrivals, error=setup.length_error, seed=seed)


def _check_lengths(setup: Setup, arrivals: Sequence[Arrival]) -> None:
    for number, one in enumerate(arrivals):
        tokens = one.prompt_tokens + one.output_tokens
        if tokens > setup.max_model_len:
            advice = "raise --max-model-len"
            if setup.trace is not None:
                advice += " or add --skip-too-long"
            raise WorkloadError(
                f"request {number} has {one.prompt_tokens:,} + {one.output_tokens:,} "
                f"tokens, more than the model's {setup.max_model_len:,}: {advice}"
            )


def _slo_mix(setup: Setup, profile: Profile) -> Mapping[str, float]:
    mix = {"tight": 1.0, "loose": 1.0}
    if setup.slo_mix is not None:
        pairs = [_pair(t, "--slo-mix", "tight=1") for t in setup.slo_mix.split(",")]
        mix = {name: _number(weight, "--slo-mix") for name, weight in pairs}
    for name in mix:
        _check_class(setup, profile, name, "--slo-mix")
    return mix


def _check_class(setup: Setup, profile: Profile, name: str, option: str) -> None:
    if name not in profile.slo:
        raise ValueError(
            f"the profile {setup.profile} has no SLO class {name!r}: write "
            f"{option} with its own ({', '.join(profile.slo)})"
        )


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise ValueError(f"{option} {text!r}: write {option} {example}")
    return key.strip(), value.strip()


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is no number") from None


def _run(
    setup: Setup,
    profile: Profile,
    costs: Sequence[EngineCosts],
    believed: Sequence[EngineCosts] | None,
    options: RouterOptions,
    arrivals: Sequence[Arrival],
    seed: int,
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    _quiet_vllm()
    from vllm_calrouter.simulation.cluster import Cluster, Limits, SimulationError
    from vllm_calrouter.simulation.results import summary

    limits = Limits(
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        block_tokens=setup.block_size,
        prefix_caching=setup.prefix_caching,
    )
    try:
        cluster = Cluster(
            options,
            costs,
            profile.slo,
            believed=believed,
            limits=limits,
            routers=setup.routers,
            report_s=setup.report_ms / 1e3,
            message_age_s=setup.state_age_ms / 1e3,
            tells_slo=setup.slo_targets,
        )
        began = time.perf_counter()
        title = f"{options.policy}, seed {seed}"
        with _progress(title, len(arrivals)) as progress:
            served: list[Served] = cluster.run(arrivals, progress)
    except (SimulationError, ValueError) as error:
        raise _Wrong(" ".join(str(error).split())) from None
    wall_s = time.perf_counter() - began
    for one in served:
        write({"policy": options.policy, "seed": seed, **one.record()})
    return {
        "workload": setup.workload or str(setup.trace),
        "policy": options.policy,
        "seed": seed,
        "prefill": setup.prefill,
        "decode": setup.decode,
        "profile": setup.profile,
        "router_profile": setup.router_profile or setup.profile,
        **summary(served),
        "busy": [round(engine.busy_s / cluster.now_s, 4) for engine in cluster.engines],
        "virtual_s": cluster.now_s,
        "wall_s": wall_s,
    }


def _quiet_vllm() -> None:
    # Before the first import: what vLLM says of its platform is of no concern here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where there is somebody to look at it."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=title,
        unit="req",
        file=sys.stderr,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def progress(done: int) -> None:
            bar.update(done - bar.n)

        yield progress


@contextmanager
def _lines_to(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    if path is None:
        yield lambda record: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise _Wrong(f"--requests-file {path}: {error.strerror}") from None
    with file:

        def write(record: dict[str, Any]) -> None:
            file.write(msgspec.json.encode(record) + b"\n")

        yield write
