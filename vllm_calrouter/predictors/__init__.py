"""How long an output will be: one predictor a file.

A client's own figure beats every predictor, save in experiments (`constant`, `oracle`,
`noisy`), which would otherwise not measure what they are about.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_calrouter.options import RouterOptions
from vllm_calrouter.predictors.constant import Constant
from vllm_calrouter.predictors.hint import Hint
from vllm_calrouter.predictors.max_tokens import MaxTokens
from vllm_calrouter.predictors.noisy import Noisy
from vllm_calrouter.predictors.online import Online
from vllm_calrouter.predictors.oracle import Oracle
from vllm_calrouter.predictors.predictor import Features, Predictor

__all__ = ["PREDICTORS", "Features", "Predictor", "make_predictor"]

#: By name, as `--router-config.predictor` takes it: makes one for router `index`.
PREDICTORS: dict[str, Callable[[RouterOptions, int], Predictor]] = {
    "hint": lambda options, index: Hint(),
    "constant": lambda options, index: Constant(),
    "max_tokens": lambda options, index: MaxTokens(),
    "online": lambda options, index: Online(options.online_memory, options.online_keys),
    "oracle": lambda options, index: Oracle(),
    # Routers must not draw alike, or their errors would come in pairs.
    "noisy": lambda options, index: Noisy(options.noise, options.noise_seed + index),
}


def make_predictor(options: RouterOptions, index: int = 0) -> Predictor:
    """The predictor that the options choose, for the router of one API server."""
    return PREDICTORS[options.predictor](options, index)
