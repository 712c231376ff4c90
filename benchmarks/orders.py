"""The orders of waiting requests against each other, in simulation.

    python -m benchmarks.orders --seed 11 --seed 12 --seed 13 --seed 14

Runs `calrouter simulate` for every row and regime below and prints the tables of
docs/policies.md: goodput with its paired difference to the first row, P99 of TTFT, the
longest TTFT and P99 of the pause after a first token, means over seeds. Every row sees
the same requests of each seed. What was run is kept in a file and not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import click

from benchmarks.runs import Runs
from vllm_calrouter.simulation.pool import Figures
from vllm_calrouter.simulation.results import mean_and_error

REGIMES = {
    "mixed": "--workload mixed",
    "chat": "--workload chat",
    "docs": "--workload docs",
    "reasoning": "--workload reasoning",
    # At the workload's own rate these slots are not nearly enough for anybody.
    "mixed, 16 slots": "--workload mixed --max-num-seqs 16 --rate 13",
    "mixed, 20k KV": "--workload mixed --kv-tokens 20000",
}

_LEAST = "--policy least_loaded"
ROWS = {
    "round-robin, `fcfs`, first token off": "--policy round_robin "
    "--router-config first_token=off",
    "least-loaded, `fcfs`": _LEAST,
    "least-loaded, `short_first`": f"{_LEAST} --router-config order=short_first",
    "least-loaded, `deadline`": f"{_LEAST} --router-config order=deadline",
    "the same, `max_overtake_s` 1": f"{_LEAST} --router-config order=deadline "
    "--router-config max_overtake_s=1",
    "the same, `max_overtake_s` 0.25": f"{_LEAST} --router-config order=deadline "
    "--router-config max_overtake_s=0.25",
}


def arguments(regime: str, row: str, seed: int) -> str:
    """The command line of `calrouter simulate`."""
    return f"{REGIMES[regime]} {ROWS[row]} --seed {seed}"


def of(runs: Runs, regime: str, row: str, seeds: Sequence[int]) -> list[Figures]:
    """A row's runs in a regime, by seed."""
    return [runs[arguments(regime, row, seed)] for seed in seeds]


def goodput(runs: list[Figures], first: list[Figures]) -> str:
    """Mean goodput, and its difference to the first row's with standard error."""
    mean = fmean(run["goodput"] for run in runs)
    if runs is first:
        return f"{mean:.3f}"
    gains = [a["goodput"] - b["goodput"] for a, b in zip(runs, first, strict=True)]
    gain, error = mean_and_error(gains)
    return f"{mean:.3f} ({gain:+.3f} ± {error:.3f})"


def seconds(of: str, what: str) -> Callable[[list[Figures], list[Figures]], str]:
    """Mean over runs of one percentile, in seconds."""

    def cell(runs: list[Figures], first: list[Figures]) -> str:
        return f"{fmean(run[of][what] or 0.0 for run in runs):.2f}"

    return cell


TABLES = {
    "Goodput (paired with the first row)": goodput,
    "TTFT P99, s": seconds("ttft_s", "p99"),
    "TTFT, longest, s": seconds("ttft_s", "max"),
    "Pause after the first token, P99, s": seconds("pause_s", "p99"),
}


def markdown(runs: Runs, seeds: Sequence[int], regimes: Sequence[str]) -> str:
    """All tables."""
    runs.make(
        arguments(regime, row, seed)
        for regime in regimes
        for seed in seeds
        for row in ROWS
    )
    lines = []
    for title, cell in TABLES.items():
        lines += [f"| {title} | {' | '.join(regimes)} |", "|---" * (len(regimes) + 1)]
        lines[-1] += "|"
        for row in ROWS:
            cells = []
            for regime in regimes:
                first = of(runs, regime, next(iter(ROWS)), seeds)
                own = first if row == next(iter(ROWS)) else of(runs, regime, row, seeds)
                cells.append(cell(own, first))
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    type=int,
    default=(11, 12, 13, 14),
    show_default=True,
)
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    type=click.Choice(list(REGIMES)),
    default=list(REGIMES),
    help="All of them without it.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".cache/orders.jsonl"),
    show_default=True,
    help="Where runs are kept.",
)
def main(seeds: tuple[int, ...], regimes: tuple[str, ...], results: Path) -> None:
    click.echo(markdown(Runs(results), seeds, regimes))


if __name__ == "__main__":
    main()
