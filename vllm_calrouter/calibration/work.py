"""What a step of an engine computes, as `EngineCosts.step_s` counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """The composition of a step; the arguments of `EngineCosts.step_s`, in order."""

    prefill_tokens: int = 0
    prefill_squares: int = 0
    decode_seqs: int = 0
    decode_context_tokens: int = 0


def work_of_rows(rows: Iterable[tuple[int, int]]) -> Work:
    """Sum up a step.

    Args:
        rows: of each request in it, how many tokens it computes, and at which length,
            in tokens, that ends. A single token is decode.
    """
    prefill_tokens = squares = seqs = context = 0
    for tokens, end in rows:
        if tokens == 1:
            seqs += 1
            context += end
        else:
            start = end - tokens
            prefill_tokens += tokens
            squares += end * end - start * start
    return Work(prefill_tokens, squares, seqs, context)
