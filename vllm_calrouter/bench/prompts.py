"""Prompts for real models, as token ids.

Every vocabulary has the ids used here, and none of them ends a text. Blocks that have
the same name in a trace are the same tokens; all else is unlike any other prompt's from
its first block on, so that prefix caches find what the trace shares and nothing more.
"""

from __future__ import annotations

import random

from vllm_calrouter.workloads import Arrival

_LEAST_ID, _MOST_ID = 100, 250


def prompt(arrival: Arrival, number: int) -> list[int]:
    """Token ids of the request with this number in its run."""
    ids: list[int] = []
    for name in arrival.prefix:
        ids += _ids(f"prefix {name}", arrival.prefix_block_tokens)
    del ids[arrival.prompt_tokens :]
    return ids + _ids(f"request {number}", arrival.prompt_tokens - len(ids))


def _ids(seed: str, count: int) -> list[int]:
    # Twice as fast as `choices`: a draw for each byte of one long number.
    drawn = random.Random(seed).randbytes(count)
    span = _MOST_ID - _LEAST_ID
    return [_LEAST_ID + byte % span for byte in drawn]
