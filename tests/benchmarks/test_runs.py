from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import runs
from benchmarks.runs import Runs, stored
from vllm_calrouter.simulation.pool import Figures


def made(arguments: str) -> Figures:
    """Leaves a line where a test can see that it ran, and by which process."""
    with Path(arguments.split()[0]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return {"of": arguments}


def fails(arguments: str) -> Figures:
    raise RuntimeError(f"{arguments}: no such policy")


def test_a_run_made_before_is_not_made_again(tmp_path: Path) -> None:
    store, trail = tmp_path / "runs.jsonl", tmp_path / "trail"
    Runs(store, made).make([f"{trail} 1", f"{trail} 1"], 1)
    # As a kill leaves it.
    with store.open("a") as file:
        file.write('{"key": "half a li')
    again = Runs(store, made)
    again.make([f"{trail} 1", f"{trail} 2"], 1)
    assert again[f"{trail} 1"] == {"of": f"{trail} 1"}
    Runs(store, made).make([f"{trail} 1", f"{trail} 2"], 1)
    pids = trail.read_text().split()
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


def sleeps(arguments: str) -> Figures:
    made(arguments)
    time.sleep(600)
    return {}


def test_a_killed_study_leaves_no_process_behind(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    study = multiprocessing.get_context("spawn").Process(
        target=Runs(tmp_path / "runs.jsonl", sleeps).make, args=([f"{trail} 1"], 1)
    )
    study.start()
    pid = int(wait_for(lambda: trail.exists() and trail.read_text().strip()))
    study.kill()
    study.join()
    wait_for(lambda: not runs_on(pid))


def runs_on(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(what: Callable[[], Any]) -> Any:
    """What it returns once that is true; fails after a minute."""
    give_up_s = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    return found


def test_a_run_of_other_code_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, trail = tmp_path / "runs.jsonl", tmp_path / "trail"
    Runs(store, made).make([f"{trail} 1"], 1)
    monkeypatch.setattr(runs, "code_version", lambda: "other")
    with pytest.raises(KeyError):
        Runs(store, made)[f"{trail} 1"]


def test_what_a_run_said_reaches_who_asked(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such policy"):
        Runs(tmp_path / "runs.jsonl", fails).make(["--policy x"], 1)
    assert not stored(tmp_path / "runs.jsonl")
