"""Whether calibration finds constants that are known: real servers, paced engines.

    python -m benchmarks.calibration_recovery [--json]

A real `vllm serve` with two engines that do both, whose steps take what a profile says
(`vllm_calrouter.emulation`), times a slow-down so that few cores keep up. Engine 1 is
made 1.5 times slower. Two things are asked to find the constants again:

  online     the router's own fit, which starts from a profile that is wrong by a factor
             of 7.4, after 30 s of ordinary traffic that the router itself places;
  calibrate  what `calrouter calibrate` runs, which knows a profile wrong by the
             slow-down and is given 60 s.

Times are in emulated seconds: the clock's divided by the slow-down. An error is that of
one constant of one engine, relative to the constant. A constant that ordinary traffic
does not tell apart from the others is uncertain by as much; the online part says beside
its errors how far predictions of steps are off, which is what placements are made of.

What would mislead:
- A machine that does not keep up. A step that takes longer than it should is then
  measured as what it took; the server's log warns, and so does `late_warnings` here.
- The exactness of the emulation. Real engines' steps are not linear in their work.
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
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from examples.cpu_cluster import Cluster
from examples.tiny_model import make_tiny_model
from vllm_calrouter.calibration import EngineCosts, load, save
from vllm_calrouter.calibration.fit import CONSTANTS
from vllm_calrouter.calibration.measure import Measured, Measurement
from vllm_calrouter.emulation import Pace, arguments

PROFILE = "a40-qwen2.5-3b"
WRONG = 7.4
SLOWER = 1 / 1.5
ENGINES = 2

#: Emulated seconds.
TRAFFIC_S = 30.0
MEASURE_S = 60.0

#: Requests an emulated second, of all engines.
_RATE = 10.0
_OUTPUT_TOKENS = 150
_KV_CACHE_BYTES = 64 << 20
_LATE = "does not keep up"

#: Steps by which predictions are judged: prefill tokens, sequences, context.
_STEPS = ((512, 0, 0), (1500, 0, 0), (0, 1, 500), (0, 16, 8000), (512, 16, 8000))


def main() -> None:
    options = _options()
    pace = Pace(PROFILE, slow_down=options.slow_down, speed={1: SLOWER})
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), pace)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    if result["max_rel_error"] > options.most_error:
        sys.exit(1)


def run(folder: Path, pace: Pace) -> dict[str, Any]:
    """Start the server, let both fits find its constants, compare."""
    log = folder / "server.log"
    cluster = Cluster(
        make_tiny_model(folder / "tiny"),
        engines=ENGINES,
        prefill=0,
        policy="calibrated",
        arguments=[
            *arguments(pace),
            *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)),
            *("--router-config.profile", str(_wrong_profile(folder, pace))),
        ],
        log=log,
    )
    with cluster:
        online = asyncio.run(after_traffic(cluster.url, pace.slow_down))
        measured = asyncio.run(measure(cluster.url, pace.slow_down))
    true = [pace.costs(rank) for rank in range(ENGINES)]
    found = {e.rank: measured.fits[e.rank].costs for e in measured.engines}
    errors = {rank: _errors(found[rank], true[rank]) for rank in found}
    return {
        "max_rel_error": max(max(one.values()) for one in errors.values()),
        "measure_s": measured.seconds / pace.slow_down,
        "constants": {
            str(rank): {
                name: {
                    "true": getattr(true[rank], name) / pace.slow_down,
                    "found": getattr(found[rank], name) / pace.slow_down,
                    "rel_error": errors[rank][name],
                    "rel_standard_error": measured.fits[rank].standard_errors[name]
                    / getattr(true[rank], name),
                }
                for name in CONSTANTS
            }
            for rank in found
        },
        "median_abs_residual": max(f.median_error for f in measured.fits.values()),
        "steps": sum(len(e.steps) for e in measured.engines),
        "online": [_online(row, true[row["rank"]]) for row in online],
        "online_traffic_s": TRAFFIC_S,
        "late_warnings": log.read_text(errors="replace").count(_LATE),
        "slow_down": pace.slow_down,
    }


def _wrong_profile(folder: Path, pace: Pace) -> Path:
    profile = load(PROFILE)
    costs = profile.costs.faster(WRONG / pace.slow_down)
    path = folder / "wrong.json"
    save(msgspec.structs.replace(profile, costs=costs), path)
    return path


async def after_traffic(url: str, slow_down: float) -> list[dict[str, Any]]:
    """What the router thinks of its engines after a while of ordinary requests."""
    draw = random.Random(1)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def ask() -> None:
            tokens = min(3000, int(draw.lognormvariate(6.0, 1.0)) + 4)
            body = {
                "model": "tiny",
                "prompt": [draw.randrange(40, 240) for _ in range(tokens)],
                "max_tokens": 1 + min(900, int(draw.expovariate(1 / _OUTPUT_TOKENS))),
                "ignore_eos": True,
            }
            (await http.post("/v1/completions", json=body)).raise_for_status()

        asked: list[asyncio.Task[None]] = []
        end_s = time.monotonic() + TRAFFIC_S * slow_down
        while time.monotonic() < end_s:
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(draw.expovariate(_RATE / slow_down))
        state = (await http.get("/router/state?engines=false")).json()
        await asyncio.gather(*asked)
    rows: list[dict[str, Any]] = state["calibration"]
    return rows


async def measure(url: str, slow_down: float) -> Measured:
    prior = load(PROFILE).costs
    async with Measurement(url, prior, most_s=MEASURE_S * slow_down) as measurement:
        return await measurement.run()


def _errors(found: EngineCosts, true: EngineCosts) -> dict[str, float]:
    return {
        name: abs(getattr(found, name) / getattr(true, name) - 1.0)
        for name in CONSTANTS
    }


def _online(row: dict[str, Any], true: EngineCosts) -> dict[str, Any]:
    found = true.changed(**row["costs"])
    works = [(p, p * p, n, c) for p, n, c in _STEPS]
    off = [abs(found.step_s(*work) / true.step_s(*work) - 1.0) for work in works]
    return {
        "rank": row["rank"],
        "source": row["source"],
        "steps": row["steps"],
        "step_prediction_ratio": row["step_prediction_ratio"],
        "max_step_error": float(np.max(off)),
        "noise": row["noise"],
        "rel_errors": _errors(found, true),
        "rel_standard_errors": {
            name: None if error is None else error / getattr(true, name)
            for name, error in row["standard_errors"].items()
        },
    }


def _show(result: dict[str, Any]) -> None:
    table = Table("engine", "constant", "true", "calibrate", "off", "online off")
    for rank, constants in result["constants"].items():
        online = result["online"][int(rank)]["rel_errors"]
        for name, row in constants.items():
            table.add_row(
                rank,
                name,
                f"{row['true']:.4g}",
                f"{row['found']:.4g}",
                f"{row['rel_error']:.1%}",
                f"{online[name]:.1%}",
            )
    console = Console()
    console.print(table)
    console.print(
        f"calibrate: {result['steps']} steps in {result['measure_s']:.1f} emulated s, "
        f"worst constant {result['max_rel_error']:.1%} off"
    )
    for row in result["online"]:
        console.print(
            f"online, engine {row['rank']}: {row['steps']} steps, costs from the "
            f"{row['source']}, worst step prediction {row['max_step_error']:.1%} off"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slow-down", type=float, default=8.0)
    parser.add_argument(
        "--most-error", type=float, default=0.05, help="exit code 1 beyond this"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
