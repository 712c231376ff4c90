"""Simulations that were made, kept in a file so that none is made twice.

A line a run, under a key that says what was run and with which code: what another
version of the package found is not taken for this one's. A study that was killed goes
on where it was; one that is finished prints at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_calrouter import _core

#: What `calrouter simulate --json` prints of a run.
Figures = dict[str, Any]


def simulated(arguments: str) -> Figures:
    """One run of `calrouter simulate`, by its command line; raises RuntimeError with
    what it said when it would not run."""
    # vLLM is imported once in each process that makes runs, not in the one that asks.
    import click

    from vllm_calrouter.simulation.command import simulate

    said = io.StringIO()
    try:
        with redirect_stdout(said):
            simulate.main([*shlex.split(arguments), "--json"], standalone_mode=False)
    except click.ClickException as error:
        raise RuntimeError(f"{arguments}: {error.message}") from None
    figures: Figures = json.loads(said.getvalue())
    return figures


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
        with _processes(workers) as pool, self._path.open("a") as file:
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


def _processes(workers: int | None) -> Executor:
    # A fresh process each: what this one has imported and started is of no use there.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers or os.cpu_count(), context, _prepare)


def _prepare() -> None:
    """Makes a new process one that makes runs."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    # No bars of single runs within the bar of all.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _end_with_parent() -> None:
    """Who was to have these runs was killed: nobody takes them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def code_version() -> str:
    """Another one whenever a figure may change: the package's own sources and core."""
    package = Path(_core.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".so", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


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
