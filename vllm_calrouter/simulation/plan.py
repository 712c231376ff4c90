"""`calrouter plan`: every split of so many engines, simulated."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

import click

from vllm_calrouter.console import Wrong, json_option
from vllm_calrouter.simulation.pool import Figures, processes, simulated

_HELP = """Simulate every split of so many engines into prefill and decode.

Serves the traffic with each split in virtual time, as calrouter simulate does, and
marks the splits that no other beats in goodput and both tails. 0 prefill engines: every
engine does both. TRACE is a recorded trace; all options of calrouter simulate may
follow, but those that say how many engines there are.

\b
Examples:
  calrouter plan --engines 6 --workload mixed
  calrouter plan trace.csv.gz --engines 8 --start 600 --duration 300 --rate 20
  calrouter plan --engines 6 --workload chat --rate 40 --policy calibrated \\
      --router-config order=deadline --profile my-gpus.json
"""

#: What is said here already, or makes more than one run of a split or file.
_NOT_HERE = (
    "--prefill",
    "--decode",
    "--json",
    "--output",
    "--requests-file",
    "--find-rate",
)

#: Compared by `calrouter simulate` where they are written more than once.
_ONCE = ("--policy", "--seed")

#: Figures by which splits are compared; more of the first and less of the others is
#: better.
_FIGURES: dict[str, Callable[[Figures], float | None]] = {
    "goodput": lambda run: run["goodput"],
    "TTFT P99": lambda run: run["ttft_s"]["p99"],
    "TPOT P99": lambda run: run["tpot_s"]["p99"],
}


@click.command(
    help=_HELP,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.option(
    "--engines", type=click.IntRange(2, 64), required=True, help="How many there are."
)
@json_option("split")
@click.argument("simulate", nargs=-1, type=click.UNPROCESSED, metavar="[TRACE] ...")
def plan(engines: int, as_json: bool, simulate: tuple[str, ...]) -> None:
    words = shlex.join(_of_simulate(simulate))
    splits = [
        f"{words} --prefill {prefill} --decode {engines - prefill}"
        for prefill in range(engines)
    ]
    runs = list(_made(splits))
    best = frontier(runs)
    for run in runs:
        run["on_frontier"] = run in best
    if as_json:
        for run in runs:
            click.echo(json.dumps(run))
    else:
        _show(runs)


def _of_simulate(words: Sequence[str]) -> tuple[str, ...]:
    """The command line of `calrouter simulate`; raises Wrong."""
    options = [word.partition("=")[0] for word in words]
    for word, option in zip(words, options, strict=True):
        if option in _NOT_HERE:
            raise Wrong(f"{word}: calrouter plan sets it by itself, drop it")
    for option in _ONCE:
        if options.count(option) > 1:
            raise Wrong(f"{option}: calrouter plan compares splits, write one")
    if words and not words[0].startswith("-"):
        return ("--trace", *words)
    return tuple(words)


def _made(splits: Sequence[str]) -> Iterator[Figures]:
    """One run of each, in order; raises Wrong with what the first said that failed."""
    from tqdm import tqdm

    with processes() as pool:
        made = pool.map(simulated, splits)
        hidden = not sys.stderr.isatty()
        try:
            yield from tqdm(made, total=len(splits), unit="split", disable=hidden)
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            raise Wrong(error) from None


def frontier(runs: Sequence[Figures]) -> list[Figures]:
    """The runs that no other beats in all figures."""
    points = [_point(run) for run in runs]
    return [
        run
        for run, point in zip(runs, points, strict=True)
        if not any(_beats(other, point) for other in points)
    ]


def _point(run: Figures) -> tuple[float, ...]:
    """Less is better in each."""
    goodput, *times = (figure(run) for figure in _FIGURES.values())
    return (-(goodput or 0.0), *(math.inf if t is None else t for t in times))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _show(runs: Sequence[Figures]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{runs[0]['workload']}: {len(runs)} engines (simulated)",
        caption="*: no other split is better in goodput and both tails; times in ms; "
        "busy: mean share of the time",
        box=SIMPLE,
    )
    for name in ("prefill", "decode", "", *_FIGURES, "busy P", "busy D"):
        table.add_column(name, justify="right")
    for run in runs:
        goodput, *times = (figure(run) for figure in _FIGURES.values())
        prefill = run["prefill"]
        table.add_row(
            str(prefill),
            str(run["decode"]),
            "*" if run["on_frontier"] else "",
            f"{goodput:.3f}",
            *("-" if t is None else f"{1e3 * t:,.0f}" for t in times),
            _mean(run["busy"][:prefill]),
            _mean(run["busy"][prefill:]),
        )
    Console().print(table)


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"
