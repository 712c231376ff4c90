from __future__ import annotations

import os
from pathlib import Path

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
        file.write('{"key": "half a li\n')
    again = Runs(store, made)
    again.make([f"{trail} 1", f"{trail} 2"], 1)
    assert again[f"{trail} 1"] == {"of": f"{trail} 1"}
    pids = trail.read_text().split()
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


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
