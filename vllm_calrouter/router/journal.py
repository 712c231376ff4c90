"""The journal: one JSON line a request, written off the event loop."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

import msgspec
from vllm.logger import init_logger

logger = init_logger("vllm.calrouter")

#: Lines that may wait for the disk before new ones are dropped.
_MOST_WAITING = 10_000


class Journal:
    """Appends records to a file from a thread of its own.

    Several API servers may share the file: each line is one append. A disk that
    cannot keep up costs lines (counted in `dropped`), never time or memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(target, flags, 0o644)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(
            target=self._run, name="calrouter-journal", daemon=True
        )
        self._thread.start()
        self.dropped = 0

    def write(self, record: dict[str, Any]) -> None:
        """Queue one record; returns at once."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued; what comes later is dropped. Again does nothing."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(timeout=5)

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        while (record := self._lines.get()) is not None:
            try:
                os.write(self._file, encoder.encode(record) + b"\n")
            except Exception as error:
                # One bad record must not end the journal.
                self.dropped += 1
                logger.warning_once("the router's journal lost a line: %s", str(error))
        os.close(self._file)
