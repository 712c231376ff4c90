"""`calrouter simulate`: options in, a table or JSON out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from vllm_calrouter.calibration import (
    STAND_IN,
    EngineCosts,
    Profile,
    ProfileError,
    SloClass,
    load,
    shipped,
)
from vllm_calrouter.console import (
    Wrong,
    find_rate_option,
    json_option,
    number,
    pair,
    progress,
    seed_option,
)
from vllm_calrouter.launch import check_effect
from vllm_calrouter.options import POLICIES, OptionError, RouterOptions, parse
from vllm_calrouter.runs import Run, RunsError, RunsFolder, Write, code_version
from vllm_calrouter.workloads import Arrival, saturation
from vllm_calrouter.workloads.options import (
    HELP,
    Traffic,
    digest,
    make_arrivals,
    mean_rate,
    traffic_options,
)

if TYPE_CHECKING:
    from vllm_calrouter.simulation.cluster import Cluster
    from vllm_calrouter.simulation.results import Served

_HELP = f"""Run a workload through the router on a cluster in virtual time.

Each engine is vLLM's own scheduler and KV-cache manager without a model; how long a
step takes is the profile's word. The router is the one that runs in the API server. It
needs no GPU and runs much faster than real time. The same options give the same result,
bit for bit.

{HELP}

\b
Examples:
  calrouter simulate --workload mixed --policy least_loaded --prefill 2 --decode 4
  calrouter simulate --workload chat --policy round_robin --policy least_loaded \\
      --seed 1 --seed 2 --seed 3 --output chat
  calrouter report chat
  calrouter simulate --trace azure.csv.gz --start 600 --duration 300 --rate 10
  calrouter simulate --workload mixed --policy round_robin --policy calibrated \\
      --find-rate 0.7

Several --policy or --seed compare: every policy sees the same requests of each seed,
and differences are taken seed by seed against the first policy.
"""

#: Options of the router's that nothing in virtual time acts on, and what to do instead.
_WITHOUT_EFFECT = {
    "warm_up": "nothing is cold in virtual time: drop it",
    "kv_load_failure": "no transfer fails in virtual time: drop it",
    "nixl_sleep_ms": "nothing moves through NIXL in virtual time: drop it",
    "journal": "write --requests-file or --output",
    "telemetry": "engines tell routers without sockets: drop it",
    "telemetry_keys": "engines tell routers without sockets: drop it",
    "calibration": "steps take exactly what the profile says: drop it",
    "profile": "write --profile",
    "defaults": "requests name no model: drop it",
}

#: Options of the router's that a simulation has under another name.
_OWN = {"policy": "--policy", "prefill": "--prefill", "seed": "--seed"}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that a run depends on, as written."""

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

    def describe(self) -> str:
        """In words, all that tells its engines from others."""
        parts = [f"{self.prefill} + {self.decode} engines", self.profile]
        parts += [f"rank {text.replace('=', ' at speed ')}" for text in self.speed]
        if self.kv_tokens is not None:
            parts.append(f"{self.kv_tokens:,} KV tokens")
        if self.max_num_seqs != 64:
            parts.append(f"{self.max_num_seqs} slots")
        if self.max_num_batched_tokens != 2048:
            parts.append(f"{self.max_num_batched_tokens} tokens a step")
        if self.max_model_len != 32_768:
            parts.append(f"model of {self.max_model_len:,} tokens")
        if self.block_size != 16:
            parts.append(f"blocks of {self.block_size}")
        if not self.prefix_caching:
            parts.append("no prefix caching")
        if self.routers != 1:
            parts.append(f"{self.routers} routers")
        if self.report_ms != 100:
            parts.append(f"reports every {self.report_ms:g} ms")
        if self.state_age_ms != 1:
            parts.append(f"state {self.state_age_ms:g} ms old")
        if self.router_profile is not None:
            parts.append(f"taken for {self.router_profile}")
        parts += [f"targets {text}" for text in self.slo]
        return ", ".join(parts)


class _Job(NamedTuple):
    """One run to be made."""

    options: RouterOptions
    arrivals: Sequence[Arrival]
    traffic: Traffic
    seed: int


