"""Keeps the engines' constants up to date with what their steps take.

Every engine has its own fit, which starts from the profile and takes in the step
timings of its messages. Once it predicts well, its constants are the ones placements
are priced with; until then those of its peers are, where there are any: of two equal
engines the one that was not heard yet must not look cheaper, or dearer, than the other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
from vllm.logger import init_logger

from vllm_calrouter._core import Costs
from vllm_calrouter.calibration import EngineCosts
from vllm_calrouter.calibration.fit import (
    CONSTANTS,
    as_arrays,
    is_timed,
    predict,
    values_of,
    with_values,
)
from vllm_calrouter.calibration.online import OnlineFit
from vllm_calrouter.messages import MOST_TIMINGS, EngineMessage, StepTiming
from vllm_calrouter.placement.costs import core_costs
from vllm_calrouter.router.metrics import RouterMetrics

logger = init_logger("vllm.calrouter")

#: Steps are learned from this often, and constants put into use that often.
LEARN_S = 0.1
PUT_S = 0.5

#: Steps that wait to be learned from; of more, the newest.
_MOST_PENDING = 2 * MOST_TIMINGS

#: An engine drifts when the median of its last steps with or without prefill is this
#: factor off.
DRIFT_FACTOR = 1.25
_DRIFT_STEPS = 64
_LEAST_DRIFT_STEPS = 16

Source = Literal["profile", "peers", "fit"]


class Prices(Protocol):
    """What takes constants (`_core.Table`)."""

    def set_costs(self, rank: int, costs: Costs) -> None: ...


class _Engine:
    """What is known of one engine."""

    def __init__(self, prior: EngineCosts, role: str) -> None:
        self.prior = prior
        self.role = role
        self.fit = OnlineFit(prior)
        self.costs = prior
        #: What its fit says, where that can be used.
        self.fitted: EngineCosts | None = None
        self.source: Source = "profile"
        self.drifts = False
        self.pending: deque[StepTiming] = deque(maxlen=_MOST_PENDING)
        # Apart: of an engine that mostly decodes, prefill may be wrong unseen.
        self._last_prefill: deque[StepTiming] = deque(maxlen=_DRIFT_STEPS)
        self._last_decode: deque[StepTiming] = deque(maxlen=_DRIFT_STEPS)
        self._heard = (-1, 0)

    def hear(self, message: EngineMessage) -> None:
        """Note the steps of a message that no earlier one had."""
        incarnation, steps = self._heard
        new = message.steps - (steps if message.incarnation == incarnation else 0)
        self._heard = (message.incarnation, message.steps)
        if new > 0:
            self.pending.extend(filter(is_timed, message.recent_steps[-new:]))

    def learn(self) -> None:
        """Take in what was noted."""
        while self.pending:
            step = self.pending.popleft()
            last = self._last_prefill if step.prefill_tokens else self._last_decode
            last.append(step)
            self.fit.observe(step)

    def forget(self) -> None:
        """Start the fit again."""
        self.fit = OnlineFit(self.prior)
        self.pending.clear()

    def ratio(self) -> float | None:
        """Predicted over measured seconds of its last steps, in the median.

        Of those with prefill or those without, whichever is further off.
        """
        ratios = [
            self._ratio(last)
            for last in (self._last_prefill, self._last_decode)
            if len(last) >= _LEAST_DRIFT_STEPS
        ]
        return max(ratios, key=lambda ratio: abs(math.log(ratio)), default=None)

    def _ratio(self, last: Iterable[StepTiming]) -> float:
        work, seconds = as_arrays(list(last))
        return float(np.median(predict(work, values_of(self.costs)) / seconds))


class Calibrator:
    """One router's view of what work costs on each engine.

    Args:
        costs: the profile's, by rank.
        roles: by rank; engines of one role are each other's peers.
        table: takes the constants.
        takes_over: whether fitted constants are put into use; else it is only told when
            the profile is wrong.
        metrics: tells how well steps are predicted.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        costs: Sequence[EngineCosts],
        roles: Sequence[str],
        table: Prices,
        *,
        takes_over: bool = True,
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = [_Engine(*one) for one in zip(costs, roles, strict=True)]
        self._table = table
        self._takes_over = takes_over
        self._metrics = metrics
        self._clock = clock
        self._put_s = -math.inf

    def hear(self, message: EngineMessage) -> None:
        """Note a message's steps; cheap enough to be done before a placement."""
        self._engines[message.rank].hear(message)

    async def run(self) -> None:
        """Learn and put into use until cancelled."""
        while True:
            due = self._is_due()
            for rank in range(len(self._engines)):
                self.learn(rank)
                if due:
                    self._judge(rank)
                # Others of the event loop come first: this takes half a millisecond.
                await asyncio.sleep(0)
            if due:
                self._put()
            await asyncio.sleep(LEARN_S)

    def learn(self, rank: int) -> None:
        """Take in the steps noted of an engine."""
        with self._or_again(rank):
            self._engines[rank].learn()

    @contextmanager
    def _or_again(self, rank: int) -> Iterator[None]:
        """Start an engine's fit again where something cannot be done with it."""
        try:
            yield
        except Exception:
            logger.exception("engine %d's steps could not be fitted: again", rank)
            self._engines[rank].forget()

    def put_if_due(self) -> None:
        """Put the fitted constants into use, unless that was done a moment ago."""
        if self._is_due():
            for rank in range(len(self._engines)):
                self._judge(rank)
            self._put()

    def _is_due(self) -> bool:
        now_s = self._clock()
        due = now_s - self._put_s >= PUT_S
        if due:
            self._put_s = now_s
        return due

    def _judge(self, rank: int) -> None:
        """See how well an engine is predicted, and what would predict it better."""
        # Before the constants change: what was wrong is to be seen.
        self._check_drift(rank)
        engine = self._engines[rank]
        engine.fitted = None
        with self._or_again(rank):
            if self._takes_over and engine.fit.settled:
                engine.fitted = engine.fit.costs

    def costs(self, rank: int) -> EngineCosts:
        """The constants in use."""
        return self._engines[rank].costs

    def describe(self) -> list[dict[str, Any]]:
        """What is known of every engine, as plain data."""
        return [_describe(rank, engine) for rank, engine in enumerate(self._engines)]

    def _put(self) -> None:
        settled: dict[str, list[Any]] = {}
        for rank, engine in enumerate(self._engines):
            if engine.fitted is not None:
                self._use(rank, engine.fitted, "fit")
            if engine.source == "fit":
                settled.setdefault(engine.role, []).append(values_of(engine.costs))
        for rank, engine in enumerate(self._engines):
            if engine.source != "fit" and engine.role in settled:
                middle = np.median(settled[engine.role], axis=0)
                self._use(rank, with_values(engine.prior, middle), "peers")

    def _use(self, rank: int, costs: EngineCosts, source: Source) -> None:
        engine = self._engines[rank]
        engine.source = source
        if costs != engine.costs:
            engine.costs = costs
            self._table.set_costs(rank, core_costs(costs))

    def _check_drift(self, rank: int) -> None:
        engine = self._engines[rank]
        ratio = engine.ratio()
        if ratio is None:
            return
        if self._metrics:
            self._metrics.step_predicted(rank, ratio)
        drifts = not 1 / DRIFT_FACTOR <= ratio <= DRIFT_FACTOR
        if drifts and not engine.drifts:
            whose = "the profile says" if engine.source == "profile" else "it took"
            follows = (
                "its own steps are fitted"
                if self._takes_over
                else "placements are mispriced: set --router-config.calibration on, or "
                "measure a profile with calrouter calibrate"
            )
            logger.warning(
                "engine %d: a step takes %.2f times what %s: %s",
                rank,
                1 / ratio,
                whose,
                follows,
            )
        elif engine.drifts and not drifts:
            logger.info("engine %d: its steps are predicted well again", rank)
        engine.drifts = drifts


def _describe(rank: int, engine: _Engine) -> dict[str, Any]:
    errors = engine.fit.standard_errors
    return {
        "rank": rank,
        "source": engine.source,
        "steps": engine.fit.steps,
        "noise": engine.fit.noise,
        "step_prediction_ratio": engine.ratio(),
        "drifts": engine.drifts,
        "costs": {name: getattr(engine.costs, name) for name in CONSTANTS},
        "standard_errors": {
            name: error if math.isfinite(error) else None
            for name, error in errors.items()
        },
    }
