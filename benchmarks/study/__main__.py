"""Runs the exhibits and writes the page; see `python -m benchmarks.study --help`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.runs import Runs
from benchmarks.study.exhibit import Options, Results
from benchmarks.study.exhibits import EXHIBITS
from benchmarks.study.measure import measured
from benchmarks.study.page import write

_HELP = """The study's exhibits in virtual time, beside its printed figures.

Every exhibit is a set of `calrouter simulate` runs: vLLM's own scheduler without a
model, the router of the API server, the profile of the study's A40. All figures are
simulated. Runs are kept in a file, so a study that was interrupted goes on, and a
finished one only writes its page again: the same text on any machine.

\b
Examples:
  python -m benchmarks.study                     docs/study.md and its plots
  python -m benchmarks.study --quick             a small one, to .cache/study
  python -m benchmarks.study --only mixed --only rate --quick
"""

FULL: Options = {"duration": 60}
QUICK: Options = {"duration": 8}
#: As many traces as the study has.
SEEDS = (11, 12, 13)


@click.command(help=_HELP)
@click.option("--quick", is_flag=True, help="8 s of arrivals, one seed: a smoke run.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([one.name for one in EXHIBITS]),
    help="Only this exhibit, written to the folder of --quick. Several times.",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    type=click.IntRange(0),
    default=SEEDS,
    show_default=True,
    help="Several times.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Processes; a core each without it."
)
@click.option(
    "--store",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".cache/study.jsonl"),
    show_default=True,
    help="Where runs are kept.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of study.md and study/*.svg; docs without --quick and --only.",
)
def main(
    quick: bool,
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    store: Path,
    output: Path | None,
) -> None:
    common, seeds = (QUICK, seeds[:1]) if quick else (FULL, seeds)
    exhibits = [one for one in EXHIBITS if not only or one.name in only]
    runs = Runs(store, measured)
    # Seed by seed: what was made of an interrupted study is whole for some seeds.
    runs.make(
        (
            line
            for seed in seeds
            for one in exhibits
            for line in one.lines(common, [seed])
        ),
        workers,
    )
    results = [Results(one, runs.__getitem__, common, seeds) for one in exhibits]
    folder = output or Path(".cache/study" if quick or only else "docs")
    click.echo(f"written: {write(results, folder)}")


if __name__ == "__main__":
    main()
