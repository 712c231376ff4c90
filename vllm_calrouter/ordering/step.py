"""The step that is being put together: what is in it, and what may still go in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.ordering.job import Job


@dataclass(slots=True, kw_only=True)
class Step:
    """What runs anyway, and the waiting jobs chosen so far.

    Fields:
        costs: of this engine.
        price: brings a job's tokens and cost up to date; what is cached changes.
        start_s: when the step will start, on the engine's clock.
        seqs_left, tokens_left: sequences and tokens that vLLM's limits still allow.
        prefill_tokens, squares: prompt tokens in the step, and `EngineCosts.step_s`'s
            squares of them.
        decode_seqs, context_tokens: running sequences that decode, and their KV.
        jobs: chosen, in order.
        job_tokens: tokens of theirs in this step.
        end_by_s: the earliest deadline among them.
        full: nothing more may go in.
    """

    costs: EngineCosts
    price: Callable[[Job], None]
    start_s: float
    seqs_left: int
    tokens_left: int
    prefill_tokens: int = 0
    squares: int = 0
    decode_seqs: int = 0
    context_tokens: int = 0
    jobs: list[Job] = field(default_factory=list)
    job_tokens: int = 0
    end_by_s: float = math.inf
    full: bool = False

    @property
    def has_room(self) -> bool:
        """Whether vLLM would look at another waiting request."""
        return not self.full and self.seqs_left > 0 and self.tokens_left > 0

    def end_with_s(self, job: Job) -> float:
        """When the step would end with this job in it, too."""
        return self.start_s + self.costs.step_s(
            self.prefill_tokens + job.tokens,
            self.squares + job.squares,
            self.decode_seqs,
            self.context_tokens,
        )

    def put(self, job: Job) -> None:
        """Put a priced job in."""
        tokens = min(job.tokens, self.tokens_left)
        self.jobs.append(job)
        self.prefill_tokens += tokens
        self.squares += job.squares
        self.job_tokens += tokens
        self.tokens_left -= tokens
        self.seqs_left -= 1
        if not job.late:
            self.end_by_s = min(self.end_by_s, job.deadline_s)
