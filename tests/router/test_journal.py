from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_calrouter.router import journal as journal_module
from vllm_calrouter.router.journal import Journal


def test_each_record_is_one_line_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal(path)
    for number in range(100):
        journal.write({"number": number, "text": "two\nlines"})
    journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(100))


def test_several_routers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journals = [Journal(path) for _ in range(3)]
    for number in range(300):
        journals[number % 3].write({"number": number})
    for journal in journals:
        journal.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == list(range(300))


def test_a_full_disk_costs_lines_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")

    def full(*_: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(journal_module.os, "write", full)
    journal.write({"number": 1})
    journal.close()
    assert journal.dropped == 1


def test_a_place_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Journal(tmp_path / "file" / "journal.jsonl")
    assert os.listdir(tmp_path) == ["file"]
