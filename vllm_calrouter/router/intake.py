"""Where wishes come in: headers, the body of a request, and the last gate before the
engine client.

Three places, because no single one sees everything:

- `SloHeaders` (ASGI) keeps a request's SLO headers for the code that runs for it;
- `told_by_body` wraps `to_sampling_params` of the OpenAI requests, the one moment that
  sees the body before a streaming answer has begun, so that a bad value is HTTP 400;
- `checked` wraps `InputProcessor.process_inputs`, which every request passes on every
  route before anything of it is registered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_calrouter.options import RouterOptions
from vllm_calrouter.router import wishes
from vllm_calrouter.router.admission import RefusedError
from vllm_calrouter.router.wishes import Rules, Wishes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: llm-d's request headers, in milliseconds, and the name of each in `extra_args`.
_HEADERS = {
    b"x-llm-d-slo-ttft-ms": wishes.SLO_TTFT_MS,
    b"x-llm-d-slo-tpot-ms": wishes.SLO_TPOT_MS,
}
#: Of each of them; to pass over the others quickly.
_HEADER_LENGTH = 19

#: The SLO headers of the request being handled, as its client wrote them.
_headers: ContextVar[Mapping[bytes, bytes] | None] = ContextVar(
    "calrouter_headers", default=None
)

#: After how many seconds the client of the request being handled may ask again, once
#: it was refused; a list, so that what runs for the request can fill it.
_retry_after_s: ContextVar[list[int] | None] = ContextVar(
    "calrouter_retry_after", default=None
)

#: Whether the request being handled is a beam search that was let in: its steps pass
#: the last gate one by one, and none is refused when others are done.
_beams_let_in: ContextVar[bool] = ContextVar("calrouter_beams_let_in", default=False)

#: The rules of this process's router; None: no router, nothing is read.
_rules: Rules | None = None

#: Lets requests in, or raises `RefusedError`; None: all are let in.
_admit: Callable[[Wishes], None] | None = None


def activate(options: RouterOptions) -> None:
    """Read wishes in this process from now on."""
    global _rules
    _rules = Rules(options)


def guard(admit: Callable[[Wishes], None]) -> None:
    """Ask from now on whether a request is let in.

    Args:
        admit: raises `RefusedError` for one that is not.
    """
    global _admit
    _admit = admit


class SloHeaders:
    """ASGI middleware that keeps the SLO headers for the request they came with, and
    tells a client that was refused when to ask again.

    The variables are set for every request, also to nothing: uvicorn starts a pipelined
    request in the context of the one before it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in ("http", "websocket"):
            found: dict[bytes, bytes] | None = None
            for name, value in scope["headers"]:
                if len(name) == _HEADER_LENGTH and name in _HEADERS:
                    found = found or {}
                    # As elsewhere in HTTP servers, the first of several counts.
                    found.setdefault(name, value)
            _headers.set(found)
            _beams_let_in.set(False)
        if _admit is not None and scope["type"] == "http":
            retry_after_s: list[int] = []
            _retry_after_s.set(retry_after_s)
            send = _telling_when(send, retry_after_s)
        return self._app(scope, receive, send)


