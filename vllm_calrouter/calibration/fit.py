"""The constants of prefill and decode from timed steps: robust weighted least squares.

The model is `EngineCosts.step_s`, linear in six constants once it is known which of the
two bases is the larger. Steps of all kinds are fitted together. Noise is taken to be in
proportion to a step's duration, and a few steps to be no measurements at all (the first
compilation, a host that was busy): they are recognised and left out.

Every fit starts from a prior, of which little is believed: all constants together may
be wrong by any factor, and each by itself by twice its size. What the steps say nothing
of keeps the prior's proportion to the rest, with a standard error that says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from vllm_calrouter.calibration.profile import EngineCosts
from vllm_calrouter.messages import StepTiming

Array = npt.NDArray[np.float64]

#: The fitted constants, in the order of all vectors here.
CONSTANTS = (
    "prefill_base_s",
    "prefill_per_token_s",
    "prefill_per_token_sq_s",
    "decode_base_s",
    "decode_per_seq_s",
    "decode_per_context_token_s",
)
PREFILL_BASE, DECODE_BASE = 0, 3

#: Standard deviations of the prior, relative to it: of a factor common to all
#: constants, and of each one's own.
_COMMON_SD = 1.0
_OWN_SD = 2.0

#: A step of some size (once, tokens, squared tokens; once, sequences, tokens). Of a
#: prior near 0 it is believed that it takes 0.5 % of such a step or so.
_UNITS = np.array([1.0, 1e3, 1e6, 1.0, 1e1, 1e4])
_STAND_IN = 0.005

#: Huber's and Tukey's constants for 95 % efficiency under normal noise (P. J. Huber,
#: Robust Statistics, 1981; A. E. Beaton and J. W. Tukey, Technometrics 16, 1974).
_HUBER = 1.345
_TUKEY = 4.685

#: The standard deviation of normal noise over its median absolute deviation.
_MAD = 1.4826

#: Noise of less than this share of a step is taken for this much: clocks and models
#: are not more exact.
LEAST_NOISE = 1e-3

#: Seconds below which no engine steps.
LEAST_S = 1e-6

#: The least share of a step's prior that is divided by: constants below 0 may predict
#: nothing, or less.
_LEAST_SHARE = 0.05

_ITERATIONS = 25
_CONVERGED = 1e-4


@dataclass(frozen=True)
class Fit:
    """What steps say of an engine.

    Vectors are in the order of `CONSTANTS`, in the constants' own units.

    Fields:
        costs: the prior's, with the fitted constants.
        covariance: 6 x 6, of the constants before those below 0 were set to 0.
        noise: standard deviation of the residuals, relative to a step's duration.
        residuals: of each step, measured over predicted, less 1.
        outliers: how many steps did not count.
    """

    costs: EngineCosts
    covariance: Array
    noise: float
    residuals: Array
    outliers: int

    @property
    def standard_errors(self) -> dict[str, float]:
        return errors_by_name(self.covariance)

    @property
    def median_error(self) -> float:
        """Median absolute residual."""
        return float(np.median(np.abs(self.residuals)))


def fit_steps(steps: Sequence[StepTiming], prior: EngineCosts) -> Fit:
    """Fit one engine's constants to its steps.

    Raises ValueError when there is no step that took any time.
    """
    work, seconds = as_arrays(steps)
    if not len(work):
        raise ValueError("no step was timed")
    centre, scale = prior_of(prior)
    ratio = float(np.median(seconds / np.maximum(predict(work, centre), 1e-12)))
    centre, scale = ratio * centre, ratio * scale
    beliefs = beliefs_about(centre, scale)
    estimate, noise = centre, 1.0
    for turn in range(_ITERATIONS):
        rows, off = shares(regressors(work, estimate), seconds, estimate, scale)
        noise = max(_spread(off, len(CONSTANTS)), LEAST_NOISE)
        # Huber's weights lead to where Tukey's do not get lost.
        weigh = _huber if turn < 5 else _tukey
        weights = weigh(off / noise) / noise**2
        information = (rows.T * weights) @ rows + beliefs
        pull = (rows.T * weights) @ off + beliefs @ ((centre - estimate) / scale)
        change = np.linalg.solve(information, pull)
        estimate = estimate + change * scale
        if turn > 6 and np.abs(change).max() < _CONVERGED:
            break
    rows, off = shares(regressors(work, estimate), seconds, estimate, scale)
    covariance = _covariance(rows, off / noise, noise, beliefs)
    costs = with_values(prior, nonnegative(information, estimate / scale) * scale)
    residuals = seconds / predict(work, values_of(costs)) - 1.0
    return Fit(
        costs=costs,
        covariance=covariance * np.outer(scale, scale),
        noise=noise,
        residuals=residuals,
        outliers=int(np.sum(_tukey(off / noise) == 0.0)),
    )


def as_arrays(steps: Sequence[StepTiming]) -> tuple[Array, Array]:
    """Steps that took time: what they computed (n x 4: prefill tokens and squares,
    sequences, context tokens), and their seconds (n)."""
    timed = [
        (s.prefill_tokens, s.prefill_squares, s.decode_seqs, s.context_tokens)
        for s in steps
        if is_timed(s)
    ]
    seconds = [s.seconds for s in steps if is_timed(s)]
    work = np.array(timed, dtype=np.float64).reshape(-1, 4)
    return work, np.array(seconds, dtype=np.float64)


def is_timed(step: StepTiming) -> bool:
    """Whether the step computed something, and took the time that this takes."""
    work = step.prefill_tokens or step.decode_seqs
    return step.seconds >= LEAST_S and bool(work)


def values_of(costs: EngineCosts) -> Array:
    """The constants as a vector."""
    return np.array([getattr(costs, name) for name in CONSTANTS], dtype=np.float64)


def with_values(costs: EngineCosts, values: Array) -> EngineCosts:
    """The costs with other constants, moved into their bounds."""
    return costs.changed(
        **{name: float(v) for name, v in zip(CONSTANTS, values, strict=True)}
    )


def errors_by_name(covariance: Array) -> dict[str, float]:
    """Standard errors by constant."""
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return {name: float(e) for name, e in zip(CONSTANTS, errors, strict=True)}


def regressors(work: Array, values: Array) -> Array:
    """What each constant is multiplied by (n x 6), of the two bases the larger."""
    prefills, decodes = work[:, 0] > 0, work[:, 2] > 0
    prefill_leads = values[PREFILL_BASE] > values[DECODE_BASE]
    on_prefill = prefills & (~decodes | prefill_leads)
    return np.column_stack(
        [
            on_prefill,
            work[:, 0],
            work[:, 1],
            decodes & ~on_prefill,
            work[:, 2],
            work[:, 3],
        ]
    ).astype(np.float64)


def predict(work: Array, values: Array) -> Array:
    """Seconds of each step (`EngineCosts.step_s`)."""
    predicted: Array = regressors(work, values) @ values
    return predicted


def prior_of(costs: EngineCosts) -> tuple[Array, Array]:
    """The prior's constants, and the scale of each: itself where it is not near 0.

    A constant in proportion to next to nothing would stay there whatever steps say.
    """
    values = values_of(costs)
    typical_s = max(float(values @ _UNITS), LEAST_S)
    return values, np.maximum(values, _STAND_IN * typical_s / _UNITS)


def beliefs_about(centre: Array, scale: Array) -> Array:
    """The prior's information about the constants in units of `scale` (6 x 6)."""
    common = centre / scale
    own = np.eye(len(CONSTANTS)) * _OWN_SD**2
    covariance = _COMMON_SD**2 * np.outer(common, common) + own
    information: Array = np.linalg.inv(covariance).astype(np.float64)
    return information


