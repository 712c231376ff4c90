"""An exhibit: what is varied, under which setups, and what the study printed of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm_calrouter.simulation.pool import Figures
from vllm_calrouter.simulation.results import mean_and_error

#: Options of `calrouter simulate` by name without dashes. `router-config.KEY` is one of
#: the router's; True stands for a flag.
Options = Mapping[str, Any]

#: The study's protocol: its fixed targets, loose three times as long, its 2 + 4
#: engines in vLLM's own order, and no first token from prefill.
PROTOCOL: Options = {
    "prefill": 2,
    "decode": 4,
    "slo": ("tight=175/39.7", "loose=525/119.1"),
    "router-config.order": "fcfs",
    "router-config.first_token": "off",
}


def command_line(*options: Options) -> str:
    """The arguments of `calrouter simulate`, later options before earlier ones.

    The same options always make the same line: it is what a run is kept under.
    """
    merged: dict[str, Any] = {}
    for some in options:
        merged.update(some)
    words: list[str] = []
    for name, value in sorted(merged.items()):
        prefix, dot, key = name.partition(".")
        for one in value if isinstance(value, tuple) else (value,):
            if dot:
                words += [f"--{prefix}", f"{key}={one}"]
            elif one is True:
                words.append(f"--{name}")
            else:
                words += [f"--{name}", str(one)]
    return shlex.join(words)


#: Figures of a cell's runs: means over seeds where nothing else is said, times in
#: seconds.
METRICS: dict[str, Callable[[Sequence[Figures]], float]] = {
    "goodput": lambda runs: fmean(run["goodput"] for run in runs),
    "lowest goodput": lambda runs: min(run["goodput"] for run in runs),
    "highest goodput": lambda runs: max(run["goodput"] for run in runs),
    "TTFT P99": lambda runs: fmean(run["ttft_s"]["p99"] for run in runs),
    "lowest TTFT P99": lambda runs: min(run["ttft_s"]["p99"] for run in runs),
    "highest TTFT P99": lambda runs: max(run["ttft_s"]["p99"] for run in runs),
}


@dataclass(frozen=True)
class Printed:
    """A figure that the study prints: of which run, and what of it."""

    point: str
    setup: str
    metric: str
    value: float


@dataclass(frozen=True)
class Claim:
    """What the study says of two setups: `setup` less `other` in goodput is `printed`
    there; None where it prints no number. `other_point`: where that other one ran.
    """

    says: str
    point: str
    setup: str
    other: str
    printed: float | None
    ties: bool = False
    other_point: str | None = None


@dataclass(frozen=True)
class Exhibit:
    """Points times setups, each run with every seed.

    Args:
        name: of its files.
        title: of its section.
        about: what is varied, in a sentence or two.
        points: what is varied, by name.
        setups: of the router, by name. Paired differences are with the first, those of
            a setup named "X, ..." with X.
        printed: the study's figures.
        claims: what the study says of setups against each other.
        tables: of `tables.MORE`, by name.
        plots: of `plots.PLOTS`, by name.
    """

    name: str
    title: str
    about: str
    points: Mapping[str, Options]
    setups: Mapping[str, Options]
    printed: Sequence[Printed] = ()
    claims: Sequence[Claim] = ()
    tables: Sequence[str] = ()
    plots: Sequence[str] = ()

    def base(self, setup: str) -> str:
        """The setup that this one is compared with; itself where that is none."""
        changed, comma, _ = setup.partition(",")
        return changed if comma else next(iter(self.setups))

    def lines(self, common: Options, seeds: Sequence[int]) -> Iterator[str]:
        """The command lines of all runs."""
        for point in self.points:
            for seed in seeds:
                for setup in self.setups:
                    yield self.line(common, point, setup, seed)

    def line(self, common: Options, point: str, setup: str, seed: int) -> str:
        """The command line of one run."""
        return command_line(
            PROTOCOL, common, self.points[point], self.setups[setup], {"seed": seed}
        )


class Results:
    """The runs of an exhibit.

    Args:
        exhibit: that was run.
        run: a run by its command line.
        common: options of all runs.
        seeds: of the runs.
    """

    def __init__(
        self,
        exhibit: Exhibit,
        run: Callable[[str], Figures],
        common: Options,
        seeds: Sequence[int],
    ) -> None:
        self.exhibit = exhibit
        self.seeds = seeds
        self._run = run
        self._common = common

    def first_line(self) -> str:
        """The command line of one of its runs."""
        return next(self.exhibit.lines(self._common, self.seeds))

    def of(self, point: str, setup: str) -> list[Figures]:
        """The runs of one cell, by seed."""
        return [
            self._run(self.exhibit.line(self._common, point, setup, seed))
            for seed in self.seeds
        ]

    def options(self, point: str) -> list[dict[str, Any]]:
        """What a point's runs have in common whatever their setup, by seed."""
        common = {**PROTOCOL, **self._common, **self.exhibit.points[point]}
        return [{**common, "seed": seed} for seed in self.seeds]

    def mean(self, point: str, setup: str, metric: str) -> float:
        """One of `METRICS` of a cell's runs."""
        return METRICS[metric](self.of(point, setup))

    def gain(
        self, point: str, setup: str, other: str, other_point: str | None = None
    ) -> tuple[float, float]:
        """Goodput less that of another cell, seed by seed: mean, standard error."""
        pairs = zip(
            self.of(point, setup), self.of(other_point or point, other), strict=True
        )
        return mean_and_error([a["goodput"] - b["goodput"] for a, b in pairs])
