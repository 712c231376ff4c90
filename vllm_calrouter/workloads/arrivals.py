"""One request as a workload describes it: when, how long, and what it was promised."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import msgspec


class WorkloadError(ValueError):
    """A workload that cannot be run as written; one line that says what to change."""


class Arrival(msgspec.Struct, frozen=True):
    """One request.

    `prefix` names the leading blocks of the prompt, of `prefix_block_tokens` tokens
    each: prompts that begin with the same names begin with the same tokens.
    `hinted_tokens` is what the client says of its output's length; 0: nothing.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    slo: str = ""
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    hinted_tokens: int = 0

    def prompt(self, number: int) -> list[int]:
        """Token ids; unlike any other's beyond the prefix, by the request's number."""
        ids: list[int] = []
        for name in self.prefix:
            ids += [~name] * self.prefix_block_tokens
        del ids[self.prompt_tokens :]
        return ids + [number] * (self.prompt_tokens - len(ids))


def with_hints(
    arrivals: Iterable[Arrival], *, error: float = 0.0, seed: int = 0
) -> list[Arrival]:
    """The same requests, with a hint of each output's length.

    Args:
        arrivals: the requests.
        error: standard deviation of hint / truth, whose mean is 1 (log-normal).
        seed: of the errors.

    Raises WorkloadError when the error is not from 0 to 100.
    """
    if not 0 <= error <= 100:
        raise WorkloadError(f"the length error must be from 0 to 100, got {error:g}")
    errors = random.Random(f"hints {seed}")
    spread = math.sqrt(math.log1p(error * error))
    hinted = []
    for one in arrivals:
        factor = errors.lognormvariate(-spread * spread / 2, spread) if spread else 1.0
        tokens = max(1, round(one.output_tokens * factor))
        hinted.append(msgspec.structs.replace(one, hinted_tokens=tokens))
    return hinted
