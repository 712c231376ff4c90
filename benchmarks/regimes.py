"""Setups of the router side by side in the regimes of the policy laboratory, simulated.

    python -m benchmarks.regimes [--quick] [--json]      (or: make regimes [QUICK=1])

2 prefill + 4 decode engines in virtual time (vLLM's own scheduler, the profile of the
study's A40), 90 s of arrivals a run. Every setup sees the same requests of each seed,
and differences are taken seed by seed against the first setup. Runs are kept in
`.cache/regimes.jsonl`: a run that is there is not made again, so that an interrupted
study goes on, and a finished one prints at once. Uses both cores.

The figures are simulated, not hardware's. The pause between first and second token is
printed beside goodput, where TTFT got what it won from.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.runs import Runs
from vllm_calrouter.simulation.pool import Figures
from vllm_calrouter.simulation.results import mean_and_error

REGIMES: dict[str, list[str]] = {
    "mixed": ["--workload", "mixed"],
    "chat": ["--workload", "chat"],
    "docs": ["--workload", "docs"],
    "reasoning": ["--workload", "reasoning"],
    "mixed, 20k KV": ["--workload", "mixed", "--kv-tokens", "20000"],
    "mixed, 16 slots": ["--workload", "mixed", "--max-num-seqs", "16"],
    "chat, 16 slots": ["--workload", "chat", "--max-num-seqs", "16"],
    "reasoning, 20k KV": ["--workload", "reasoning", "--kv-tokens", "20000"],
}
SETUPS: dict[str, list[str]] = {
    "round_robin, without": ["round_robin", "first_token=off"],
    "round_robin": ["round_robin"],
    "least_loaded, without": ["least_loaded", "first_token=off"],
    "least_loaded": ["least_loaded"],
    "calibrated, without": ["calibrated", "first_token=off"],
    "calibrated": ["calibrated"],
}
QUICK = ("mixed", "chat", "reasoning")
_STORE = Path(".cache/regimes.jsonl")


class Run(NamedTuple):
    """One simulation: what is run, and with which requests."""

    regime: str
    setup: str
    seed: int

    def arguments(self) -> str:
        """The command line of `calrouter simulate`."""
        policy, *config = SETUPS[self.setup]
        words = [
            *REGIMES[self.regime],
            *("--policy", policy, "--seed", str(self.seed)),
            *(word for pair in config for word in ("--router-config", pair)),
        ]
        return shlex.join(words)


def make(runs: Sequence[Run], store: Runs, workers: int) -> dict[Run, Figures]:
    """All runs, those made before from the store."""
    store.make((run.arguments() for run in runs), workers)
    return {run: store[run.arguments()] for run in runs}


class Cell(NamedTuple):
    """One setup in one regime: means over seeds, seconds, and a standard error."""

    goodput: float
    gain: float
    gain_error: float
    ttft_p99_s: float
    pause_p99_s: float


def cells(
    results: dict[Run, Figures], regimes: Sequence[str], seeds: Sequence[int]
) -> dict[tuple[str, str], Cell]:
    first = next(iter(SETUPS))
    found = {}
    for regime in regimes:
        base = [results[Run(regime, first, seed)]["goodput"] for seed in seeds]
        for setup in SETUPS:
            runs = [results[Run(regime, setup, seed)] for seed in seeds]
            goodput = [run["goodput"] for run in runs]
            gains = [one - other for one, other in zip(goodput, base, strict=True)]
            found[regime, setup] = Cell(
                statistics.mean(goodput),
                *mean_and_error(gains),
                statistics.mean(run["ttft_s"]["p99"] for run in runs),
                statistics.mean(run["pause_s"]["p99"] for run in runs),
            )
    return found


def tables(
    found: dict[tuple[str, str], Cell], regimes: Sequence[str]
) -> Iterator[Table]:
    first = next(iter(SETUPS))
    columns: tuple[tuple[str, Callable[[Cell], str]], ...] = (
        ("Goodput", lambda c: f"{c.goodput:.3f}"),
        (
            f"Goodput less that of {first} (± standard error)",
            lambda c: f"{c.gain:+.3f} ±{c.gain_error:.3f}",
        ),
        ("TTFT P99, s", lambda c: f"{c.ttft_p99_s:.2f}"),
        ("Pause after the first token P99, s", lambda c: f"{c.pause_p99_s:.2f}"),
    )
    for title, show in columns:
        table = Table(title=f"{title} (simulated)")
        table.add_column("")
        for setup in SETUPS:
            table.add_column(setup, justify="right")
        for regime in regimes:
            table.add_row(regime, *(show(found[regime, setup]) for setup in SETUPS))
        if title == "Goodput":
            means = (
                statistics.mean(found[regime, setup].goodput for regime in regimes)
                for setup in SETUPS
            )
            table.add_section()
            table.add_row("mean", *(f"{mean:.3f}" for mean in means))
        yield table


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regimes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(QUICK)}, two seeds"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[11, 12, 13, 14],
        metavar="N",
        help="default: 11 to 14; constants were never chosen on these",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument(
        "--json", action="store_true", help="end the output with one JSON object"
    )
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    regimes = list(QUICK if options.quick else REGIMES)
    seeds = options.seeds[:2] if options.quick else options.seeds
    runs = [
        Run(regime, setup, seed)
        for regime in regimes
        for seed in seeds
        for setup in SETUPS
    ]
    found = cells(make(runs, Runs(_STORE), options.workers), regimes, seeds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(found, regimes):
        console.print(table)
    if options.json:
        cell_of = {f"{r} / {s}": cell._asdict() for (r, s), cell in found.items()}
        print(json.dumps({"seeds": seeds, "cells": cell_of}))


if __name__ == "__main__":
    main()
