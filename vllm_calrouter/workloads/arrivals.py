"""One request as a workload describes it: when, how long, and what it was promised."""

from __future__ import annotations

import msgspec


class WorkloadError(ValueError):
    """A workload that cannot be run as written; one line that says what to change."""


class Arrival(msgspec.Struct, frozen=True):
    """One request.

    `prefix` names the leading blocks of the prompt, of `prefix_block_tokens` tokens
    each: prompts that begin with the same names begin with the same tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    slo: str = ""
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0

    def prompt(self, number: int) -> list[int]:
        """Token ids; unlike any other's beyond the prefix, by the request's number."""
        ids: list[int] = []
        for name in self.prefix:
            ids += [~name] * self.prefix_block_tokens
        del ids[self.prompt_tokens :]
        return ids + [number] * (self.prompt_tokens - len(ids))
