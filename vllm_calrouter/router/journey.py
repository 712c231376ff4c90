"""One request's way through the engines, as its router sees it."""

from __future__ import annotations

from asyncio import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from vllm_calrouter._core import Phase
from vllm_calrouter.placement import Choice
from vllm_calrouter.predictors import Features
from vllm_calrouter.router.wishes import Wishes


class Stage(Enum):
    """Which leg is under way."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


#: Terms of a price (docs/pricing.md) that pass before a first token can be there.
_BEFORE_THE_FIRST_TOKEN = (
    *("prefill_backlog_s", "prefill_own_s"),
    *("transfer_s", "decode_wait_s"),
)


@dataclass(slots=True, kw_only=True)
class Journey:
    """State of one request between its arrival and its end.

    Times are seconds on the router's clock.
    """

    request: EngineCoreRequest
    stage: Stage
    leg_id: str
    began_s: float
    prompt_tokens: int
    predicted_tokens: int
    wishes: Wishes
    features: Features
    #: Who predicted the output's length (`Predictor.source`).
    predicted_by: str
    choices: list[Choice]
    #: What the leg under way holds in the load table; None when it is released.
    booking: int | None
    #: Who names the decode rank, and which, where the policy is not asked.
    given_decode: tuple[str, int] | None = None
    cause: str | None = None
    #: Why the first token does not come from the prefill engine; None when it does,
    #: and when one engine serves all.
    bypass: str | None = None
    #: The client has the first token, and the decode leg goes on from it.
    sent_early: bool = False
    aborted: bool = False
    prefill_stats: Any = None
    #: Of the prompt, found in the prefix cache where it was computed.
    cached_tokens: int | None = None
    #: The KV cache the decode leg is to read, until there is a sign that it did.
    unread_kv: dict[str, Any] | None = None
    #: Seconds from `began_s`, where the policy predicts them.
    predicted_ttft_s: float | None = None
    predicted_e2e_s: float | None = None
    last_finish: str | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    #: Seconds between a first token sent early and the next.
    pause_s: float | None = None
    output_tokens: int = 0
    #: Set for a warm-up only: resolves with the finish reason, and its outputs are
    #: nobody's.
    done: Future[str] | None = field(default=None, repr=False)
    #: The id by which the client, or its API route, knows the request.
    known_id: str = field(init=False)
    arrival_time: float = field(init=False)

    def __post_init__(self) -> None:
        self.known_id = self.request.external_req_id or self.request.request_id
        self.arrival_time = self.request.arrival_time

    def forget_request(self) -> None:
        """Let the request and its prompt go; a record needs neither."""
        del self.request

    def rank(self, phase: Phase) -> int | None:
        """The engine chosen for a phase, if one was."""
        for choice in self.choices:
            if choice.phase == phase:
                return choice.rank
        return None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, once it has come."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.began_s

    def targets_left_s(
        self, now_s: float, *, early: bool
    ) -> tuple[float | None, float | None]:
        """Targets for the decode leg, in seconds from now; below 0: overdue.

        `early`: the first token is with the client, and its target is history.
        """
        ttft_s = None if early else self.wishes.ttft_s
        if ttft_s is not None:
            ttft_s -= now_s - self.began_s
        return ttft_s, self.wishes.tpot_s

    def predict(self, now_s: float) -> None:
        """Take from the last choice's price what it says of times to come.

        Pressure and lateness are weights in a price, and no times.
        """
        price = self.choices[-1].price()
        if price is None:
            return
        first_s = sum(price[term] for term in _BEFORE_THE_FIRST_TOKEN)
        first_s += now_s - self.began_s
        if self.predicted_ttft_s is None:
            step_s = price["decode_own_s"] / max(1, self.predicted_tokens)
            self.predicted_ttft_s = first_s + step_s
        if self.choices[-1].phase == Phase.DECODE:
            self.predicted_e2e_s = first_s + price["decode_own_s"]

    def record(self, now_s: float, finish: str | None, router: int) -> dict[str, Any]:
        """The journal line: what was decided, and what came of it.

        `finish` is None for a request that is still under way.
        """

        def since(moment_s: float | None) -> float | None:
            return None if moment_s is None else round(moment_s - self.began_s, 6)

        return {
            "request_id": self.known_id,
            "router": router,
            "arrival_time": self.arrival_time,
            "prompt_tokens": self.prompt_tokens,
            "model": self.features.model or self.features.adapter,
            "slo": {
                "class": self.wishes.slo,
                "ttft_s": self.wishes.ttft_s,
                "tpot_s": self.wishes.tpot_s,
            },
            "predicted_output_tokens": self.predicted_tokens,
            "predicted_by": self.predicted_by,
            "predicted_ttft_s": self.predicted_ttft_s,
            "predicted_e2e_s": self.predicted_e2e_s,
            "expected_cached_tokens": self.choices[0].cached_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "one_leg": self.cause,
            "first_token_bypass": self.bypass,
            "prefill_rank": self.rank(Phase.PREFILL),
            "decode_rank": self.rank(Phase.DECODE),
            "decisions": [
                {
                    "phase": choice.phase.name.lower(),
                    "rank": choice.rank,
                    "policy": choice.policy,
                    "reason": choice.reason,
                    "candidates": choice.candidates(),
                    "seconds": choice.seconds,
                }
                for choice in self.choices
            ],
            "prefill_s": since(self.prefill_s),
            "ttft_s": since(self.first_token_s),
            "pause_s": None if self.pause_s is None else round(self.pause_s, 6),
            "e2e_s": since(now_s),
            "finish": finish,
        }