@click.command(help=_HELP)
@traffic_options
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=(RouterOptions().policy,),
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(POLICIES)}. May be given several times, to compare.",
)
@seed_option("workload and policy")
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
    default=STAND_IN,
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
@find_rate_option("policy")
@click.option(
    "--requests-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one JSON line a request here.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep runs in this folder, for calrouter report; a run that is in it is not "
    "made again.",
)
@json_option("run")
def simulate(
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    find_rate: float | None,
    requests_file: Path | None,
    output: Path | None,
    as_json: bool,
    **written: Any,
) -> None:
    traffic = Traffic(**{name: written.pop(name) for name in Traffic.__struct_fields__})
    setup = Setup(**written)
    # Everything that can be wrong is looked at before vLLM is imported.
    try:
        if requests_file and output:
            raise ValueError("--output keeps the requests, too: drop --requests-file")
        simulations = _Simulations(setup, load(setup.profile), output)
        _check_slo(setup, traffic)
        options = [
            (router_options(setup, policy, seed), seed)
            for policy in dict.fromkeys(policies)
            for seed in dict.fromkeys(seeds)
        ]
        jobs = simulations.jobs(traffic, options)
        runs = []
        with _lines_to(requests_file) as write:
            if find_rate is not None:
                found = simulations.find_rate(jobs[0], find_rate)
                click.echo(f"goodput {find_rate:g}: {found.rate:.4g} req/s", err=True)
                jobs = simulations.jobs(found, options)
            for job in jobs:
                runs.append(run := simulations.get(job, write))
                if as_json:
                    click.echo(json.dumps(run))
    except (ProfileError, OptionError, RunsError, ValueError) as error:
        raise Wrong(error) from None
    if not as_json:
        from vllm_calrouter.simulation.tables import show

        show(runs)


class _Simulations:
    """Makes runs of one cluster, or finds them where they were kept.

    Args:
        setup: the cluster.
        profile: what its engines are.
        output: folder where runs are kept; None: they are not.

    Raises ValueError for a setup that cannot be.
    """

    def __init__(self, setup: Setup, profile: Profile, output: Path | None) -> None:
        self._setup = setup
        self._profile = promised(setup, profile)
        self._costs = engine_costs(setup, profile)
        self._believed = believed_costs(setup)
        self._kept = None if output is None else RunsFolder(output)

    def jobs(
        self, traffic: Traffic, options: Sequence[tuple[RouterOptions, int]]
    ) -> list[_Job]:
        """The runs of these options, by seed; policies get the same requests."""
        arrivals = {seed: self._arrivals(traffic, seed) for _, seed in options}
        return [_Job(one, arrivals[seed], traffic, seed) for one, seed in options]

    def _arrivals(self, traffic: Traffic, seed: int) -> list[Arrival]:
        most = self._setup.max_model_len
        return make_arrivals(traffic, self._profile, seed, most)

    def find_rate(self, job: _Job, goodput: float) -> Traffic:
        """The same traffic at the rate where this run has that goodput."""

        def goodput_at(rate: float) -> float:
            traffic = msgspec.structs.replace(job.traffic, rate=rate)
            (one,) = self.jobs(traffic, [(job.options, job.seed)])
            return float(self.get(one, lambda record: None)["goodput"])

        rate = saturation.find_rate(goodput_at, mean_rate(job.arrivals), goodput)
        return msgspec.structs.replace(job.traffic, rate=round(rate, 4))

    def get(self, job: _Job, write: Write) -> Run:
        """A run's figures; its requests are told to `write`, where none are kept."""
        if self._kept is None:
            return self._make(job, write)
        key = {
            **self._labels(job),
            "arrivals": digest(job.arrivals),
            "costs": self._costs,
            "believed": self._believed,
            "setup": self._setup,
            "slo": self._profile.slo,
            "slo_targets": job.traffic.slo_targets,
            "code": code_version(),
        }
        run = self._kept.find(key)
        if run is None:
            with self._kept.recording(key) as keep:
                run = self._make(job, keep)
            self._kept.keep(key, run)
        return run

    def _labels(self, job: _Job) -> dict[str, Any]:
        """What the run is called, and what it is compared with."""
        setup, traffic = self._setup, job.traffic
        return {
            "kind": "simulated",
            "scenario": f"{traffic.describe()}; {setup.describe()}",
            "name": ", ".join((job.options.policy, *setup.router_config)),
            "workload": traffic.workload or str(traffic.trace),
            "policy": job.options.policy,
            "seed": job.seed,
            "rate": mean_rate(job.arrivals),
            "prefill": setup.prefill,
            "decode": setup.decode,
            "profile": setup.profile,
            "router_profile": setup.router_profile or setup.profile,
        }

    def _make(self, job: _Job, write: Write) -> Run:
        _quiet_vllm()
        from vllm_calrouter.simulation.cluster import SimulationError
        from vllm_calrouter.simulation.results import summary

        try:
            cluster = self._cluster(job)
            began = time.perf_counter()
            title = f"{job.options.policy}, seed {job.seed}"
            with progress(title, len(job.arrivals)) as tell:
                served: list[Served] = cluster.run(job.arrivals, tell)
        except SimulationError as error:
            raise ValueError(str(error)) from None
        wall_s = time.perf_counter() - began
        labels = self._labels(job)
        for one in served:
            write({"policy": labels["policy"], "seed": job.seed, **one.record()})
        busy = [round(engine.busy_s / cluster.now_s, 4) for engine in cluster.engines]
        times = {"virtual_s": cluster.now_s, "wall_s": wall_s}
        return {**labels, **summary(served), "busy": busy, **times}

    def _cluster(self, job: _Job) -> Cluster:
        from vllm_calrouter.simulation.cluster import Cluster, Limits

        setup = self._setup
        limits = Limits(
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            block_tokens=setup.block_size,
            prefix_caching=setup.prefix_caching,
        )
        return Cluster(
            job.options,
            self._costs,
            self._profile.slo,
            limits=limits,
            routers=setup.routers,
            believed=self._believed,
            report_s=setup.report_ms / 1e3,
            message_age_s=setup.state_age_ms / 1e3,
            tells_slo=job.traffic.slo_targets,
        )


