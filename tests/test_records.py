from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_calrouter.records import JournalFile, belongs_to


def write(path: Path, *records: dict[str, Any], torn: str = "") -> JournalFile:
    text = "".join(json.dumps(record) + "\n" for record in records) + torn
    path.write_text(text)
    return JournalFile(path)


def ids(records: Any) -> list[str]:
    return [record["request_id"] for record in records]


@pytest.mark.parametrize(
    ("recorded", "asked", "same"),
    [
        ("cmpl-a", "cmpl-a", True),
        ("cmpl-a-0", "cmpl-a", True),
        ("cmpl-a-12", "cmpl-a", True),
        ("chatcmpl-a_1", "chatcmpl-a", True),
        ("cmpl-a-0", "cmpl-a-0", True),
        ("cmpl-ab", "cmpl-a", False),
        ("cmpl-a-b", "cmpl-a", False),
        ("cmpl-a", "cmpl-a-0", False),
    ],
)
def test_a_client_s_id_finds_its_prompts(recorded: str, asked: str, same: bool) -> None:
    assert belongs_to(recorded, asked) is same


@given(st.text(), st.text())
def test_ids_of_any_text_are_compared(recorded: str, asked: str) -> None:
    assert belongs_to(recorded, recorded)
    assert not belongs_to(recorded, asked) or recorded.startswith(asked)


def test_all_records_of_a_request_in_order(tmp_path: Path) -> None:
    names = ("a-0", "b", "a-1", "ab", "a")
    journal = write(tmp_path / "j", *({"request_id": name} for name in names))
    assert ids(journal.of_request("a")) == ["a-0", "a-1", "a"]
    assert journal.of_request("c") == []


def test_torn_and_foreign_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    foreign = "[1]\nnull\n{}\n\n\xff\n"
    torn = foreign + '{"request_id": "half", "rou'
    journal = write(tmp_path / "j", {"request_id": "a"}, torn=torn)
    assert ids(journal.records()) == ["a"]
    assert journal.torn == 6
    assert journal.of_request("half") == []
    assert journal.torn == 1


def test_gzip_is_read_also_when_it_was_cut_off(tmp_path: Path) -> None:
    lines = b"".join(b'{"request_id": "r%d"}\n' % n for n in range(1000))
    path = tmp_path / "journal.gz"
    path.write_bytes(gzip.compress(lines))
    assert len(list(JournalFile(path).records())) == 1000
    path.write_bytes(gzip.compress(lines)[:-40])
    journal = JournalFile(path)
    assert ids(journal.records())[0] == "r0"
    assert journal.torn >= 1


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    journal = write(tmp_path / "j")
    assert (list(journal.records()), journal.similar_ids("a")) == ([], [])


def test_similar_ids_are_the_parts_or_else_the_near_ones(tmp_path: Path) -> None:
    names = ("cmpl-1234abcd-0", "cmpl-99999999-0", "other")
    journal = write(tmp_path / "j", *({"request_id": name} for name in names))
    assert journal.similar_ids("1234abcd") == ["cmpl-1234abcd-0"]
    assert journal.similar_ids("cmpl-1234abce-0") == ["cmpl-1234abcd-0"]
    assert journal.similar_ids("zzz") == []
