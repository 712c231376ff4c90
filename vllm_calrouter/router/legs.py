"""The legs of a request: what each engine is asked to do.

Pure functions on vLLM's request type: no state, no I/O.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_calrouter.messages import BOOKING

KV_PARAMS = "kv_transfer_params"

#: Keep the KV cache for a reader.
_FOR_A_READER = {"do_remote_decode": True, "do_remote_prefill": False}

#: What a prefill leg asks for when its token is thrown away, so it is the cheapest one:
#: nothing of the user's sampling (grammar, scores, penalties) may cost anything there.
_PREFILL_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


def why_one_leg(request: EngineCoreRequest) -> str | None:
    """Why one engine must serve the whole request, or None when it can be split.

    The answer is the `cause` label of `vllm:calrouter_one_leg_total`.
    """
    if request.pooling_params is not None:
        return "pooling"
    if request.data_parallel_rank is not None:
        return "forced_rank"
    if request.resumable:
        return "streaming_input"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.mm_features:
        return "multimodal"
    return _why_params_need_one_leg(request.sampling_params)


def _why_params_need_one_leg(params: SamplingParams) -> str | None:
    if (params.extra_args or {}).get(KV_PARAMS):
        return "own_kv_transfer"
    # Scores of prompt tokens exist only where the prompt ran.
    if params.prompt_logprobs is not None or (
        getattr(params, "prompt_logprob_token_ids", None) is not None
    ):
        return "prompt_logprobs"
    if params.max_tokens == 1:
        return "single_token"
    return None


def ends_with_prefill(cause: str | None) -> bool:
    """Whether a one-leg request is prefill work only (for the choice of its pool)."""
    return cause in ("pooling", "single_token")


def prompt_tokens(request: EngineCoreRequest) -> int:
    """Length of the prompt in tokens, whatever form it came in."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)


def one_leg(
    request: EngineCoreRequest, rank: int, booking: dict[str, Any]
) -> EngineCoreRequest:
    """The request as it is, sent to one engine."""
    leg = _to(rank, request)
    if request.pooling_params is not None:
        leg.pooling_params = copy(request.pooling_params)
        kwargs = request.pooling_params.extra_kwargs or {}
        leg.pooling_params.extra_kwargs = {**kwargs, BOOKING: booking}
    else:
        _add(leg, {BOOKING: booking})
    return leg


def prefill_leg(
    request: EngineCoreRequest,
    rank: int,
    booking: dict[str, Any],
    *,
    first_token: bool = False,
) -> EngineCoreRequest:
    """Compute the prompt's KV cache on `rank` and keep it there for a reader.

    `first_token`: the token it samples is the request's first, so it is sampled as the
    request wants it.
    """
    leg = _to(rank, request, "-prefill")
    if not first_token:
        leg.sampling_params = _PREFILL_PARAMS
    _add(leg, {BOOKING: booking, KV_PARAMS: _FOR_A_READER})
    leg.sampling_params.max_tokens = 1
    # More than max_tokens is refused; one bans the end of the text just the same.
    leg.sampling_params.min_tokens = min(leg.sampling_params.min_tokens, 1)
    return leg


def decode_leg(
    request: EngineCoreRequest,
    rank: int,
    booking: dict[str, Any],
    kv_params: dict[str, Any] | None,
    first_token: list[int] | None = None,
) -> EngineCoreRequest:
    """Everything after the prompt, on `rank`, reading the KV cache named there.

    It keeps the request's own id, so its outputs reach the client untouched. Without
    `kv_params` the engine computes the prompt itself. With `first_token` (its id in a
    list) the text goes on from there, one token shorter.
    """
    leg = one_leg(request, rank, booking)
    if kv_params is not None:
        leg.sampling_params.extra_args[KV_PARAMS] = kv_params
    if first_token:
        leg.prompt_token_ids = request.prompt_token_ids + first_token
        _shorten(leg.sampling_params, len(first_token))
    return leg


def _to(rank: int, request: EngineCoreRequest, suffix: str = "") -> EngineCoreRequest:
    """A copy for one engine, under a name of its own where `suffix` makes one."""
    leg = copy(request)
    leg.data_parallel_rank = rank
    leg.request_id += suffix
    return leg


def _shorten(params: SamplingParams, tokens: int) -> None:
    """Leave out what of the output is already there."""
    if params.max_tokens is not None:
        params.max_tokens -= tokens
    params.min_tokens = max(0, params.min_tokens - tokens)


def _add(leg: EngineCoreRequest, extra: dict[str, Any]) -> None:
    """Give a leg more `extra_args`; those of the request stay as they are."""
    params = copy(leg.sampling_params)
    params.extra_args = {**(params.extra_args or {}), **extra}
    leg.sampling_params = params


def release_leg(
    request: EngineCoreRequest, rank: int, kv_params: dict[str, Any]
) -> EngineCoreRequest:
    """Free a KV cache nobody will read: a decode leg that ends before it begins.

    Without it the blocks stay pinned on the prefill engine until NIXL's lease ends.
    """
    leg = _to(rank, request, "-release")
    # Nothing of the user's sampling: a grammar that does not compile would end the leg
    # before it reaches the connector.
    leg.sampling_params = SamplingParams(
        max_tokens=1, detokenize=False, extra_args={KV_PARAMS: kv_params}
    )
    leg.abort_immediately = True
    return leg
