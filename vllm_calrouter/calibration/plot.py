"""Measured against predicted steps, drawn with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from vllm_calrouter.calibration.fit import as_arrays, predict, values_of

if TYPE_CHECKING:
    from vllm_calrouter.calibration.measure import Measured


def draw(measured: Measured, path: Path) -> None:
    """Two panels: seconds by prompt tokens, and by context of the decode batch."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    for engine in measured.engines:
        work, seconds = as_arrays(engine.steps)
        predicted = predict(work, values_of(measured.fits[engine.rank].costs))
        pure = ((work[:, 2] == 0, 0), (work[:, 0] == 0, 3))
        for panel, (chosen, column) in zip(panels, pure, strict=True):
            x = work[chosen, column]
            label = f"engine {engine.rank}"
            points = panel.plot(x, 1e3 * seconds[chosen], "o", ms=4, label=label)
            colour = points[0].get_color()
            panel.plot(x, 1e3 * predicted[chosen], "x", ms=5, color=colour)
    panels[0].set(xlabel="prompt tokens in the step", ylabel="ms", title="prefill")
    panels[1].set(xlabel="tokens of context", title="decode (x: predicted)")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
