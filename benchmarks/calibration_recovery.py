"""Whether calibration finds constants that are known: real servers, paced engines.

    python -m benchmarks.calibration_recovery [--json]

A real `vllm serve` with two engines that do both, whose steps take what a profile says
(`vllm_calrouter.emulation`), times a slow-down so that few cores keep up. Engine 1 is
made 1.5 times slower. Asked to find the constants again:

  calibrate  what `calrouter calibrate` runs, which knows a profile wrong by the
             slow-down and is given 60 s;
  online     the router's own fit, which starts from a profile that is wrong by a factor
             of 7.4, after 30 s of ordinary traffic that the router itself places; its
             constants as the state page tells them;
  no profile, crooked
             the same fit on the same engines' steps, as the state page told them, but
             started from no profile (the stand-in, wrong by the slow-down), and from
             one of which each constant is wrong by another factor, up to 7.4.

The exit code is 0 if every one of them has every constant of both engines within 5 %,
and `calibrate` took at most 60 s. Beside the errors stands by how much the steps that
were seen would be mispriced at the worst, which is what placements are made of: a
constant that weighs little in these steps may be off with no harm, and the other way
round a constant is only known as well as traffic excites it.

Times are in emulated seconds: the clock's divided by the slow-down. An error is that of
one constant of one engine, relative to the constant.

What would mislead:
- A machine that does not keep up. A step that takes longer than it should is then
  measured as what it took; the server's log warns, and so does this.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model
from vllm_calrouter.calibration import EngineCosts, load, save
from vllm_calrouter.calibration.fit import (
    CONSTANTS,
    as_arrays,
    predict,
    values_of,
    with_values,
)
from vllm_calrouter.calibration.measure import Measured, Measurement
from vllm_calrouter.calibration.online import OnlineFit
from vllm_calrouter.emulation import Pace, arguments
from vllm_calrouter.messages import StepTiming

PROFILE = "a40-qwen2.5-3b"
WRONG = 7.4
SLOWER = 1 / 1.5
ENGINES = 2

#: By which factor each constant of the crooked profile is wrong, in their order.
CROOKED = (2.0, 1 / 7.4, 7.4, 0.5, 3.0, 1 / 3)

#: Emulated seconds.
TRAFFIC_S = 30.0
MEASURE_S = 60.0

#: Requests an emulated second, of all engines.
_RATE = 10.0
_OUTPUT_TOKENS = 150
_KV_CACHE_BYTES = 64 << 20
_POLL_S = 0.05
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_LATE = "does not keep up"


@dataclass(frozen=True)
class Found:
    """What was found, on the clock's time.

    Fields:
        true: the engines' costs, by rank.
        costs: by who found them, and rank.
        steps: that engines told of during traffic, by rank.
        heard: how many the router itself had, by rank.
        measured: by `calibrate`.
        late: how often the engines said that the machine does not keep up.
    """

    true: list[EngineCosts]
    costs: dict[str, list[EngineCosts]]
    steps: list[list[StepTiming]]
    heard: list[int]
    measured: Measured
    late: int


def main() -> None:
    options = _options()
    end_servers_when_terminated()
    pace = Pace(PROFILE, slow_down=options.slow_down, speed={1: SLOWER})
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), pace)
    result = summary(found, pace.slow_down)
    if options.json:
        print(json.dumps(result))
    else:
        _show(found, result)
    if result["max_rel_error"] > options.most_error or result["measure_s"] > MEASURE_S:
        sys.exit(1)


def run(folder: Path, pace: Pace) -> Found:
    """Start the server, let everyone find its constants."""
    log = folder / "server.log"
    cluster = Cluster(
        make_tiny_model(folder / "tiny"),
        engines=ENGINES,
        prefill=0,
        policy="calibrated",
        arguments=[
            *arguments(pace),
            *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)),
            *("--router-config.calibration", "on"),
            *("--router-config.profile", str(_wrong_profile(folder, pace))),
        ],
        log=log,
    )
    with cluster:
        rows, steps = asyncio.run(after_traffic(cluster.url, pace.slow_down))
        measured = asyncio.run(measure(cluster.url, pace.slow_down))
    true = [pace.costs(rank) for rank in range(ENGINES)]
    stand_in = load(PROFILE).costs
    crooked = with_values(stand_in, values_of(stand_in) * np.array(CROOKED))
    return Found(
        true=true,
        costs={
            "calibrate": [measured.fits[rank].costs for rank in range(ENGINES)],
            "online": [true[r["rank"]].changed(**r["costs"]) for r in rows],
            "no profile": [_fitted(stand_in, one) for one in steps],
            "crooked": [_fitted(crooked, one) for one in steps],
        },
        steps=steps,
        heard=[row["steps"] for row in rows],
        measured=measured,
        late=log.read_text(errors="replace").count(_LATE),
    )


def _fitted(prior: EngineCosts, steps: list[StepTiming]) -> EngineCosts:
    fit = OnlineFit(prior)
    for step in steps:
        fit.observe(step)
    return fit.costs


def _wrong_profile(folder: Path, pace: Pace) -> Path:
    profile = load(PROFILE)
    costs = profile.costs.faster(WRONG / pace.slow_down)
    path = folder / "wrong.json"
    save(msgspec.structs.replace(profile, costs=costs), path)
    return path


async def after_traffic(
    url: str, slow_down: float
) -> tuple[list[dict[str, Any]], list[list[StepTiming]]]:
    """What the router thinks of its engines after a while of ordinary requests.

    And the steps that engines told of, by rank.
    """
    poll_s = _POLL_S * slow_down
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=_LIMITS) as http,
        Measurement(url, load(PROFILE).costs, poll_s=poll_s) as watcher,
    ):
        asked: list[asyncio.Task[None]] = []
        engines = await watcher.watch(_ask_for(http, slow_down, asked))
        state = (await http.get("/router/state?engines=false")).json()
        await asyncio.gather(*asked)
    rows: list[dict[str, Any]] = state["calibration"]
    return rows, [engine.steps for engine in engines]


async def _ask_for(
    http: httpx.AsyncClient, slow_down: float, asked: list[asyncio.Task[None]]
) -> None:
    """Send requests at random for `TRAFFIC_S`; their tasks go into `asked`."""
    draw = random.Random(1)

    async def ask() -> None:
        tokens = min(3000, int(draw.lognormvariate(6.0, 1.0)) + 4)
        body = {
            "model": "tiny",
            "prompt": [draw.randrange(40, 240) for _ in range(tokens)],
            "max_tokens": 1 + min(900, int(draw.expovariate(1 / _OUTPUT_TOKENS))),
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()

    with _bar("traffic", TRAFFIC_S) as bar:
        began_s = time.monotonic()
        while (now_s := (time.monotonic() - began_s) / slow_down) < TRAFFIC_S:
            bar.update(now_s - bar.n)
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(draw.expovariate(_RATE / slow_down))


async def measure(url: str, slow_down: float) -> Measured:
    prior = load(PROFILE).costs
    began_s = time.monotonic()
    with _bar("calibrate", MEASURE_S) as bar:

        def tell(*_: object) -> None:
            bar.update((time.monotonic() - began_s) / slow_down - bar.n)

        async with Measurement(
            url, prior, most_s=MEASURE_S * slow_down, tell=tell
        ) as measurement:
            return await measurement.run()


def summary(found: Found, slow_down: float) -> dict[str, Any]:
    """What `--json` prints; times in emulated seconds."""
    constants = {
        str(rank): {
            name: {
                "true": getattr(true, name) / slow_down,
                **{
                    who.replace(" ", "_"): getattr(costs[rank], name) / slow_down
                    for who, costs in found.costs.items()
                },
            }
            for name in CONSTANTS
        }
        for rank, true in enumerate(found.true)
    }
    return {
        "max_rel_error": max(
            float(_errors(costs[rank], true).max())
            for costs in found.costs.values()
            for rank, true in enumerate(found.true)
        ),
        "measure_s": found.measured.seconds / slow_down,
        "constants": constants,
    }


def _errors(found: EngineCosts, true: EngineCosts) -> np.ndarray:
    """Relative error of each constant, in their order."""
    errors: np.ndarray = np.abs(values_of(found) / values_of(true) - 1.0)
    return errors


def _mispriced(found: EngineCosts, true: EngineCosts, steps: list[StepTiming]) -> float:
    """Relative error of the worst priced of these steps."""
    work, _ = as_arrays(steps)
    ratios = predict(work, values_of(found)) / predict(work, values_of(true))
    return float(np.abs(ratios - 1.0).max())


def _show(found: Found, result: Mapping[str, Any]) -> None:
    table = Table("engine", "constant", "true", *(f"{who}, off" for who in found.costs))
    for rank, true in enumerate(found.true):
        off = {who: _errors(costs[rank], true) for who, costs in found.costs.items()}
        for index, name in enumerate(CONSTANTS):
            table.add_row(
                str(rank),
                name,
                f"{result['constants'][str(rank)][name]['true']:.4g}",
                *(f"{errors[index]:.1%}" for errors in off.values()),
            )
        table.add_row(
            str(rank),
            "worst priced step",
            "",
            *(
                f"{_mispriced(costs[rank], true, found.steps[rank]):.1%}"
                for costs in found.costs.values()
            ),
            end_section=True,
        )
    console = Console()
    # Names are not cut off where the output is no terminal.
    console.width = max(console.width, 110)
    console.print(table)
    told = sum(len(engine.steps) for engine in found.measured.engines)
    console.print(
        f"calibrate: {told} steps in {result['measure_s']:.1f} emulated s; online: "
        f"{sum(found.heard)} steps in {TRAFFIC_S:.0f} emulated s; worst constant "
        f"{result['max_rel_error']:.1%} off",
        soft_wrap=True,
    )
    if found.late:
        console.print(
            f"the machine did not keep up, {found.late} times said: --slow-down"
        )


def _bar(what: str, total_s: float) -> Any:
    return tqdm(
        total=total_s,
        desc=what,
        bar_format="{desc} {bar} {n:.0f}/{total:.0f} emulated s",
        file=sys.stderr,
        leave=False,
        disable=not sys.stderr.isatty(),
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument(
        "--slow-down",
        type=float,
        default=8.0,
        help="how many times as long as on the hardware every step takes (default 8)",
    )
    parser.add_argument(
        "--most-error",
        type=float,
        default=0.05,
        help="exit code 1 if a constant is further off (default 0.05)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
