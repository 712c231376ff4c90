"""The true length, for experiments: the bound no predictor can pass.

The truth comes with each request (`vllm_xargs.true_output_tokens`, or `max_tokens`
where `ignore_eos` makes it the length); one that lacks it is refused.
"""

from vllm_calrouter.predictors.predictor import Features, Predictor


class Oracle(Predictor):
    name = "oracle"
    heeds_hints = False

    def _expect(self, features: Features) -> float:
        # Only the router's own requests come without.
        return features.true_tokens or features.prior_tokens
