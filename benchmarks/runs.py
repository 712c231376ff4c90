"""Simulations that were made, kept in a file so that none is made twice.

A line a run, under a key that says what was run and with which code: what another
version of the package found is not taken for this one's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def stored(path: Path) -> dict[str, Any]:
    """Runs made before, by key; half a line of a killed run is no run."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
                found[record["key"]] = record["run"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
    return found


def as_line(key: str, run: Any) -> str:
    """A run as `stored` reads it back."""
    return json.dumps({"key": key, "run": run}) + "\n"