def _telling_when(send: Send, retry_after_s: list[int]) -> Send:
    async def told(message: Any) -> None:
        if retry_after_s and message["type"] == "http.response.start":
            header = (b"retry-after", str(retry_after_s[0]).encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return told


def told_by_body(
    original: Callable[..., SamplingParams], request: Any, *args: Any, **kwargs: Any
) -> SamplingParams:
    """`to_sampling_params`, with what the body and the headers say in `extra_args`.

    Raises:
        VLLMValidationError: a wish that cannot be meant.
        RefusedError: it would wait longer than its class allows.
    """
    params = original(request, *args, **kwargs)
    if _rules is None:
        return params
    params.extra_args = _told(request, params.extra_args)
    _rules.check(params)
    _let_in(_rules, params.extra_args, vars(request).get("model"))
    return params


def told_by_beam_search(
    original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
) -> Any:
    """`to_beam_search_params`: only refuses; a beam search's steps carry no wishes.

    Raises:
        VLLMValidationError, RefusedError: as `told_by_body`.
    """
    if _rules is not None:
        extra, model = _told(request, request.vllm_xargs), vars(request).get("model")
        _rules.read(extra, model)
        _let_in(_rules, extra, model)
        _beams_let_in.set(True)
    return original(request, *args, **kwargs)


def checked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`InputProcessor.process_inputs`: nothing passes whose wishes cannot be meant.

    Raises:
        VLLMValidationError, RefusedError: as `told_by_body`.
    """
    request = original(*args, **kwargs)
    params = request.sampling_params
    if params is None or _rules is None:
        return request
    if (headers := _headers.get()) is not None:
        params.extra_args = dict(params.extra_args or {})
        _fold_headers(params.extra_args, headers)
    _rules.check(params)
    if not _was_let_in(request):
        _let_in(_rules, params.extra_args, None)
    return request


def _was_let_in(request: Any) -> bool:
    """By its body, before a streamed answer had begun; as part of a session, of which
    vLLM checks an empty one first; or as a step of a beam search."""
    extra = request.sampling_params.extra_args or ()
    return wishes.ABOUT in extra or request.resumable or _beams_let_in.get()


def _let_in(rules: Rules, extra: Mapping[str, Any] | None, model: str | None) -> None:
    if _admit is None:
        return
    try:
        _admit(rules.read(extra, model))
    except RefusedError as refusal:
        if (told := _retry_after_s.get()) is not None:
            told[:] = [refusal.retry_after_s]
        raise


def _told(request: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """`extra_args` with all that the body and the headers say."""
    # vLLM shares this dictionary among the prompts of a batch: change a copy.
    extra = dict(given) if given else {}
    extra[wishes.ABOUT] = _about(request)
    if (unknown := request.model_extra) and "nvext" in unknown:
        _fold_nvext(extra, unknown["nvext"])
    if (headers := _headers.get()) is not None:
        _fold_headers(extra, headers)
    return extra


#: Routes by the class of their request; what is not here has none.
_ROUTES = {
    "CompletionRequest": "completions",
    "ChatCompletionRequest": "chat",
    "ResponsesRequest": "responses",
}


def _about(request: Any) -> dict[str, Any]:
    # Asking a pydantic model for what it lacks takes microseconds; its fields do not.
    fields = vars(request)
    told = {"model": fields["model"], "route": _ROUTES.get(type(request).__name__)}
    if user := fields.get("user"):
        told["user"] = user[:_MOST_USER_CHARACTERS]
    if fields.get("tools"):
        told["tools"] = True
    if effort := fields.get("reasoning_effort"):
        told["reasoning"] = effort
    elif (reasoning := fields.get("reasoning")) is not None:
        told["reasoning"] = reasoning.effort
    return told


#: Enough to tell users apart; a longer name must not cost memory.
_MOST_USER_CHARACTERS = 64


def _fold_headers(extra: dict[str, Any], headers: Mapping[bytes, bytes]) -> None:
    for header, value in headers.items():
        target_ms = wishes.target_ms(_number(value), header.decode(), "the header ")
        extra.setdefault(_HEADERS[header], target_ms)


def _number(value: bytes) -> float | str:
    text = value.decode("latin-1")
    try:
        return float(text)
    except ValueError:
        return text


def _fold_nvext(extra: dict[str, Any], nvext: Any) -> None:
    """Take in the one field of Dynamo's extension that the router knows."""
    hints = _object(_object(nvext, "nvext").get("agent_hints"), "nvext.agent_hints")
    osl = wishes.tokens(hints.get("osl"), "osl", "nvext.agent_hints.")
    if osl is not None:
        extra.setdefault(wishes.OUTPUT_TOKENS, osl)


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise VLLMValidationError(
        f"{name} must be an object; got {wishes.shown(value)}", parameter=name
    )
