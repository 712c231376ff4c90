"""Runs that may be compared, and their figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from vllm_calrouter.runs import Run
from vllm_calrouter.simulation.results import mean_and_error
from vllm_calrouter.simulation.tables import paired

Requests = Sequence[Mapping[str, Any]]

#: What the page shows of a run.
_FIGURES = (
    *("kind", "scenario", "name", "seed", "goodput", "goodput_by_class"),
    *("ttft_s", "tpot_s", "pause_s", "preemptions", "refused", "failed"),
    "legs_by_engine",
)


class Setup(msgspec.Struct, frozen=True):
    """One name's runs in a group, by seed, with their requests."""

    name: str
    runs: dict[int, Run]
    requests: dict[int, Requests]

    def goodput(self, slo: str | None = None) -> tuple[float, float] | None:
        """Of all requests, or one class; mean over seeds and its standard error."""
        if slo is None:
            return self._mean(lambda run: run["goodput"])
        return self._mean(lambda run: run["goodput_by_class"].get(slo))

    def time_s(self, of: str, part: str) -> tuple[float, float] | None:
        """A percentile of a time, likewise."""
        return self._mean(lambda run: run[of][part])

    def count(self, of: str) -> tuple[float, float] | None:
        """Of what is counted, likewise."""
        return self._mean(lambda run: run[of])

    def _mean(self, value: Callable[[Run], float | None]) -> tuple[float, float] | None:
        values = [value(run) for run in self.runs.values()]
        known = [one for one in values if one is not None]
        return mean_and_error(known) if known else None

    def times_s(self, of: str) -> list[float]:
        """One time of all requests that have it, of all seeds, sorted."""
        return sorted(
            one[of] for each in self.requests.values() for one in each if one.get(of)
        )

    def share_by_rank(self, phase: str) -> dict[int, float]:
        """Which share of a phase's legs each engine got, means over seeds."""
        shares: dict[int, list[float]] = {}
        for run in self.runs.values():
            legs = run["legs_by_engine"][phase]
            total = sum(legs.values()) or 1
            for rank, count in legs.items():
                shares.setdefault(int(rank), []).append(count / total)
        return {rank: sum(all_) / len(self.runs) for rank, all_ in shares.items()}


class Group(msgspec.Struct, frozen=True):
    """Runs of one kind in one scenario; the first setup is what others are paired with.

    `kind` is simulated, paced or measured.
    """

    kind: str
    scenario: str
    setups: Sequence[Setup]

    @property
    def classes(self) -> list[str]:
        """SLO classes that requests have."""
        found = {
            name
            for setup in self.setups
            for run in setup.runs.values()
            for name in run["goodput_by_class"]
        }
        return sorted(found)

    def gain(self, setup: Setup) -> tuple[float, float] | None:
        """Goodput less the first's, seed by seed: mean and standard error.

        None for the first itself, and where no seed is in both.
        """
        base = self.setups[0]
        differences = paired(setup.runs, base.runs)
        return (
            mean_and_error(differences) if setup is not base and differences else None
        )


def grouped(
    found: Iterable[tuple[Run, Requests]], base: str | None = None
) -> list[Group]:
    """Runs by kind and scenario, in the order in which they come.

    Args:
        found: runs with their requests.
        base: the name that others are paired with; the first without it.

    Raises ValueError when no run has that name, or a file is another thing.
    """
    named: dict[tuple[str, str], dict[str, Setup]] = {}
    for run, requests in found:
        missing = [figure for figure in _FIGURES if figure not in run]
        if missing:
            raise ValueError(
                f"a run without {', '.join(missing)}: is it of another version?"
            )
        setups = named.setdefault((run["kind"], run["scenario"]), {})
        setup = setups.setdefault(run["name"], Setup(run["name"], {}, {}))
        setup.runs[run["seed"]] = run
        setup.requests[run["seed"]] = requests
    names = dict.fromkeys(name for setups in named.values() for name in setups)
    if base is not None and base not in names:
        raise ValueError(f"no run is called {base!r}: write one of {', '.join(names)}")
    return [
        Group(kind, scenario, sorted(setups.values(), key=lambda s: s.name != base))
        for (kind, scenario), setups in named.items()
    ]


def per_second(requests: Requests, of: str) -> list[tuple[int, int, float | None]]:
    """By second of arrival: its number, how many came, and the mean of one time."""
    seconds: dict[int, list[float | None]] = {}
    for one in requests:
        seconds.setdefault(int(one["arrival_s"]), []).append(one.get(of))
    table: list[tuple[int, int, float | None]] = []
    for second in range(max(seconds, default=-1) + 1):
        values = seconds.get(second, [])
        known = [value for value in values if value is not None]
        table.append((second, len(values), fmean(known) if known else None))
    return table
