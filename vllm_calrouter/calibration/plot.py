"""Fitted curves against measured steps, drawn with matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from vllm_calrouter.calibration.fit import as_arrays, predict, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vllm_calrouter.calibration.fit import Array, Fit
    from vllm_calrouter.calibration.measure import Engine, Measured

#: A decode curve is drawn for these quantiles of the batches seen.
_QUANTILES = (0.0, 0.5, 1.0)
_POINTS = 200


def draw(measured: Measured, path: Path) -> None:
    """Write three panels: prefill by prompt length, decode by context, all residuals.

    Raises OSError.
    """
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    prefill, decode, residuals = figure.subplots(1, 3)
    for number, engine in enumerate(measured.engines):
        fit, colour = measured.fits[engine.rank], f"C{number}"
        work, seconds = as_arrays(engine.steps)
        if engine.role != "decode":
            alone = work[:, 2] == 0
            _prefill(prefill, work[alone], seconds[alone], fit, colour)
        if engine.role != "prefill":
            alone = work[:, 0] == 0
            _decode(decode, work[alone], seconds[alone], fit, colour)
        _residuals(residuals, engine, fit, colour)
    prefill.set(title="prefill", xlabel="prompt tokens in the step", ylabel="ms")
    decode.set(
        title="decode (lines: smallest, middle, largest batch)",
        xlabel="tokens of context in the batch",
        ylabel="ms",
    )
    residuals.set(title="residuals", xlabel="measured, ms", ylabel="off, %")
    residuals.set_xscale("log")
    residuals.legend()
    for panel in (prefill, decode, residuals):
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _prefill(panel: Axes, work: Array, seconds: Array, fit: Fit, colour: str) -> None:
    if not len(work):
        return
    panel.plot(work[:, 0], 1e3 * seconds, ".", color=colour)
    tokens = np.linspace(1, work[:, 0].max(), _POINTS)
    nothing = np.zeros(_POINTS)
    curve = np.column_stack([tokens, tokens**2, nothing, nothing])
    panel.plot(tokens, 1e3 * predict(curve, values_of(fit.costs)), color=colour, lw=1)


def _decode(panel: Axes, work: Array, seconds: Array, fit: Fit, colour: str) -> None:
    if not len(work):
        return
    panel.plot(work[:, 3], 1e3 * seconds, ".", color=colour)
    nothing = np.zeros(_POINTS)
    for seqs in np.unique(np.quantile(work[:, 2], _QUANTILES, method="nearest")):
        most = work[work[:, 2] == seqs, 3].max()
        context = np.linspace(seqs, max(most, seqs), _POINTS)
        curve = np.column_stack([nothing, nothing, np.full(_POINTS, seqs), context])
        predicted = predict(curve, values_of(fit.costs))
        panel.plot(context, 1e3 * predicted, color=colour, lw=1)


def _residuals(panel: Axes, engine: Engine, fit: Fit, colour: str) -> None:
    work, seconds = as_arrays(engine.steps)
    off = 1e2 * (seconds / predict(work, values_of(fit.costs)) - 1.0)
    label = f"engine {engine.rank} ({engine.role})"
    panel.plot(1e3 * seconds, off, ".", color=colour, label=label)
    spread = 1e2 * 3 * max(fit.noise, 0.01)
    low, high = panel.get_ylim()
    # A few steps that were no measurements must not flatten all others.
    panel.set_ylim(max(low, -5 * spread), min(high, 5 * spread))
