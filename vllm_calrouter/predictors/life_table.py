"""How long outputs of one kind live: a life table that forgets, and its curve.

Lengths fall into buckets of half an octave. Per bucket the table counts outputs that
ended there and outputs that were cut off there (aborted, or at `max_tokens`). The share
that ends, of those that got so far, is the bucket's hazard; those cut off are half
counted, as in an actuarial life table (Cutler and Ederer, 1958). What is cut off thus
says "at least so long" and never "so short". Each hazard is shrunk towards that of a
wider kind by `_PRIOR_OUTPUTS` outputs' worth (credibility, Bühlmann 1967), so few
outputs say little and many say all.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import NamedTuple

_STEPS_PER_OCTAVE = 2
_OCTAVES = 20
_BUCKETS = _STEPS_PER_OCTAVE * _OCTAVES + 1
#: Where each bucket begins, in tokens, and where the last one ends.
_EDGES = (0.0, *(2 ** (k / _STEPS_PER_OCTAVE) for k in range(1, _BUCKETS + 1)))

_PRIOR_OUTPUTS = 4.0
#: Weights grow instead of old ones shrinking; beyond this all are scaled down.
_LARGEST_UNIT = 1e12
#: A smaller share alive is rounding.
_NOBODY = 1e-9


def bucket(tokens: int) -> int:
    """The bucket that a length of at least 1 token falls into."""
    return min(int(_STEPS_PER_OCTAVE * math.log2(tokens)), _BUCKETS - 1)


class Curve(NamedTuple):
    """What a life table says. One entry a bucket."""

    #: Share that ends in the bucket, of those that reach it.
    hazards: list[float]
    #: Where in it they end, in tokens.
    ends: list[float]
    #: Share that reaches it.
    alive: list[float]
    #: Tokens still to come from its beginning on, times `alive`; one entry more.
    rest: list[float]

    def mean(self, most: int | None = None) -> float:
        """Expected length, where nothing gets longer than `most`."""
        if most is None:
            return self.rest[0]
        at = bucket(most)
        return self.rest[0] - self.rest[at] + self._area(at, most)

    def remaining(self, produced: int) -> float | None:
        """Expected rest of an output that has `produced` tokens (mean residual life).

        None: the table knows of nothing so long.
        """
        if produced < 1:
            return self.rest[0]
        if produced >= _EDGES[-1]:
            return None
        at = bucket(produced)
        share, _ = self._ended(at, produced)
        alive = self.alive[at] * (1 - self.hazards[at] * share)
        if alive < _NOBODY:
            return None
        return max(self.rest[at] - self._area(at, produced), 0.0) / alive

    def _area(self, at: int, tokens: int) -> float:
        """Tokens that bucket `at` adds up to `tokens`, times the share alive in it."""
        _, lost = self._ended(at, tokens)
        return self.alive[at] * (tokens - _EDGES[at] - self.hazards[at] * lost)

    def _ended(self, at: int, tokens: int) -> tuple[float, float]:
        """Of those that end in bucket `at`: the share that has by `tokens`, and the
        tokens up to there that they lack by having ended.

        They end evenly around their mean, as far as the bucket lets them.
        """
        mean = self.ends[at]
        half = min(mean - _EDGES[at], _EDGES[at + 1] - mean)
        into = tokens - (mean - half)
        if into <= 0:
            return 0.0, 0.0
        if into >= 2 * half:
            return 1.0, tokens - mean
        return into / (2 * half), into * into / (4 * half)


def make_curve(hazards: list[float], ends: list[float]) -> Curve:
    """The curve of given hazards."""
    alive = []
    now = 1.0
    for hazard in hazards:
        alive.append(now)
        now *= 1 - hazard
    rest = [0.0] * (_BUCKETS + 1)
    for at in range(_BUCKETS - 1, -1, -1):
        begin, stop, hazard = _EDGES[at], _EDGES[at + 1], hazards[at]
        tokens = hazard * (ends[at] - begin) + (1 - hazard) * (stop - begin)
        rest[at] = rest[at + 1] + alive[at] * tokens
    return Curve(hazards, ends, alive, rest)


def geometric(mean: float) -> Curve:
    """The curve of lengths without memory: what to assume knowing only their mean."""
    hazards, ends = [], []
    for begin, stop in itertools.pairwise(_EDGES):
        width = (stop - begin) / mean
        hazards.append(-math.expm1(-width))
        # The mean of an exponential that is known to end within the bucket.
        lost = (stop - begin) / math.expm1(width) if width < 50 else 0.0
        ends.append(begin + mean - lost)
    return make_curve(hazards, ends)


class LifeTable:
    """Counts ended and cut-off outputs, older ones weighing less.

    Args:
        memory: outputs after which an older one weighs 1/e.
    """

    __slots__ = ("_cut", "_ended", "_growth", "_tokens", "_unit")

    def __init__(self, memory: int) -> None:
        self._growth = math.exp(1 / memory)
        self._unit = 1.0
        self._ended = array("d", bytes(8 * _BUCKETS))
        self._cut = array("d", bytes(8 * _BUCKETS))
        self._tokens = array("d", bytes(8 * _BUCKETS))

    def add(self, tokens: int, *, ended: bool) -> None:
        """Take in an output of `tokens` tokens: one that ended, or was cut off."""
        at = bucket(tokens)
        if ended:
            self._ended[at] += self._unit
            self._tokens[at] += self._unit * tokens
        else:
            self._cut[at] += self._unit
        self._unit *= self._growth
        if self._unit > _LARGEST_UNIT:
            self._rescale()

    def _rescale(self) -> None:
        for column in (self._ended, self._cut, self._tokens):
            for at in range(_BUCKETS):
                column[at] /= self._unit
        self._unit = 1.0

    def curve(self, wider: Curve) -> Curve:
        """What the table says, leaning on a wider kind where it knows little."""
        hazards, ends = list(wider.hazards), list(wider.ends)
        prior = _PRIOR_OUTPUTS * self._unit
        reached = 0.0
        for at in range(_BUCKETS - 1, -1, -1):
            ended, cut = self._ended[at], self._cut[at]
            reached += ended + cut
            if reached:
                at_risk = reached - cut / 2 + prior
                hazards[at] = (ended + prior * hazards[at]) / at_risk
            if ended:
                ends[at] = min(self._tokens[at] / ended, _EDGES[at + 1])
        return make_curve(hazards, ends)
