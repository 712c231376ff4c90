"""What a request wishes for: its SLO and the length its client expects.

Wishes travel in `SamplingParams.extra_args` under the plain names below, which is where
vLLM puts `vllm_xargs`; what arrives by header or in `nvext` is folded in under the same
names (`intake.py`).

Precedence, for each figure by itself:

1. `vllm_xargs` (the application knows best);
2. the headers, for the SLO; `nvext.agent_hints.osl`, for the length;
3. the SLO class that `vllm_xargs.slo` names;
4. the class of the served model (`defaults.MODEL.slo`), then `default_slo`.

Classes are those of `slo_classes`; where none are written, the profile's. A figure thus
beats a class, and the body beats a header. `defaults.MODEL.output_tokens` is no wish:
it is what a predictor starts from (`Rules.prior_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.exceptions import VLLMValidationError

from vllm_calrouter.calibration import Profile, load
from vllm_calrouter.options import RouterOptions

#: Names in `vllm_xargs` that are the router's; all others are left alone.
SLO = "slo"
SLO_TTFT_MS = "slo_ttft_ms"
SLO_TPOT_MS = "slo_tpot_ms"
OUTPUT_TOKENS = "output_tokens"
TRUE_OUTPUT_TOKENS = "true_output_tokens"
FIRST_TOKEN = "first_token"

#: Key in `extra_args` under which `intake.py` tells what the body says of a request
#: (`About`); a client cannot set it, `vllm_xargs` has no dictionaries.
ABOUT = "calrouter"

#: A target of more than a day is a mistake (seconds for milliseconds, say).
_MOST_MS = 86_400_000
#: No model writes more; a larger figure is a mistake.
_MOST_TOKENS = 10_000_000
#: What of a refused value is repeated to the client.
_MOST_SHOWN = 60


#: Names are remembered; what is no name must not cost memory.
_Short = Annotated[str, Meta(max_length=500)]


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What one request wishes for; None: nothing asked.

    `ttft_s` and `tpot_s` are targets in seconds, after all defaults. A long prompt may
    take `ttft_prefill_multiple` times what its prefill takes alone, if that is more
    (`Rules.for_prompt`). `output_tokens` is the client's own figure.
    `true_output_tokens` serves experiments only. `first_token` is whether it may come
    early, with a pause after it.
    """

    slo: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_prefill_multiple: float = 0.0
    output_tokens: int | None = None
    true_output_tokens: int | None = None
    first_token: bool = True


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the body of a request says of it beyond its prompt and its sampling."""

    model: _Short | None = None
    route: _Short | None = None
    user: _Short | None = None
    tools: bool = False
    reasoning: _Short | None = None


class Rules:
    """Reads wishes under the SLO classes and defaults of the options.

    Args:
        options: `slo_classes`, or without them the `profile`'s; `defaults`,
            `default_slo`, `output_tokens`.

    Raises ProfileError.
    """

    def __init__(self, options: RouterOptions) -> None:
        self._profile: Profile | None = None
        if options.slo_classes:
            self._classes = _configured(options)
        elif options.profile is not None:
            self._profile = load(options.profile)
            self._classes = _promised(self._profile)
        else:
            self._classes = {}
        self._nothing = Wishes()
        self._default = self._class(options.default_slo)
        self._by_model = {
            model: self._class(defaults.slo)
            for model, defaults in options.defaults.items()
            if defaults.slo is not None
        }
        self._priors = {
            model: defaults.output_tokens
            for model, defaults in options.defaults.items()
            if defaults.output_tokens is not None
        }
        self._prior = options.output_tokens
        #: Whether requests must say how long they will be.
        self._needs_truth = options.predictor in ("oracle", "noisy")

    def _class(self, name: str | None) -> Wishes:
        return self._nothing if name is None else self._classes[name]

    def prior_tokens(self, model: str | None) -> int:
        """Output length assumed of a model nothing else is known about."""
        return self._priors.get(model, self._prior) if model else self._prior

    def defaults(self, model: str | None) -> Wishes:
        """Wishes of a request that states none."""
        return self._by_model.get(model, self._default) if model else self._default

    def read(self, extra: Mapping[str, Any] | None, model: str | None) -> Wishes:
        """The wishes in a request's `extra_args`.

        Raises:
            VLLMValidationError: a value cannot be meant; HTTP 400.
        """
        base = self.defaults(model)
        if not extra or OURS.isdisjoint(extra):
            return base
        if (named := extra.get(SLO)) is not None:
            base = self._named(named)
        ttft_ms = target_ms(extra.get(SLO_TTFT_MS), SLO_TTFT_MS)
        tpot_ms = target_ms(extra.get(SLO_TPOT_MS), SLO_TPOT_MS)
        multiple = base.ttft_prefill_multiple
        return Wishes(
            slo=base.slo,
            ttft_s=base.ttft_s if ttft_ms is None else ttft_ms / 1e3,
            tpot_s=base.tpot_s if tpot_ms is None else tpot_ms / 1e3,
            ttft_prefill_multiple=multiple if ttft_ms is None else 0.0,
            output_tokens=tokens(extra.get(OUTPUT_TOKENS), OUTPUT_TOKENS),
            true_output_tokens=tokens(
                extra.get(TRUE_OUTPUT_TOKENS), TRUE_OUTPUT_TOKENS
            ),
            first_token=switch(extra.get(FIRST_TOKEN), FIRST_TOKEN),
        )

    def for_prompt(self, wishes: Wishes, prompt_tokens: int) -> Wishes:
        """The same with the TTFT target that a prompt of this length has.

        At the profile's costs, whatever is measured since: a promise stays the same.
        """
        multiple = wishes.ttft_prefill_multiple
        if not multiple or self._profile is None or wishes.ttft_s is None:
            return wishes
        own_s = multiple * self._profile.costs_of(prefill=True).prefill_s(prompt_tokens)
        if own_s <= wishes.ttft_s:
            return wishes
        return msgspec.structs.replace(wishes, ttft_s=own_s)

    def check(self, params: Any) -> None:
        """Refuse a request whose wishes cannot be meant, or that lacks the truth an
        experiment's predictor needs.

        Raises:
            VLLMValidationError: as `read`.
        """
        extra = params.extra_args
        if not self._needs_truth and (not extra or OURS.isdisjoint(extra)):
            return
        # Defaults are right by construction: the model does not matter here.
        wishes = self.read(extra, None)
        if self._needs_truth and truth(wishes, params) is None:
            raise VLLMValidationError(
                "the predictor of this server is an experiment that has to be told "
                "each output's length: give vllm_xargs.true_output_tokens, or "
                "ignore_eos with max_tokens",
                parameter=TRUE_OUTPUT_TOKENS,
            )

    def _named(self, name: Any) -> Wishes:
        if isinstance(name, str) and (found := self._classes.get(name)) is not None:
            return found
        known = ", ".join(sorted(self._classes))
        advice = (
            f"one of {known}" if known else "left out: this server has no SLO classes"
        )
        raise VLLMValidationError(
            f"vllm_xargs.slo must be {advice}; got {shown(name)}", parameter=SLO
        )


def _configured(options: RouterOptions) -> dict[str, Wishes]:
    return {
        name: Wishes(slo=name, ttft_s=_s(one.ttft_ms), tpot_s=_s(one.tpot_ms))
        for name, one in options.slo_classes.items()
    }


def _promised(profile: Profile) -> dict[str, Wishes]:
    return {
        name: Wishes(
            slo=name,
            ttft_s=one.ttft_s,
            tpot_s=one.tpot_s,
            ttft_prefill_multiple=one.ttft_prefill_multiple,
        )
        for name, one in profile.slo.items()
    }


OURS = frozenset(
    (
        *(SLO, SLO_TTFT_MS, SLO_TPOT_MS),
        *(OUTPUT_TOKENS, TRUE_OUTPUT_TOKENS, FIRST_TOKEN),
    )
)

_SWITCH = {"on": True, "off": False, True: True, False: False, None: True}


def truth(wishes: Wishes, params: Any) -> int | None:
    """The length an output will have, where that is known beforehand.

    `vllm_xargs.true_output_tokens` as a benchmark gives it; or `max_tokens` of a
    request that ignores the end-of-sequence token or wants a single one.
    """
    if wishes.true_output_tokens is not None:
        return wishes.true_output_tokens
    most: int | None = params.max_tokens
    return most if params.ignore_eos or most == 1 else None


def about(extra: Mapping[str, Any] | None) -> About:
    """What `intake.py` left in `extra_args`; nothing known if it did not see it."""
    told = extra.get(ABOUT) if extra else None
    try:
        return msgspec.convert(told, About) if told is not None else _UNKNOWN
    except msgspec.ValidationError:
        # A client of the tokens-in route may write anything there.
        return _UNKNOWN


_UNKNOWN = About()


def switch(value: Any, name: str) -> bool:
    """On or off; None is on.

    Raises:
        VLLMValidationError: it is neither.
    """
    try:
        return _SWITCH[value]
    except (KeyError, TypeError):
        raise VLLMValidationError(
            f'vllm_xargs.{name} must be "on" or "off"; got {shown(value)}',
            parameter=name,
        ) from None


def target_ms(value: Any, name: str, where: str = "vllm_xargs.") -> float | None:
    """A latency target in milliseconds; None stays None.

    Raises:
        VLLMValidationError: no positive number up to a day.
    """
    if value is None:
        return None
    # Comparisons with NaN are false, so it is refused, too.
    if _is_number(value) and 0 < value <= _MOST_MS:
        return float(value)
    raise VLLMValidationError(
        f"{where}{name} must be a number of milliseconds above 0 and at most "
        f"{_MOST_MS} (a day); got {shown(value)}",
        parameter=name,
    )


def tokens(value: Any, name: str, where: str = "vllm_xargs.") -> int | None:
    """An output length in tokens, rounded; None stays None.

    Raises:
        VLLMValidationError: no number from 1 to ten million.
    """
    if value is None:
        return None
    if _is_number(value) and 1 <= value <= _MOST_TOKENS:
        rounded: int = round(value)
        return rounded
    raise VLLMValidationError(
        f"{where}{name} must be a number of tokens from 1 to {_MOST_TOKENS}; "
        f"got {shown(value)}",
        parameter=name,
    )


def shown(value: Any) -> str:
    """A refused value as its client may see it again: short, on one line."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python writes out
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _s(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
