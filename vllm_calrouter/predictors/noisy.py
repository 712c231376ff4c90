"""The true length with an error of known size, for experiments.

The error is a factor, log-normal with mean 1 and standard deviation `noise`: unbiased,
so that a bad result is the doing of the spread alone.
"""

from __future__ import annotations

import math
import random

from vllm_calrouter.predictors.predictor import Features, Predictor


class Noisy(Predictor):
    """A given seed makes the same error for a router's n-th request in every run.

    Args:
        noise: standard deviation of predicted / true.
        seed: of the errors.
    """

    name = "noisy"
    heeds_hints = False

    def __init__(self, noise: float, seed: int) -> None:
        variance = math.log1p(noise * noise)
        self._mu = -variance / 2
        self._sigma = math.sqrt(variance)
        self._seed = seed

    def _expect(self, features: Features) -> float:
        true = features.true_tokens or features.prior_tokens
        # A generator a request: asked again, it says the same of the same request.
        draw = random.Random(f"{self._seed}:{features.number}")
        return true * draw.lognormvariate(self._mu, self._sigma)
