"""The same constants, kept up to date step by step.

Recursive least squares in information form with directional forgetting: what a step
says nothing of is not forgotten (L. Cao and H. Schwartz, A directional forgetting
algorithm based on the decomposition of the information matrix, Automatica 36, 2000). An
engine that has only decoded for an hour still knows what prefill costs.

A step that does not fit is not learned from. When most of the last ones do not, the
engine has become another (or the prior was wrong). If it is again what it was before,
that is taken up where it was left; else the last steps are fitted together by
`fit.fit_steps`, as the first ones of each kind are, provided that they agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from vllm_calrouter.calibration.fit import (
    DECODE_BASE,
    LEAST_NOISE,
    LEAST_S,
    PREFILL_BASE,
    Array,
    Fit,
    as_arrays,
    errors_by_name,
    fit_steps,
    is_timed,
    nonnegative,
    predict,
    prior_of,
    regressors,
    shares,
    with_values,
)
from vllm_calrouter.calibration.profile import EngineCosts
from vllm_calrouter.messages import StepTiming

#: Steps after which what one of them said of its own direction weighs 1/e.
MEMORY_STEPS = 150

#: Steps of a kind that are kept, and how many the first fit takes.
WINDOW_STEPS: Final = 32
FIRST_STEPS: Final = 16

#: So many of `FIRST_STEPS` that do not fit are no accident.
_MOST_OF_FIRST: Final = 12

#: A prediction this uncertain (standard error, relative) is not used.
GOOD_ENOUGH = 0.05

#: Residuals, in standard deviations, from which a step counts less, and not at all.
_CLIP = 2.0
_REJECT = 6.0

#: A step this near to its prediction, relative, counts however small the noise is.
_ODD = 0.05

#: How fast the noise follows the residuals, a step.
_NOISE_RATE = 0.02

#: With more noise than this nothing was understood.
_MOST_NOISE = 0.5

#: With more than this, steps that do not fit are no other engine, but a disturbance.
_MOST_ODD_NOISE = 0.25

#: Steps that were learned from, after which an estimate is worth going back to; and how
#: far off the median of the steps may be that it is asked to explain.
_WORTH_KEEPING_STEPS = 50
_SAME_AS_BEFORE = 0.05

_MAD = 1.4826

#: No less information is divided by.
_NOTHING_KNOWN = 1e-9


class _Estimate(NamedTuple):
    """What was thought of an engine, to go back to.

    Fields:
        costs: without constants below 0.
        values, scale: of the constants, in their order and their own units.
        information: 6 x 6, of the constants in units of the scale.
        noise: standard deviation of single steps, relative.
        fits: of prefill and of decode, `_Kind.fits`.
    """

    costs: EngineCosts
    values: Array
    scale: Array
    information: Array
    noise: float
    fits: tuple[int, int]


class _Kind:
    """The last steps of one kind: those that fitted, and those that did not.

    Fields:
        steps: that fitted, or all before the first fit.
        odd: that did not fit, of the last `FIRST_STEPS`; None for each that did.
        fits: how often the kind was fitted since it last began.
    """

    def __init__(self) -> None:
        self.steps: deque[StepTiming] = deque(maxlen=WINDOW_STEPS)
        self.odd: deque[StepTiming | None] = deque(maxlen=FIRST_STEPS)
        self.fits = 0

    def note(self, step: StepTiming, *, rejected: bool) -> None:
        self.odd.append(step if rejected else None)
        if not rejected:
            self.steps.append(step)

    @property
    def is_due(self) -> bool:
        """Whether there are enough steps for the first fit, or for the second."""
        if self.fits == 0:
            return len(self.steps) >= FIRST_STEPS
        return self.fits == 1 and len(self.steps) >= WINDOW_STEPS

    @property
    def is_another(self) -> bool:
        """Whether most of the last steps did not fit."""
        return len(self.odd_steps) >= _MOST_OF_FIRST

    @property
    def odd_steps(self) -> list[StepTiming]:
        return [step for step in self.odd if step is not None]

    def fitted(self) -> None:
        self.fits += 1
        self.odd.clear()

    def begin(self, steps: Iterable[StepTiming] = (), fits: int = 0) -> None:
        """Forget all but these steps."""
        self.steps.clear()
        self.steps.extend(steps)
        self.odd.clear()
        self.fits = fits


class OnlineFit:
    """One engine's constants as its steps tell them; memory and time are bounded.

    Args:
        prior: what is thought of the engine before it is heard; of the constants, not
            of their scale.
    """

    def __init__(self, prior: EngineCosts) -> None:
        self._prior = prior
        self.steps = 0
        self._forget()

    def observe(self, step: StepTiming) -> None:
        """Take in one step."""
        if not is_timed(step):
            return
        self.steps += 1
        kind = self._prefill if step.prefill_tokens else self._decode
        # Of a kind that is not fitted yet a single step may be anything.
        kind.note(step, rejected=kind.fits > 0 and not self._learn(step))
        if self._noise > _MOST_NOISE:
            self._forget()
        elif kind.is_due:
            self._fit_together(kind)
        elif kind.is_another:
            self._begin_again(kind)

    @property
    def settled(self) -> bool:
        """Whether the last steps are predicted well enough to price by."""
        if not self._begun:
            return False
        return all(
            self._error_of(kind.steps) <= GOOD_ENOUGH
            for kind in (self._prefill, self._decode)
            if kind.fits and kind.steps
        )

    @property
    def costs(self) -> EngineCosts:
        """The prior's, with what was learned."""
        values = nonnegative(self._information, self._estimate / self._scale)
        return with_values(self._prior, values * self._scale)

    @property
    def standard_errors(self) -> dict[str, float]:
        """By constant, in its unit; infinite before the first fit."""
        if not self._begun:
            return dict.fromkeys(errors_by_name(self._information), math.inf)
        covariance = np.linalg.inv(self._information)
        return errors_by_name(covariance * np.outer(self._scale, self._scale))

    @property
    def noise(self) -> float:
        """Standard deviation of single steps, relative."""
        return self._noise

    @property
    def _begun(self) -> bool:
        return bool(self._prefill.fits or self._decode.fits)

    def _forget(self) -> None:
        """Be as if no step had been heard."""
        self._estimate, self._scale = prior_of(self._prior)
        #: Of the constants in units of the scale.
        self._information = np.eye(len(self._estimate))
        self._noise = _MOST_NOISE
        self._learned = 0
        self._before: _Estimate | None = None
        self._prefill, self._decode = _Kind(), _Kind()

    def _learn(self, step: StepTiming) -> bool:
        """Change the estimate by one step; False when it does not fit."""
        rows, offs = shares(self._row(step), step.seconds, self._estimate, self._scale)
        row, off = rows[0], float(offs[0])
        uncertain = float(row @ np.linalg.solve(self._information, row))
        # By the logarithm 100 times too fast is as odd as 100 times too slow.
        odd = abs(math.log1p(off))
        z = odd / math.sqrt(self._noise**2 + uncertain)
        self._note_noise(odd, uncertain)
        if z > _REJECT and odd > _ODD:
            return False
        self._learned += 1
        weight = min(1.0, _CLIP / max(z, _CLIP)) / self._noise**2
        told = self._information @ row
        known = max(float(row @ told), _NOTHING_KNOWN)
        self._information += weight * np.outer(row, row)
        self._information -= np.outer(told, told / (MEMORY_STEPS * known))
        change = np.linalg.solve(self._information, row)
        change *= weight * off
        change *= self._scale
        self._estimate = self._estimate + change
        return True

    def _row(self, step: StepTiming) -> Array:
        """`regressors` of one step, in less time."""
        leads = self._estimate[PREFILL_BASE] > self._estimate[DECODE_BASE]
        on_prefill = step.prefill_tokens > 0 and (leads or not step.decode_seqs)
        row = (
            on_prefill,
            step.prefill_tokens,
            step.prefill_squares,
            not on_prefill,
            step.decode_seqs,
            step.context_tokens,
        )
        return np.array([row], dtype=np.float64)

    def _note_noise(self, odd: float, uncertain: float) -> None:
        """Let the noise follow the median of |residual|, which outliers do not move."""
        if uncertain > self._noise**2:
            # The residual is the estimate's error rather than noise.
            return
        above = _MAD * odd > self._noise
        noise = self._noise * math.exp(_NOISE_RATE if above else -_NOISE_RATE)
        self._noise = max(noise, LEAST_NOISE)

    def _fit_together(self, kind: _Kind) -> None:
        """Start from the steps kept of this kind, and of the other if it was fitted."""
        kinds = (self._prefill, self._decode)
        heard = [each for each in kinds if each is kind or each.fits]
        steps = [step for each in heard for step in each.steps]
        fit = fit_steps(steps, self.costs if self._begun else self._prior)
        if fit.noise > _MOST_NOISE:
            self._forget()
            return
        self._take(fit)
        kind.fitted()

    def _take(self, fit: Fit) -> None:
        self._estimate, self._scale = prior_of(fit.costs)
        unit = np.outer(self._scale, self._scale)
        self._information = np.linalg.inv(fit.covariance / unit)
        self._noise = fit.noise

    def _begin_again(self, kind: _Kind) -> None:
        """Let what did not fit say what the engine is now."""
        odd = kind.odd_steps
        kind.odd.clear()
        before = self._before
        if self._learned >= _WORTH_KEEPING_STEPS:
            before = self._now()
        elif before is not None and _explains(before, odd):
            self._go_back(before)
            kind.steps.extend(odd)
            return
        # What these steps say nothing of keeps its proportion to the rest.
        fit = fit_steps(odd, before.costs if before else self._prior)
        if fit.noise > _MOST_ODD_NOISE:
            return
        self._before, self._learned = before, 0
        self._prefill.begin()
        self._decode.begin()
        kind.begin(odd)
        self._take(fit)
        kind.fitted()

    def _now(self) -> _Estimate:
        return _Estimate(
            self.costs,
            self._estimate,
            self._scale,
            self._information.copy(),
            self._noise,
            (self._prefill.fits, self._decode.fits),
        )

    def _go_back(self, before: _Estimate) -> None:
        self._before = None
        self._estimate, self._scale = before.values, before.scale
        self._information, self._noise = before.information, before.noise
        self._prefill.begin(fits=before.fits[0])
        self._decode.begin(fits=before.fits[1])

    def _error_of(self, steps: Iterable[StepTiming]) -> float:
        """Standard error of the prediction of these steps, relative, in the median."""
        work, _ = as_arrays(list(steps))
        rows = regressors(work, self._estimate)
        rows, _ = shares(rows, 0.0, self._estimate, self._scale)
        variances = np.sum(rows * np.linalg.solve(self._information, rows.T).T, axis=1)
        return float(np.sqrt(np.median(variances)))


def _explains(before: _Estimate, steps: list[StepTiming]) -> bool:
    """Whether an engine that was so would take about as long for these steps."""
    work, seconds = as_arrays(steps)
    predicted = np.maximum(predict(work, before.values), LEAST_S)
    off = float(np.median(np.abs(np.log(seconds / predicted))))
    return off <= max(_SAME_AS_BEFORE, _CLIP * before.noise)
