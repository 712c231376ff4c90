"""A folder of runs: what `calrouter simulate` and `bench` leave, and `report` reads.

    DIR/runs/NAME.json        figures of one run, and under `key` what made it
    DIR/requests/NAME.jsonl   its requests, a line each

A run is there when its figures are: they are written last, and whole or not at all. So
what a kill interrupted is run again, and nothing else is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import vllm_calrouter

Run = dict[str, Any]
Write = Callable[[Mapping[str, Any]], None]


class RunsError(ValueError):
    """A folder that cannot be used; one line."""


def code_version() -> str:
    """Another one whenever a figure may change: the package's own sources and core."""
    package = Path(vllm_calrouter.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".so", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class RunsFolder:
    """Runs under their keys: everything that a run's figures depend on.

    Args:
        path: of the folder; made with the first run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: Mapping[str, Any]) -> Run | None:
        """The run that was made under this key, if it is complete."""
        file = self._figures(key)
        if not file.exists():
            return None
        run = _read(file)
        run.pop("key", None)
        return run

    @contextmanager
    def recording(self, key: Mapping[str, Any]) -> Iterator[Write]:
        """A place for the requests of a run that is under way.

        Raises RunsError when it cannot be written.
        """
        path = self._requests(key)
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("wb")
        with file:

            def write(record: Mapping[str, Any]) -> None:
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()

            yield write

    def keep(self, key: Mapping[str, Any], run: Run) -> None:
        """Keep a finished run's figures; raises RunsError."""
        path = self._figures(key)
        text = msgspec.json.format(msgspec.json.encode({**run, "key": key}), indent=1)
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(text + b"\n")
            unfinished.replace(path)

    def runs(self) -> list[tuple[Run, list[Run]]]:
        """All runs as they were made, with their requests; raises RunsError."""
        files = (self._path / "runs").glob("*.json")
        found = []
        for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
            requests = self._path / "requests" / f"{file.stem}.jsonl"
            found.append((_read(file), _read_lines(requests)))
        if not found:
            raise RunsError(
                f"no runs in {self._path}: make some with calrouter simulate or bench "
                f"and --output {self._path}"
            )
        return found

    def _figures(self, key: Mapping[str, Any]) -> Path:
        return self._path / "runs" / f"{_name(key)}.json"

    def _requests(self, key: Mapping[str, Any]) -> Path:
        return self._path / "requests" / f"{_name(key)}.jsonl"


def _name(key: Mapping[str, Any]) -> str:
    """Readable, and another one for every other key."""
    digest = hashlib.sha256(msgspec.json.encode(key, order="deterministic"))
    readable = (str(key.get(part, "")) for part in ("workload", "name", "seed"))
    words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(readable)).strip("-")
    return f"{words[:80]}-{digest.hexdigest()[:10]}"


def _read(file: Path) -> Run:
    try:
        run: Run = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise RunsError(f"{file} is no run: {error}") from None
    return run


def _read_lines(file: Path) -> list[Run]:
    try:
        lines = file.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise RunsError(f"requests of a run, {file}: {error}") from None


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunsError(f"{path} cannot be written: {error.strerror}") from None
