"""Simulations that were made, kept in a file so that none is made twice.

A line a run, under a key that says what was run and with which code: what another
version of the package found is not taken for this one's. A study that was killed goes
on where it was; one that is finished prints at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from vllm_calrouter.console import Decorator, several
from vllm_calrouter.runs import code_version
from vllm_calrouter.simulation.pool import Figures, processes, simulated


def keeps_runs(path: str) -> Decorator:
    """`--workers` and `--results`, which is `path` where it is not written."""
    return several(
        [
            click.option(
                "--workers",
                type=click.IntRange(1),
                default=os.cpu_count,
                help="A core each.",
            ),
            click.option(
                "--results",
                type=click.Path(path_type=Path, dir_okay=False),
                default=Path(path),
                show_default=True,
                help="Where runs are kept.",
            ),
        ]
    )


class Runs:
    """Simulated runs by their command lines, each made once.

    Args:
        path: file they are kept in.
        run: makes one; a function that another process can import.
    """

    def __init__(self, path: Path, run: Callable[[str], Figures] = simulated) -> None:
        self._path = path
        self._run = run
        self._code = code_version()
        self._known = stored(path)

    def key(self, arguments: str) -> str:
        """What a run is kept under."""
        return f"{self._code} {arguments}"

    def make(self, wanted: Iterable[str], workers: int | None = None) -> None:
        """Have all of these, with a progress bar.

        Args:
            wanted: command lines.
            workers: processes; None: a core each.
        """
        missing = [a for a in dict.fromkeys(wanted) if self.key(a) not in self._known]
        if not missing:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with processes(workers) as pool, self._path.open("a") as file:
            # A killed run may have left half a line: what follows is a line of its own.
            file.write("\n")
            futures = {pool.submit(self._run, one): one for one in missing}
            ended = as_completed(futures)
            try:
                for future in tqdm(ended, total=len(missing), unit="run"):
                    key = self.key(futures[future])
                    self._known[key] = future.result()
                    file.write(as_line(key, self._known[key]))
                    file.flush()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def __getitem__(self, arguments: str) -> Figures:
        """A run that was made; raises KeyError."""
        figures: Figures = self._known[self.key(arguments)]
        return figures


def stored(path: Path) -> dict[str, Any]:
    """Runs made before, by key; half a line of a killed run is no run."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
                found[record["key"]] = record["run"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
    return found


def as_line(key: str, run: Any) -> str:
    """A run as `stored` reads it back."""
    return json.dumps({"key": key, "run": run}) + "\n"
