"""`calrouter report`: a folder of runs in, a page out."""

from __future__ import annotations

from pathlib import Path

import click

from vllm_calrouter.console import Wrong
from vllm_calrouter.runs import RunsFolder


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page; FOLDER/report.html without it.",
)
@click.option(
    "--base",
    metavar="NAME",
    help="Setup that others are paired with; the first that was run without it.",
)
def report(folder: Path, html: Path | None, base: str | None) -> None:
    """Make one HTML page of plots and tables from a folder of runs.

    FOLDER is what calrouter simulate or bench wrote with --output: figures in runs/,
    requests in requests/. Runs of the same kind and scenario are put side by side, and
    goodput is compared seed by seed. The page needs no network and no scripts.

    \b
    Example:
      calrouter simulate --workload mixed --policy round_robin --policy calibrated \\
          --seed 1 --seed 2 --seed 3 --output mixed
      calrouter report mixed
    """
    from vllm_calrouter.report.groups import grouped
    from vllm_calrouter.report.page import page
    from vllm_calrouter.report.plots import available

    if not available():
        raise Wrong('plots need matplotlib: pip install "vllm-calrouter[plot]"')
    target = html or folder / "report.html"
    try:
        groups = grouped(RunsFolder(folder).runs(), base)
        target.write_text(page(groups, f"Runs in {folder.resolve().name}"))
    except ValueError as error:
        raise Wrong(error) from None
    except OSError as error:
        raise Wrong(f"{target} cannot be written: {error.strerror}") from None
    click.echo(target)
