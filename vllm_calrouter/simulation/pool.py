"""`calrouter simulate` called from Python, in processes that make many runs each."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shlex
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from typing import Any

#: What `calrouter simulate --json` prints of a run.
Figures = dict[str, Any]


def simulated(arguments: str) -> Figures:
    """One run of `calrouter simulate`, by its command line.

    Raises:
        RuntimeError: with what it said when it would not run.
    """
    # vLLM is imported once in each process that makes runs, not in the one that asks.
    import click

    from vllm_calrouter.simulation.command import simulate

    said = io.StringIO()
    try:
        with redirect_stdout(said):
            simulate.main([*shlex.split(arguments), "--json"], standalone_mode=False)
    except click.ClickException as error:
        raise RuntimeError(error.format_message()) from None
    figures: Figures = json.loads(said.getvalue())
    return figures


def processes(workers: int | None = None) -> ProcessPoolExecutor:
    """Processes that end when this one does, however it does; None: a core each.

    Fresh ones: what this process has imported and started is of no use there.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers or os.cpu_count(), context, _prepare)


def _prepare() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    # No bars of single runs within the bar of all.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
