from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_calrouter.runs import RunsError, RunsFolder

KEY = {"workload": "mixed", "name": "a", "seed": 1}


def keep(folder: RunsFolder, key: dict[str, Any], goodput: float) -> None:
    with folder.recording(key) as write:
        write({"request": 0, "ttft_s": 0.5})
    folder.keep(key, {**key, "goodput": goodput})


def test_a_run_comes_back_under_its_key_only(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    keep(folder, KEY, 0.5)
    assert folder.find(KEY) == {**KEY, "goodput": 0.5}
    assert folder.find({**KEY, "seed": 2}) is None
    assert folder.find({**KEY, "rate": 3.0}) is None


def test_a_run_that_was_interrupted_is_none(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    with folder.recording(KEY) as write:
        write({"request": 0})
    assert folder.find(KEY) is None
    keep(folder, KEY, 0.5)
    ((_, requests),) = folder.runs()
    assert requests == [{"request": 0, "ttft_s": 0.5}]


def test_requests_are_on_disk_while_a_run_goes_on(tmp_path: Path) -> None:
    with RunsFolder(tmp_path).recording(KEY) as write:
        write({"request": 0})
        (file,) = tmp_path.glob("requests/*.jsonl")
        assert json.loads(file.read_text()) == {"request": 0}


def test_runs_come_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    for name in ("z", "a", "m"):
        keep(folder, {**KEY, "name": name}, 0.5)
    assert [run["name"] for run, _ in folder.runs()] == ["z", "a", "m"]


def test_whatever_a_run_is_called_its_files_stay_in_the_folder(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    key = {**KEY, "workload": "../../" + "x" * 300, "name": "a/b, c=d"}
    keep(folder, key, 0.5)
    assert folder.find(key)
    assert len(list(tmp_path.glob("runs/*.json"))) == 1


def test_what_is_no_folder_of_runs_is_one_line(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    with pytest.raises(RunsError, match="no runs in"):
        folder.runs()
    keep(folder, KEY, 0.5)
    (file,) = tmp_path.glob("runs/*.json")
    file.write_text("{")
    with pytest.raises(RunsError, match="is no run"):
        folder.runs()
    (tmp_path / "file").touch()
    with pytest.raises(RunsError, match="cannot be written"):
        keep(RunsFolder(tmp_path / "file"), KEY, 0.5)
