"""Replay of recorded arrivals.

A trace is CSV, gzipped or not, with the columns `arrival_s`, `input_tokens` and
`output_tokens`, in order of arrival. `hash_ids`, if there, names the prompt's blocks
(`;`-joined; the same leading names mean the same leading tokens). Other columns are
left alone.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from vllm_calrouter.workloads.arrivals import Arrival, WorkloadError
from vllm_calrouter.workloads.families import SloMix, check_duration, check_rate

_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
_PREFIX = "hash_ids"

#: Longer than any model's context; a mistake.
_MOST_TOKENS = 10_000_000

#: Nobody waits longer for the first request; stamps of a calendar, more likely.
_MOST_LEAD_S = 86_400.0

_GZIP_MAGIC = b"\x1f\x8b"


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a trace, how fast, and for whom.

    `start_s` and `duration_s` cut a window out of the trace, in its own time; `rate`
    stretches the window so that its mean is that many requests a second. Traces with
    coarse stamps want `spread_s`: each request is moved later by a random part of it.
    `skip_over_tokens` leaves out requests whose prompt and output are longer together.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    rate: float | None = None
    spread_s: float = 0.0
    prefix_block_tokens: int = 512
    skip_over_tokens: int | None = None
    slo_mix: Mapping[str, float] | None = None
    seed: int = 0


def replay(path: str | Path, how: Replay | None = None) -> list[Arrival]:
    """The arrivals of a trace; the first comes when it came in the window.

    Raises WorkloadError: not a trace, or nothing in the window.
    """
    how = how or Replay()
    _check(how)
    recorded = list(_rows(Path(path), how))
    window = _spread(_window(recorded, how), how)
    if not window:
        raise WorkloadError(_nothing(Path(path), how))
    kept = [row for row in window if not _too_long(row, how)]
    if not kept:
        raise WorkloadError(
            f"trace {path}: every request in the window is longer than "
            f"{how.skip_over_tokens:,} tokens"
        )
    lead_s = kept[0].arrival_s - how.start_s
    if lead_s > _MOST_LEAD_S:
        raise WorkloadError(
            f"trace {path}: the first request arrives after {lead_s:.0f} s: begin with "
            f"--start {kept[0].arrival_s:.0f}, or count arrival_s from 0"
        )
    # A window may reach past the end of the trace: nothing is recorded there.
    length_s = recorded[-1].arrival_s - how.start_s
    if how.duration_s is not None:
        length_s = min(length_s, how.duration_s)
    stretch = 1.0
    if how.rate is not None:
        if not length_s:
            raise WorkloadError(
                f"trace {path}: all of it arrives at once, no rate can stretch it"
            )
        stretch = len(kept) / length_s / how.rate
    classes = SloMix(how.slo_mix, how.seed)
    return [
        msgspec.structs.replace(
            row,
            arrival_s=(row.arrival_s - how.start_s) * stretch,
            slo=classes.draw(),
        )
        for row in kept
    ]


def _check(how: Replay) -> None:
    if not 0 <= how.start_s < math.inf:
        raise WorkloadError(f"the start must be 0 s or later, got {how.start_s:g}")
    if not 0 <= how.spread_s <= 3600:
        raise WorkloadError(f"the spread must be 0 to 3600 s, got {how.spread_s:g}")
    if how.duration_s is not None:
        check_duration(how.duration_s)
    if how.rate is not None:
        check_rate(how.rate)
    if not 1 <= how.prefix_block_tokens <= 1_000_000:
        raise WorkloadError(
            f"blocks of {how.prefix_block_tokens} tokens make no prefix: 1 to 1,000,000"
        )


def _rows(path: Path, how: Replay) -> Iterator[Arrival]:
    last_s = 0.0
    try:
        with _open(path) as file:
            reader = csv.DictReader(file)
            missing = [c for c in _COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise WorkloadError(
                    f"trace {path}: no column {', '.join(missing)}; "
                    f"it needs {', '.join(_COLUMNS)}"
                )
            for row in reader:
                arrival = _row(row, f"trace {path}, line {reader.line_num}", how)
                if arrival.arrival_s < last_s:
                    raise WorkloadError(
                        f"trace {path}, line {reader.line_num}: arrives before the "
                        "line above it; sort the trace by arrival_s"
                    )
                last_s = arrival.arrival_s
                yield arrival
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise WorkloadError(f"trace {path} cannot be read: {reason}") from None


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP_MAGIC
    if zipped:
        return gzip.open(path, "rt", newline="", encoding="utf-8")
    return path.open(newline="", encoding="utf-8")


def _row(row: Mapping[str, str | None], where: str, how: Replay) -> Arrival:
    prompt = _tokens(row, "input_tokens", where)
    names = _prefix(row.get(_PREFIX), where)
    if names and len(names) != -(-prompt // how.prefix_block_tokens):
        raise WorkloadError(
            f"{where}: {len(names)} hash_ids do not make {prompt:,} tokens in blocks "
            f"of {how.prefix_block_tokens}; say which block size the trace has"
        )
    return Arrival(
        arrival_s=_seconds(row, where),
        prompt_tokens=prompt,
        output_tokens=_tokens(row, "output_tokens", where),
        prefix=names,
        prefix_block_tokens=how.prefix_block_tokens if names else 0,
    )


def _seconds(row: Mapping[str, str | None], where: str) -> float:
    text = row["arrival_s"]
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise WorkloadError(f"{where}: arrival_s {text!r} is no time in seconds")
    return value


def _tokens(row: Mapping[str, str | None], column: str, where: str) -> int:
    text = row[column]
    try:
        value = int(text or "")
    except ValueError:
        value = 0
    if not 1 <= value <= _MOST_TOKENS:
        raise WorkloadError(
            f"{where}: {column} {text!r} is no length, 1 to {_MOST_TOKENS:,} tokens"
        )
    return value


def _prefix(text: str | None, where: str) -> tuple[int, ...]:
    try:
        names = tuple(int(name) for name in (text or "").split(";") if name)
    except ValueError:
        names = (-1,)
    if any(name < 0 for name in names):
        raise WorkloadError(f"{where}: hash_ids {text!r} are no numbers joined by ;")
    return names


def _window(rows: list[Arrival], how: Replay) -> list[Arrival]:
    end_s = math.inf if how.duration_s is None else how.start_s + how.duration_s
    return [row for row in rows if how.start_s <= row.arrival_s < end_s]


def _spread(rows: list[Arrival], how: Replay) -> list[Arrival]:
    if not how.spread_s:
        return rows
    moves = random.Random(f"spread {how.seed}")
    moved = [
        msgspec.structs.replace(
            row, arrival_s=row.arrival_s + moves.random() * how.spread_s
        )
        for row in rows
    ]
    return sorted(moved, key=lambda row: row.arrival_s)


def _too_long(row: Arrival, how: Replay) -> bool:
    most = how.skip_over_tokens
    return most is not None and row.prompt_tokens + row.output_tokens > most


def _nothing(path: Path, how: Replay) -> str:
    if how.start_s or how.duration_s is not None:
        end = "" if how.duration_s is None else f" to {how.start_s + how.duration_s:g}"
        return f"trace {path}: nothing arrives from {how.start_s:g}{end} s"
    return f"trace {path} is empty"
