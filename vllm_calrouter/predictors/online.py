"""Learns from what finishes, by kind of request.

Kinds are nested, from all requests of a model to those of one user with prompts of one
size; the narrowest one that was ever seen answers, and leans on the wider ones for what
it has not seen (`life_table.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from vllm_calrouter.predictors.life_table import Curve, LifeTable, geometric
from vllm_calrouter.predictors.predictor import Features, Predictor

#: A curve is drawn again when this share of its outputs is new.
_STALE_SHARE = 1 / 16

#: Ways to end that say nothing of a length.
_SAYS_NOTHING = ("error",)
#: Ways to end that say "at least so long".
_CUT_OFF = ("abort", "length")


class _Kind:
    """One kind's table and the curve last drawn from it."""

    __slots__ = ("curve", "outputs", "since", "table")

    def __init__(self, memory: int, wider: Curve) -> None:
        self.table = LifeTable(memory)
        self.curve = wider
        self.outputs = 0
        self.since = 0

    def learn(self, tokens: int, ended: bool, wider: Curve, memory: int) -> None:
        self.table.add(tokens, ended=ended)
        self.outputs = min(self.outputs + 1, memory)
        self.since += 1
        if self.since >= self.outputs * _STALE_SHARE:
            self.curve = self.table.curve(wider)
            self.since = 0


class Online(Predictor):
    """Expects of a request what its kind has shown so far.

    A request whose stop string vLLM finds ends, for the router, like one whose client
    has left; where stop strings were given an abort is taken for the former.

    Args:
        memory: finished requests of a kind after which an older one weighs 1/e.
        keys: kinds kept; beyond, those not heard of longest are forgotten.
    """

    name = "online"

    def __init__(self, memory: int, keys: int) -> None:
        self._memory = memory
        self._most = keys
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._priors: dict[int, Curve] = {}

    def __len__(self) -> int:
        """Kinds of requests remembered."""
        return len(self._kinds)

    def _expect(self, features: Features) -> float:
        return self._curve(features).mean(features.max_tokens)

    def _expect_more(self, features: Features, produced: int) -> float:
        rest = self._curve(features).remaining(produced)
        return features.prior_tokens if rest is None else rest

    def finished(self, features: Features, produced: int, finish: str) -> None:
        if produced < 1 or finish in _SAYS_NOTHING:
            return
        ended = finish not in _CUT_OFF or (finish == "abort" and features.stops)
        wider = self._prior(features)
        keys = _keys(features)
        for key in reversed(keys):
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._kinds[key] = _Kind(self._memory, wider)
            kind.learn(produced, ended, wider, self._memory)
            wider = kind.curve
        # The widest last: it is the one to keep longest.
        for key in keys:
            self._kinds.move_to_end(key)
        while len(self._kinds) > self._most:
            self._kinds.popitem(last=False)

    def _curve(self, features: Features) -> Curve:
        for key in _keys(features):
            if (kind := self._kinds.get(key)) is not None:
                return kind.curve
        return self._prior(features)

    def _prior(self, features: Features) -> Curve:
        tokens = features.prior_tokens
        if (curve := self._priors.get(tokens)) is None:
            # As many as the options have figures for models.
            curve = self._priors[tokens] = geometric(tokens)
        return curve


def _keys(features: Features) -> list[Hashable]:
    """The kinds a request belongs to, the narrowest first."""
    model = (features.model, features.adapter)
    use = (features.route, features.tools, features.reasoning, features.structured)
    # Prompts of one octave.
    size = features.prompt_tokens.bit_length()
    keys: list[Hashable] = [(*model, *use, size), (*model, *use), model]
    if features.user is not None:
        keys.insert(0, (*model, *use, size, features.user))
    return keys
