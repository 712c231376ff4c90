"""The client's own figure, and the configured length where it gives none."""

from vllm_calrouter.predictors.predictor import Features, Predictor


class Hint(Predictor):
    name = "hint"

    def _expect(self, features: Features) -> float:
        return features.prior_tokens