def promised(setup: Setup, profile: Profile) -> Profile:
    """The profile with the targets that were written; raises ValueError."""
    slo = dict(profile.slo)
    for text in setup.slo:
        name, targets = pair(text, "--slo", "tight=175/39.7")
        if name not in slo:
            raise ValueError(
                f"the profile {setup.profile} has no SLO class {name!r}: write --slo "
                f"with its own ({', '.join(slo)})"
            )
        ttft_ms, sign, tpot_ms = targets.partition("/")
        if not sign:
            raise ValueError(f"--slo {text}: write --slo {name}=175/39.7")
        where = "--slo " + text
        slo[name] = SloClass(number(ttft_ms, where) / 1e3, number(tpot_ms, where) / 1e3)
    return msgspec.structs.replace(profile, slo=slo)


def engine_costs(setup: Setup, profile: Profile) -> list[EngineCosts]:
    """One engine's constants each, by rank; raises ValueError."""
    costs = _costs(setup, profile)
    for text in setup.speed:
        rank, factor = pair(text, "--speed", "0=0.5")
        if not rank.isdecimal() or int(rank) >= len(costs):
            raise ValueError(f"--speed {text}: there is no engine {rank!r}")
        costs[int(rank)] = costs[int(rank)].faster(number(factor, "--speed " + text))
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
    config = _router_config(setup)
    for key in config:
        if key in _OWN:
            raise ValueError(f"--router-config {key}=...: write {_OWN[key]}")
        if key in _WITHOUT_EFFECT:
            raise ValueError(
                f"--router-config {key}=... has no effect in a simulation: "
                f"{_WITHOUT_EFFECT[key]}"
            )
    options = parse({**config, "policy": policy, "prefill": setup.prefill})
    check_effect(config, options)
    _check_limits(setup, options)
    return msgspec.structs.replace(options, seed=seed)


def _router_config(setup: Setup) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for text in setup.router_config:
        key, value = pair(text, "--router-config", "output_tokens=128")
        try:
            config[key] = json.loads(value)
        except json.JSONDecodeError:
            config[key] = value
    return config


def _check_slo(setup: Setup, traffic: Traffic) -> None:
    """Classes are for requests that state no targets, and none names its class."""
    config = _router_config(setup)
    if traffic.slo_targets:
        for key in ("slo_classes", "default_slo"):
            if key in config:
                raise ValueError(
                    f"--router-config {key}=... has no effect where requests state "
                    "their targets: add --no-slo-targets"
                )
    elif "admission" in config:
        raise ValueError(
            "--router-config admission=... has no effect where no request states its "
            "targets: drop it or --no-slo-targets"
        )
    if "slo_classes" in config and "default_slo" not in config:
        raise ValueError(
            "--router-config slo_classes=... has no effect in a simulation without "
            "default_slo: requests name no class"
        )


def _check_limits(setup: Setup, options: RouterOptions) -> None:
    for role in ("prefill", "decode"):
        for name, value in options.role_limits(prefill=role == "prefill").items():
            if value > (most := getattr(setup, name)):
                raise ValueError(
                    f"--router-config {role}_{name}={value} is more than the engines "
                    f"have ({most}): raise --{name.replace('_', '-')}"
                )


def _quiet_vllm() -> None:
    # Before the first import: what vLLM says of its platform is of no concern here.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def _lines_to(path: Path | None) -> Iterator[Write]:
    if path is None:
        yield lambda record: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise Wrong(f"--requests-file {path}: {error.strerror}") from None
    with file:

        def write(record: Mapping[str, Any]) -> None:
            file.write(msgspec.json.encode(record) + b"\n")

        yield write
