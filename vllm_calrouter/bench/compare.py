"""Servers under the same traffic, run after run, each kept when it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import click
import msgspec

from vllm_calrouter.bench import gates
from vllm_calrouter.bench.load import Load, Terms
from vllm_calrouter.bench.server import About, BenchError, Server, connected
from vllm_calrouter.calibration import load
from vllm_calrouter.console import progress
from vllm_calrouter.runs import Run, RunsFolder
from vllm_calrouter.workloads import Arrival, saturation
from vllm_calrouter.workloads.options import Traffic, digest, make_arrivals, mean_rate


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How servers are asked; `timeout` in seconds, times the slow-down."""

    profile: str
    slow_down: float = 1.0
    max_in_flight: int = 1024
    timeout: float = 600.0
    model: str | None = None
    api_key: str | None = None


class _Target(NamedTuple):
    """A server that passed its gates."""

    name: str
    url: str
    about: About


class Benchmark:
    """Servers that passed the gates, ready to be measured.

    Args:
        urls: addresses by name.
        settings: how they are asked.
        output: folder where runs are kept.

    Raises BenchError: a server does not answer, or a gate is shut.
    """

    def __init__(
        self, urls: Mapping[str, str], settings: Settings, output: Path
    ) -> None:
        self._settings = settings
        self._profile = load(settings.profile)
        self._kept = RunsFolder(output)
        self._targets = [self._gated(name, url) for name, url in urls.items()]
        self._longest = min(one.about.max_model_len for one in self._targets)
        names = [one.name for one in self._targets]
        if len(set(names)) < len(names):
            raise BenchError(
                "several servers have the same policy: give each a name, --url NAME=URL"
            )

    def _gated(self, name: str, url: str) -> _Target:
        async def ask() -> About:
            async with self._connected(name, url) as server:
                about = await server.about(self._settings.model)
                await gates.check(server, about)
                if not await server.reset_prefix_caches():
                    click.echo(
                        f"{name} does not offer /reset_prefix_cache "
                        "(VLLM_SERVER_DEV_MODE=1): blocks of earlier runs stay, "
                        "unusable, until they are evicted",
                        err=True,
                    )
                return about

        about = asyncio.run(ask())
        # An address is no name when the server has a better one.
        return _Target(about.policy or name if name == url else name, url, about)

    def _connected(self, name: str, url: str) -> AbstractAsyncContextManager[Server]:
        settings = self._settings
        timeout_s = settings.timeout * max(1.0, settings.slow_down)
        return connected(name, url, api_key=settings.api_key, timeout_s=timeout_s)

    def find_rate(self, traffic: Traffic, seed: int, goodput: float) -> Traffic:
        """The same traffic at the rate where the first server has that goodput."""

        def goodput_at(rate: float) -> float:
            at_rate = msgspec.structs.replace(traffic, rate=round(rate, 4))
            arrivals = self._arrivals(at_rate, seed)
            run = self._get(self._targets[0], at_rate, arrivals, seed)
            return float(run["goodput"])

        first_rate = mean_rate(self._arrivals(traffic, seed))
        rate = saturation.find_rate(goodput_at, first_rate, goodput)
        return msgspec.structs.replace(traffic, rate=round(rate, 4))

    def runs(self, traffic: Traffic, seeds: Sequence[int]) -> Iterator[Run]:
        """All servers under the same requests, seed by seed."""
        arrivals = {seed: self._arrivals(traffic, seed) for seed in seeds}
        for seed in seeds:
            for target in self._targets:
                yield self._get(target, traffic, arrivals[seed], seed)

    def _arrivals(self, traffic: Traffic, seed: int) -> list[Arrival]:
        return make_arrivals(traffic, self._profile, seed, self._longest)

    def _get(
        self, target: _Target, traffic: Traffic, arrivals: Sequence[Arrival], seed: int
    ) -> Run:
        labels = self._labels(target, traffic, arrivals, seed)
        key = {
            **labels,
            "arrivals": digest(arrivals),
            "slo": self._profile.slo,
            "costs": self._profile.costs,
            "slo_targets": traffic.slo_targets,
            "max_in_flight": self._settings.max_in_flight,
        }
        run = self._kept.find(key)
        if run is None:
            run = asyncio.run(self._make(target, traffic, arrivals, key, labels))
            self._kept.keep(key, run)
        return run

    def _labels(
        self, target: _Target, traffic: Traffic, arrivals: Sequence[Arrival], seed: int
    ) -> dict[str, Any]:
        settings, about = self._settings, target.about
        where = f"{about.model}, SLO of {settings.profile}"
        if about.engines:
            engines = f"{about.prefill} + {about.engines - about.prefill}"
            where = f"{engines} engines, {where}"
        paced = settings.slow_down != 1
        if paced:
            where += f", slowed down by {settings.slow_down:g}"
        if settings.max_in_flight != 1024:
            where += f", at most {settings.max_in_flight} in flight"
        return {
            "kind": "paced" if paced else "measured",
            "scenario": f"{traffic.describe()}; {where}",
            "name": target.name,
            "workload": traffic.workload or str(traffic.trace),
            "policy": about.policy or "none",
            "seed": seed,
            "rate": mean_rate(arrivals),
            "prefill": about.prefill,
            "decode": about.engines - about.prefill,
            "profile": settings.profile,
        }

    async def _make(
        self,
        target: _Target,
        traffic: Traffic,
        arrivals: Sequence[Arrival],
        key: Mapping[str, Any],
        labels: Mapping[str, Any],
    ) -> Run:
        terms = Terms(
            costs=self._profile.costs_of(prefill=target.about.prefill > 0),
            slo=self._profile.slo,
            slow_down=self._settings.slow_down,
            tells_slo=traffic.slo_targets,
            most_in_flight=self._settings.max_in_flight,
        )
        title = f"{target.name}, seed {labels['seed']}"
        async with self._connected(target.name, target.url) as server:
            emptied = await server.reset_prefix_caches()
            with (
                self._kept.recording(key) as write,
                progress(title, len(arrivals)) as tell,
            ):
                load_ = Load(
                    server,
                    target.about,
                    terms,
                    uuid4().hex[:12],
                    write=write,
                    progress=tell,
                )
                figures = await load_.run(arrivals)
        if figures["failed"] == len(arrivals):
            raise BenchError(f"{target.name}: all requests failed: {figures['errors']}")
        return {**labels, **figures, "prefix_caches_emptied": emptied}
