"""`calrouter calibrate`: a running server in, a profile and a report out."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from vllm_calrouter.calibration.fit import CONSTANTS, values_of, with_values
from vllm_calrouter.calibration.measure import (
    OF_ROLE,
    Measured,
    MeasureError,
    Measurement,
)
from vllm_calrouter.calibration.profile import (
    FASTEST_BYTES_PER_S,
    SCHEMA,
    STAND_IN,
    EngineCosts,
    Profile,
    ProfileError,
    SloClass,
    load,
    save,
    shipped,
)
from vllm_calrouter.console import Wrong

#: The targets the study sets: TPOT three times a decode step alone, TTFT 2.62 times
#: the prefill of a typical prompt (512 tokens); loose three times both.
_TPOT_STEPS = 3.0
_TTFT_PREFILLS = 2.62
_TYPICAL_TOKENS = 512
_LOOSE = 3.0

_HELP = """Measure what work costs on a running server's engines, and write a profile.

The server is vllm serve with --router-plugin calrouter. Each engine is sent prompts of
many lengths and batches of many sizes; how long its steps take it tells itself. It
stops when every constant's standard error is below 2 %. Best without other traffic;
nothing is changed on the server, but its prefix caches see prompts of no meaning.

\b
Example:
  calrouter calibrate --url http://localhost:8000 -o profile.json
  vllm serve ... --router-policy calibrated --router-config.profile profile.json
