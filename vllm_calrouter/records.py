"""Reading the journal that routers write (`router/journal.py`).

Needs no vLLM: a journal may be read on any machine.
"""

from __future__ import annotations

import difflib
import gzip
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

Record = dict[str, Any]

_GZIP_MAGIC = b"\x1f\x8b"
#: Ids remembered to suggest from when one is not found.
_MOST_SUGGESTED_FROM = 20_000

#: What vLLM puts around the id that a client saw: the number of a prompt in a batch.
_AROUND = re.compile(r"[-_]\d+")


def belongs_to(recorded_id: str, request_id: str) -> bool:
    """Whether a record is of the request that a client knows as `request_id`.

    vLLM numbers the prompts of one HTTP request: `cmpl-x` has `cmpl-x-0`, `cmpl-x-1`.
    """
    if not recorded_id.startswith(request_id):
        return False
    rest = recorded_id[len(request_id) :]
    return not rest or _AROUND.fullmatch(rest) is not None


class JournalFile:
    """A journal file, plain or gzip; `torn` counts lines that were no record.

    A server that is writing, or was killed, leaves half a line at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn = 0

    def _open(self) -> BinaryIO:
        with self._path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
        # gzip's file is a BinaryIO in all but name.
        return gzip.open(self._path) if zipped else self._path.open("rb")  # type: ignore[return-value]

    def _lines(self) -> Iterator[bytes]:
        with self._open() as file:
            try:
                yield from file
            except (EOFError, gzip.BadGzipFile):
                # A file cut off within the compressed stream.
                self.torn += 1

    def records(self, containing: str = "") -> Iterator[Record]:
        """All records, or those whose line contains a text, in the file's order."""
        self.torn = 0
        wanted = containing.encode()
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        for line in self._lines():
            if wanted in line:
                try:
                    record = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.torn += 1
                    continue
                if isinstance(record.get("request_id"), str):
                    yield record
                else:
                    self.torn += 1

    def of_request(self, request_id: str) -> list[Record]:
        """The records of one request; several when it had several prompts or choices.

        Raises:
            OSError: the file cannot be read.
        """
        return [
            record
            for record in self.records(containing=request_id)
            if belongs_to(record["request_id"], request_id)
        ]

    def similar_ids(self, request_id: str, most: int = 5) -> list[str]:
        """Ids in the file, of the latest ones, that look like `request_id`."""
        ids = deque(
            (record["request_id"] for record in self.records()), _MOST_SUGGESTED_FROM
        )
        unique = list(dict.fromkeys(reversed(ids)))
        part = [one for one in unique if request_id in one or one in request_id]
        return (part or difflib.get_close_matches(request_id, unique, most))[:most]
