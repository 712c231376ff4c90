"""As long as the request allows: never short, often far too long.

Right for clients that set `max_tokens` to what they need. vLLM fills in what is left of
the context where a client sets none.
"""

from vllm_calrouter.predictors.predictor import Features, Predictor


class MaxTokens(Predictor):
    name = "max_tokens"

    def _expect(self, features: Features) -> float:
        if features.max_tokens is None:
            return features.prior_tokens
        return features.max_tokens