"""


@click.command(help=_HELP)
@click.option("--url", required=True, help="Of the server: http://HOST:PORT.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Profile to write.",
)
@click.option(
    "--api-key", envvar="VLLM_API_KEY", help="The server's; VLLM_API_KEY without it."
)
@click.option(
    "--profile",
    default=STAND_IN,
    show_default=True,
    metavar="NAME|FILE",
    help=f"What is thought before, of which little is believed: "
    f"{', '.join(shipped())}, or a file.",
)
@click.option(
    "--most-seconds",
    type=click.FloatRange(1, 3600),
    default=60.0,
    show_default=True,
    help="No round is begun later.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the fitted curves and what was measured here (PNG; needs the extra: "
    "pip install 'vllm-calrouter[plot]').",
)
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def calibrate(
    url: str,
    output: Path,
    api_key: str | None,
    profile: str,
    most_seconds: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Wrong(
            "--plot needs matplotlib: pip install 'vllm-calrouter[plot]', or drop it"
        )
    for option, path in (("-o", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise Wrong(f"{option} {path}: there is no such folder")
    try:
        prior = load(profile).costs
        measured = asyncio.run(measure(url, prior, api_key, most_seconds))
        found = make_profile(measured, prior)
        save(found, output)
    except (MeasureError, ProfileError, ValueError) as error:
        raise Wrong(error) from None
    if plot is not None:
        from vllm_calrouter.calibration.plot import draw

        try:
            draw(measured, plot)
        except OSError as error:
            raise Wrong(f"--plot {plot} cannot be written: {error}") from None
    if as_json:
        click.echo(json.dumps(report(measured, found)))
        return
    from vllm_calrouter.calibration.tables import show

    show(report(measured, found), str(output))


async def measure(
    url: str, prior: EngineCosts, key: str | None, most_s: float
) -> Measured:
    """Measure with a progress bar on stderr, where somebody looks at it.

    Raises MeasureError.
    """
    from tqdm import tqdm

    with tqdm(
        total=most_s,
        desc="calibrate",
        unit="s",
        bar_format="{desc} {bar} {n:.0f}/{total:.0f} s at most{postfix}",
        file=sys.stderr,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def tell(rounds: int, wanting: int, worst: float) -> None:
            bar.set_postfix_str(
                f"round {rounds}: {wanting} constants open, worst {worst:.1%}"
            )

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.5)
                bar.update(min(0.5, most_s - bar.n))

        ticking = asyncio.create_task(tick())
        try:
            async with Measurement(
                url, prior, key=key, most_s=most_s, tell=tell
            ) as measurement:
                return await measurement.run()
        finally:
            ticking.cancel()


def make_profile(measured: Measured, prior: EngineCosts) -> Profile:
    """The profile of what was measured; raises ValueError.

    Where several engines are of a role, a constant is their median. What was not
    measured is the prior's, and its note says so.
    """
    values, errors = values_of(prior), {}
    for index, name in enumerate(CONSTANTS):
        fits = [measured.fits[e.rank] for e in measured.engines]
        asked = [
            fit
            for fit, engine in zip(fits, measured.engines, strict=True)
            if name in OF_ROLE[engine.role]
        ]
        values[index] = float(np.median([values_of(f.costs)[index] for f in asked]))
        errors[name] = float(np.median([f.standard_errors[name] for f in asked]))
    costs = with_values(prior, values).changed(**_whole(measured.transfer))
    capacity = min(engine.kv_tokens for engine in measured.engines)
    costs = msgspec.structs.replace(costs, kv_capacity_tokens=capacity)
    notes = _transfer_notes(measured.transfer, costs)
    served = measured.served
    return Profile(
        schema=SCHEMA,
        model=served["model"],
        dtype=served["dtype"],
        kv_dtype=served["kv_dtype"],
        tensor_parallel=served["tensor_parallel"],
        gpu=served["gpu"],
        vllm=measured.vllm,
        date=datetime.datetime.now(datetime.timezone.utc).date(),
        source=f"calrouter calibrate: {sum(len(e.steps) for e in measured.engines)} "
        f"steps of {len(measured.engines)} engines in {measured.seconds:.0f} s.",
        costs=costs,
        slo=proposed_slo(costs),
        standard_errors=errors,
        notes=notes,
    )


def proposed_slo(costs: EngineCosts) -> dict[str, SloClass]:
    """Targets in proportion to what the engines can do, as the study sets them."""
    tpot_s = _TPOT_STEPS * costs.step_s(0, 0, 1, _TYPICAL_TOKENS)
    ttft_s = _TTFT_PREFILLS * costs.prefill_s(_TYPICAL_TOKENS)
    return {
        "tight": SloClass(ttft_s, tpot_s, _TTFT_PREFILLS),
        "loose": SloClass(_LOOSE * ttft_s, _LOOSE * tpot_s, _LOOSE * _TTFT_PREFILLS),
    }


def report(measured: Measured, profile: Profile) -> dict[str, Any]:
    """What was found, as plain data."""
    return {
        "measure_s": measured.seconds,
        "rounds": measured.rounds,
        "complete": measured.complete,
        "constants": {
            name: value
            for name, value in msgspec.to_builtins(profile.costs).items()
            if value is not None
        },
        "standard_errors": profile.standard_errors,
        "not_measured": sorted(set(profile.notes) - set(measured.transfer)),
        "notes": profile.notes,
        "slo": msgspec.to_builtins(profile.slo),
        "engines": [
            {
                "rank": engine.rank,
                "role": engine.role,
                "steps": len(engine.steps),
                "outliers": fit.outliers,
                "median_abs_residual": fit.median_error,
                "p90_abs_residual": float(np.quantile(np.abs(fit.residuals), 0.9)),
                "constants": {
                    name: getattr(fit.costs, name) for name in OF_ROLE[engine.role]
                },
                "standard_errors": {
                    name: fit.standard_errors[name] for name in OF_ROLE[engine.role]
                },
            }
            for engine in measured.engines
            for fit in (measured.fits[engine.rank],)
        ],
    }


#: Notes on constants of transfers that are the prior's.
_UNMOVED = "Not measured: no KV cache was moved. The prior's."
_ONE_SIZE = "Not measured: no KV caches of unlike sizes were moved. The prior's."


def _transfer_notes(transfer: dict[str, float], costs: EngineCosts) -> dict[str, str]:
    """What is to be known of the constants of transfers, by name."""
    notes: dict[str, str] = {}
    for far in ("", "far_"):
        base, rate = f"{far}transfer_base_s", f"{far}transfer_bytes_per_s"
        if base not in transfer:
            if getattr(costs, base) is not None:
                notes |= {base: _ONE_SIZE, rate: _ONE_SIZE}
        elif transfer[rate] == FASTEST_BYTES_PER_S:
            notes[rate] = "A large KV cache took no longer than a small one."
    if "kv_bytes_per_token" not in transfer:
        notes["kv_bytes_per_token"] = _UNMOVED
    return notes


def _whole(transfer: dict[str, float]) -> dict[str, float]:
    """With those constants whole that are counts."""
    whole = dict(transfer)
    if "kv_bytes_per_token" in whole:
        whole["kv_bytes_per_token"] = round(whole["kv_bytes_per_token"])
    return whole
