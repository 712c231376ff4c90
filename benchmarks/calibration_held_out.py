"""How well fitted constants predict steps that they were not fitted to: real engines.

    python -m benchmarks.calibration_held_out [--json]

A real `vllm serve` with two engines that do both, vLLM's own kernels and a model of 17
million weights, large enough that computing is most of a step.
In turn it is calibrated for a while as `calrouter calibrate` does it, and serves
ordinary traffic for a while: random prompts and outputs, at random times, placed in
turn. Each step of the traffic is predicted from what was in it, and compared with what
the engine says it took. The error of a step is |predicted / measured - 1|. Two sets of
constants predict:

- those fitted to other steps of the same traffic, every second fifty of them, as
  calibration while serving has them. The exit code is 0 if the median error of the
  other fifties is below 15 % on both engines;
- those of `calrouter calibrate`. "Bias" is the median of predicted / measured.

What would mislead:
- Few cores. Here engines, API server and clients share them, so that a step's time
  depends on what all others do at that moment, and a calibration, which loads engines
  in another way than traffic does, is biased. Engines with a GPU each are not so.
- A machine that is busy with other things: then steps take what they take, and their
  times have a long tail that no constants predict. The median forgives that, the 90th
  percentile shows it.
- A tiny model (--hidden 128 --layers 2, as tests have it): its steps are mostly vLLM's
  own work, which depends on more than the constants know of.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model
from vllm_calrouter.calibration import STAND_IN, EngineCosts, load
from vllm_calrouter.calibration.fit import as_arrays, fit_steps, predict, values_of
from vllm_calrouter.calibration.measure import Measurement
from vllm_calrouter.messages import StepTiming

MOST_ERROR = 0.15

_ENGINES = 2
_RATE = 12.0
#: Of the model.
_HIDDEN, _LAYERS = 512, 8
_PROMPT_TOKENS = (4, 1200)
_OUTPUT_TOKENS = (2, 80)


async def held_out(
    url: str,
    *,
    key: str | None = None,
    turns: int,
    turn_s: float,
    rate: float = _RATE,
) -> list[dict[str, Any]]:
    """Calibrate a server and predict its steps under traffic; one row an engine."""
    prior = load(STAND_IN).costs
    fitted: dict[int, list[StepTiming]] = {}
    held: dict[int, list[StepTiming]] = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=600, headers=_headers(key), limits=limits
    ) as http:
        for turn in tqdm(range(turns), "turns", disable=not sys.stderr.isatty()):
            async with Measurement(url, prior, key=key, most_s=turn_s) as measurement:
                for engine in (await measurement.run()).engines:
                    fitted.setdefault(engine.rank, []).extend(engine.steps)
            async with Measurement(url, prior, key=key) as watcher:
                for engine in await watcher.watch(_traffic(http, rate, turn_s, turn)):
                    held.setdefault(engine.rank, []).extend(engine.steps)
    return [_row(rank, fitted[rank], held[rank], prior) for rank in sorted(fitted)]


def _row(
    rank: int, fitted: list[StepTiming], held: list[StepTiming], prior: EngineCosts
) -> dict[str, Any]:
    learned, others = _every_second_fifty(held)
    by_traffic = _ratios(fit_steps(learned, prior).costs, others)
    by_calibration = _ratios(fit_steps(fitted, prior).costs, held)
    off = np.abs(by_traffic - 1.0)
    prefill = np.array([step.prefill_tokens > 0 for step in others])
    return {
        "rank": rank,
        "steps": len(others),
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "prefill_median": float(np.median(off[prefill])),
        "decode_median": float(np.median(off[~prefill])),
        "calibrate_median": float(np.median(np.abs(by_calibration - 1.0))),
        "calibrate_bias": float(np.median(by_calibration)),
    }


def _every_second_fifty(
    steps: list[StepTiming],
) -> tuple[list[StepTiming], list[StepTiming]]:
    parts: tuple[list[StepTiming], list[StepTiming]] = ([], [])
    for number, step in enumerate(steps):
        parts[number // 50 % 2].append(step)
    return parts


def _ratios(costs: EngineCosts, steps: list[StepTiming]) -> NDArray[np.float64]:
    """Predicted over measured seconds of each step."""
    work, seconds = as_arrays(steps)
    ratios: NDArray[np.float64] = predict(work, values_of(costs)) / seconds
    return ratios


async def _traffic(
    http: httpx.AsyncClient, rate: float, seconds: float, seed: int
) -> None:
    draw = random.Random(seed)

    async def ask() -> None:
        body = {
            "model": "tiny",
            "prompt": [draw.randrange(40, 240) for _ in range(_log(*_PROMPT_TOKENS))],
            "max_tokens": _log(*_OUTPUT_TOKENS),
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()

    def _log(low: int, high: int) -> int:
        return int(low * (high / low) ** draw.random())

    end_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as asked:
        while time.monotonic() < end_s:
            asked.create_task(ask())
            await asyncio.sleep(draw.expovariate(rate))


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def main() -> None:
    options = _options()
    end_servers_when_terminated()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            make_tiny_model(
                Path(folder) / "tiny", hidden=options.hidden, layers=options.layers
            ),
            engines=options.engines,
            policy="round_robin",
            log=Path(folder) / "server.log",
        )
        with cluster:
            rows = asyncio.run(
                held_out(
                    cluster.url,
                    turns=options.turns,
                    turn_s=options.turn_s,
                    rate=options.rate,
                )
            )
    if options.json:
        print(json.dumps(rows))
    else:
        _show(rows)
    sys.exit(any(row["median"] >= MOST_ERROR for row in rows))


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        *("engine", "held out", "error, median", "P90", "with prefill", "decode"),
        *("by calibrate", "bias"),
    )
    for row in rows:
        shares = ("median", "p90", "prefill_median", "decode_median")
        table.add_row(
            str(row["rank"]),
            f"{row['steps']} steps",
            *(f"{row[share]:.1%}" for share in (*shares, "calibrate_median")),
            f"{row['calibrate_bias']:.2f}",
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--turns", type=int, default=5, help="default 5")
    parser.add_argument(
        "--turn-s", type=float, default=8.0, help="of each kind in a turn (default 8)"
    )
    shown = "default %(default)s"
    parser.add_argument("--rate", type=float, default=_RATE, help=f"a second ({shown})")
    parser.add_argument("--engines", type=int, default=_ENGINES, help=shown)
    parser.add_argument(
        "--hidden", type=int, default=_HIDDEN, help=f"the model's width ({shown})"
    )
    parser.add_argument(
        "--layers", type=int, default=_LAYERS, help=f"the model's layers ({shown})"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
