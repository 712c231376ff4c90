"""`calrouter bench`: workloads against live servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vllm_calrouter.bench.compare import Benchmark, Settings
from vllm_calrouter.bench.server import BenchError
from vllm_calrouter.calibration import STAND_IN, ProfileError, shipped
from vllm_calrouter.console import Wrong, find_rate_option, json_option, seed_option
from vllm_calrouter.workloads.options import HELP, Traffic, traffic_options

_HELP = f"""Run a workload against live vLLM servers and measure it as simulate does.

Requests are sent when they arrive, whatever has become of those before, and every time
counts from when a request was to be sent. Before anything is measured a server must
give exactly the tokens that are asked for, the same text twice for the same greedy
request, and have moved a KV cache over every prefill-decode pair. Prefix caches are
emptied before each run where the server offers that (VLLM_SERVER_DEV_MODE=1), and are
of one run only in any case (a cache_salt of its own).

{HELP}

\b
Examples:
  calrouter bench --url http://127.0.0.1:8000 --workload mixed --rate 12
  calrouter bench --url old=http://10.0.0.5:8000 --url new=http://10.0.0.6:8000 \\
      --workload chat --seed 1 --seed 2 --seed 3 --output runs
  calrouter report runs

With several --url every server gets the same requests of each seed, one server after
the other within a seed, and differences are taken seed by seed against the first.
Runs are kept in the folder --output: what is complete there is not run again.
"""


@click.command(help=_HELP)
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="A server and what to call it; its policy without a name. May be given "
    "several times, to compare.",
)
@traffic_options
@seed_option("the workload")
@click.option(
    "--profile",
    default=STAND_IN,
    show_default=True,
    metavar="NAME|FILE",
    help="Whose SLO classes requests are of: "
    f"{', '.join(shipped())}, or a file (calrouter calibrate writes one).",
)
@click.option(
    "--slow-down",
    type=click.FloatRange(1e-3, 1e3),
    default=1.0,
    show_default=True,
    help="Engines are paced and so many times slower than the hardware they stand for: "
    "stretch arrivals and targets, divide times.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Requests at a server at a time; later ones wait here, and their time counts.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds after which a request has failed; times the slow-down.",
)
@click.option("--model", help="Served model to ask for; the first without it.")
@click.option(
    "--api-key",
    envvar="VLLM_API_KEY",
    show_envvar=True,
    help="Key of the servers.",
)
@find_rate_option("server")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder where runs and their requests are kept, for calrouter report.",
)
@json_option("run")
def bench(
    urls: tuple[str, ...],
    seeds: tuple[int, ...],
    find_rate: float | None,
    output: Path,
    as_json: bool,
    **written: Any,
) -> None:
    traffic = Traffic(**{name: written.pop(name) for name in Traffic.__struct_fields__})
    runs = []
    try:
        benchmark = Benchmark(named(urls), Settings(**written), output)
        if find_rate is not None:
            traffic = benchmark.find_rate(traffic, seeds[0], find_rate)
            click.echo(f"goodput {find_rate:g}: {traffic.rate:.4g} req/s", err=True)
        for run in benchmark.runs(traffic, list(dict.fromkeys(seeds))):
            runs.append(run)
            if as_json:
                click.echo(json.dumps(run))
    except (ProfileError, ValueError) as error:
        raise Wrong(error) from None
    if not as_json:
        from vllm_calrouter.simulation.tables import show

        show(runs)


def named(urls: Sequence[str]) -> dict[str, str]:
    """Addresses by name; one without a name is known by itself."""
    found: dict[str, str] = {}
    for text in urls:
        name, sign, url = text.partition("=")
        if not sign or "/" in name:
            name, url = text, text
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"--url {text}: write [NAME=]http://HOST:PORT")
        if name in found:
            raise BenchError(f"--url {text}: {name} is there twice")
        found[name] = url
    return found
