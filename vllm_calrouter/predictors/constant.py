"""The same for every request of a model, whatever its client says.

For comparison: what a policy is worth when it cannot tell requests apart.
"""

from vllm_calrouter.predictors.predictor import Features, Predictor


class Constant(Predictor):
    name = "constant"
    heeds_hints = False

    def _expect(self, features: Features) -> float:
        return features.prior_tokens
