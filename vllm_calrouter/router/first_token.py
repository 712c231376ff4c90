"""When the token that a prefill engine samples is the request's first, and its last.

Prefill ends by sampling a token. Sent to the client at once it takes the transfer and
the decode engine's queue out of TTFT. The decode leg then continues from the prompt
plus that token, so it is exact wherever the second token depends on nothing but the
tokens before it. Where it depends on more, the token is thrown away and the decode
engine samples it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from vllm_calrouter.options import RouterOptions

#: Below it vLLM samples greedily, and a seed means nothing
#: (`vllm.sampling_params._SAMPLING_EPS`).
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What decides whether a first token is sent early.

    Args:
        enabled: the operator wants it.
        never: why no request of this server can have it, or None.
        watermark: the server marks its text by the tokens before each one.
        max_model_len: tokens at which vLLM ends a text; None: no limit.
        tokenizer: finds stop strings; None: the server has no tokenizer.
    """

    enabled: bool = True
    never: str | None = None
    watermark: bool = False
    max_model_len: int | None = None
    tokenizer: Any = None

    def why_not(self, request: EngineCoreRequest, *, wanted: bool = True) -> str | None:
        """Why the first token must come from the decode engine, or None.

        `wanted`: by its client.

        The answer is the `cause` label of `vllm:calrouter_first_token_bypasses_total`.
        """
        if not self.enabled:
            return "off"
        if self.never is not None:
            return self.never
        params = request.sampling_params
        if self.watermark and params.watermarking is not False:
            return "watermark"
        if not wanted:
            return "client"
        return _why_params_forbid(params)

    def ends(
        self, request: EngineCoreRequest, output: EngineCoreOutput
    ) -> FinishReason | None:
        """Why the request ends with this first token of it, or None when it goes on.

        A prefill leg may have one token only, so it always ends; this tells the end of
        the leg from the end of the request.
        """
        if output.finish_reason != FinishReason.LENGTH:
            return output.finish_reason
        tokens = len(request.prompt_token_ids) + 1
        if self.max_model_len is not None and tokens >= self.max_model_len:
            return FinishReason.LENGTH
        if self._ends_in_stop_string(request, output.new_token_ids):
            return FinishReason.STOP
        return None

    def _ends_in_stop_string(
        self, request: EngineCoreRequest, token_ids: list[int]
    ) -> bool:
        stop = request.sampling_params.stop
        if not stop or self.tokenizer is None:
            return False
        # To be sure takes the detokenizer, which reads the whole prompt. It is not
        # asked where the token alone shows no stop string: if there is one all the
        # same, the API server finds it and aborts the decode leg.
        alone = self.tokenizer.decode(token_ids)
        strings = [stop] if isinstance(stop, str) else stop
        if not any(string.strip() in alone for string in strings):
            return False
        text = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        return text.update(token_ids, False) is not None


def _why_params_forbid(params: SamplingParams) -> str | None:
    """What of the sampling looks back on earlier output, or draws on a state."""
    if params.structured_outputs is not None:
        return "structured_output"
    # A repetition penalty counts prompt and output alike, so it may stay.
    if params.presence_penalty or params.frequency_penalty:
        return "penalties"
    if params.seed is not None and params.temperature >= _GREEDY_BELOW:
        return "seed"
    # A banned word of one token is banned wherever it stands.
    if any(len(word) > 1 for word in params._bad_words_token_ids or ()):
        return "bad_words"
    if params.thinking_token_budget is not None:
        return "thinking_budget"
    if params.repetition_detection is not None:
        return "repetition_detection"
    if getattr(params, "trace_decode_token_ids", None) is not None:
        return "forced_tokens"
    return None


def first_token_rules(config: VllmConfig, options: RouterOptions) -> FirstToken:
    """The rules of a server, read from its configuration."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return FirstToken(
        enabled=options.first_token,
        never=_why_never(config),
        watermark=getattr(config, "watermark_config", None) is not None,
        max_model_len=config.model_config.max_model_len,
        tokenizer=cached_tokenizer_from_config(config.model_config),
    )


def _why_never(config: VllmConfig) -> str | None:
    # A draft model would start the decode leg one token short of what it has seen.
    if config.speculative_config is not None:
        return "speculative_decoding"
    if config.model_config.logits_processors or entry_points(
        group="vllm.logits_processors"
    ):
        return "logits_processors"
    # What is written next to a token depends on more than what is before it.
    if getattr(config.model_config, "is_diffusion", False):
        return "diffusion"
    return None