def nonnegative(information: Array, estimate: Array) -> Array:
    """The vector without negative parts that is nearest to an estimate.

    Nearest in the metric of `information` (6 x 6), as the constrained least-squares
    solution is. With six constants all 64 choices of those at 0 can be looked at.
    """
    if estimate.min() >= 0.0:
        return estimate
    best, least = np.zeros_like(estimate), math.inf
    pull = information @ estimate
    everyone = range(len(estimate))
    for size in everyone:
        for kept in combinations(everyone, size + 1):
            chosen = list(kept)
            part = np.linalg.solve(information[np.ix_(chosen, chosen)], pull[chosen])
            if part.min() < 0.0:
                continue
            candidate = np.zeros_like(estimate)
            candidate[chosen] = part
            off = candidate - estimate
            distance = float(off @ information @ off)
            if distance < least:
                best, least = candidate, distance
    return best


def shares(
    rows: Array, seconds: Array | float, estimate: Array, scale: Array
) -> tuple[Array, Array]:
    """Regressors (in units of the scale) and residuals, as shares of predicted steps.

    Args:
        rows: `regressors` (n x 6).
    """
    predicted = rows @ estimate
    whole: Array = np.maximum(predicted, _LEAST_SHARE * (rows @ scale))
    off: Array = (seconds - predicted) / whole
    return rows * scale / whole[:, None], off


def _spread(off: Array, fitted: int) -> float:
    """Robust standard deviation of residuals after `fitted` constants were fitted."""
    free = max(len(off) - fitted, 1)
    return float(_MAD * np.median(np.abs(off)) * np.sqrt(len(off) / free))


def _huber(z: Array) -> Array:
    weights: Array = np.minimum(1.0, _HUBER / np.maximum(np.abs(z), 1e-12))
    return weights


def _tukey(z: Array) -> Array:
    return np.where(np.abs(z) < _TUKEY, (1 - (z / _TUKEY) ** 2) ** 2, 0.0)


def _covariance(rows: Array, z: Array, noise: float, beliefs: Array) -> Array:
    """Of an M-estimator, by the sandwich formula (Huber 1981, section 7.6)."""
    inner = (z / _TUKEY) ** 2
    slope = np.where(inner < 1, (1 - inner) * (1 - 5 * inner), 0.0)
    pull = z * _tukey(z)
    free = max(len(z) - len(CONSTANTS), 1)
    bread = max(float(slope.mean()), 0.1) * (rows.T @ rows) / noise**2 + beliefs
    meat = (rows.T * pull**2) @ rows / noise**2 * (len(z) / free) + beliefs
    crumb = np.linalg.inv(bread)
    covariance: Array = crumb @ meat @ crumb
    return covariance
