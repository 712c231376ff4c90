"""What a predictor is asked, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request's output before it begins.

    Lengths are tokens. `prior_tokens` is what to assume where nothing better is known;
    `hint_tokens` is the client's own figure; `true_tokens` serves experiments only.
    """

    prior_tokens: int
    #: Which request of its router this is.
    number: int = 0
    prompt_tokens: int = 0
    min_tokens: int = 0
    max_tokens: int | None = None
    hint_tokens: int | None = None
    true_tokens: int | None = None
    model: str | None = None
    adapter: str | None = None
    route: str | None = None
    user: str | None = None
    tools: bool = False
    reasoning: str | None = None
    structured: bool = False
    #: Whether the client gave stop strings. vLLM ends those requests by aborting them.
    stops: bool = False


class Predictor(ABC):
    """Predicts output lengths in tokens. O(1) a call, no I/O, bounded memory."""

    #: As `--router-config.predictor` names it.
    name: str

    #: Whether the client's own figure beats this predictor's.
    heeds_hints = True

    def predict(self, features: Features) -> int:
        """Expected length of a whole output, within the request's own limits."""
        hint = features.hint_tokens
        guess = hint if self.heeds_hints and hint else self._expect(features)
        if features.max_tokens is not None:
            guess = min(guess, features.max_tokens)
        return max(round(guess), features.min_tokens, 1)

    def remaining(self, features: Features, produced: int) -> int:
        """Expected tokens still to come of an output that has `produced` already.

        At least 1: a request that runs is not done. A client's figure that the output
        has outgrown says nothing more.
        """
        hint = features.hint_tokens
        if self.heeds_hints and hint and produced < hint:
            rest: float = hint - produced
        else:
            rest = self._expect_more(features, produced)
        if features.max_tokens is not None:
            rest = min(rest, features.max_tokens - produced)
        return max(round(rest), features.min_tokens - produced, 1)

    def source(self, features: Features) -> str:
        """Who predicts for this request: `hint`, or the predictor's name."""
        return "hint" if self.heeds_hints and features.hint_tokens else self.name

    @abstractmethod
    def _expect(self, features: Features) -> float:
        """Expected length, hints and limits aside."""

    def _expect_more(self, features: Features, produced: int) -> float:
        # Without a distribution, a length that was passed was wrong by about itself.
        expected = self._expect(features)
        return expected - produced if produced < expected else produced

    def finished(self, features: Features, produced: int, finish: str) -> None:  # noqa: B027
        """A request has ended after `produced` tokens, for the reason `finish`."""
