"""Whether simulated figures are those of real servers: both, with the same requests.

    python -m benchmarks.validation [--slow-down FACTOR] [--markdown]

Cells like those of the grid of regimes (`benchmarks.regimes`), each under round-robin
as a proxy does it today, vLLM's own choice, and the default. For each a real `vllm
serve` with prefill and decode engines, whose steps take what a profile says
(`vllm_calrouter.emulation`) times a slow-down, so that few cores keep up: real
schedulers, KV caches, NIXL transfers, API server and HTTP. The client of `calrouter
bench` sends each workload, and `calrouter simulate` serves the same requests in virtual
time. Times are in emulated seconds: the clock's, divided by the slow-down.

Passes (exit code 0) when the mean absolute difference in goodput is at most 0.03, each
P99 of TTFT is 0.8 to 1.25 times the other, and where paced setups differ by more than
0.02 in goodput the simulator names the same best one. Takes about 35 minutes, and a
machine that does nothing else meanwhile.

A run in which the machine did not keep up says nothing about the simulator: engines
were late with their steps, or the client with its requests. Such runs are told and the
validation does not pass. All others are kept in `.cache/validation` and not run again
with the same code: call it again to go on, or to run anew what was disturbed.

What would mislead:
- The hardware. Engines are paced to a profile; that real ones follow it is another
  question (docs/pricing.md).
- Asynchronous scheduling, which the simulator does not have, is off on both sides.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.markdown import markdown
from benchmarks.regimes import grid
from benchmarks.regimes.grid import DEFAULT, OWN, ROUND_ROBIN
from benchmarks.runs import as_line, stored
from examples.cpu_cluster import Cluster, end_servers_when_terminated
from examples.tiny_model import make_tiny_model
from vllm_calrouter.bench.compare import Benchmark, Settings
from vllm_calrouter.calibration import load, save
from vllm_calrouter.emulation import Pace, arguments
from vllm_calrouter.runs import code_version
from vllm_calrouter.simulation.pool import simulated
from vllm_calrouter.workloads import FAMILIES
from vllm_calrouter.workloads.options import Traffic

Run = dict[str, Any]

PROFILE = "a40-qwen2.5-3b"
#: Names of `benchmarks.regimes`.
SETUPS = (ROUND_ROBIN, OWN, DEFAULT)
DURATION_S = 20.0


class Cell(NamedTuple):
    """What arrives (requests a second), and on how many engines."""

    name: str
    workload: str
    rate: float
    prefill: int = 2
    decode: int = 2


#: Fewer decode engines than in the grid: two cores keep up with four engines.
CELLS = (
    Cell("mixed, 2 + 2", "mixed", FAMILIES["mixed"].rate),
    Cell("chat, 2 + 2", "chat", FAMILIES["chat"].rate),
    Cell("docs, 2 + 2", "docs", FAMILIES["docs"].rate),
    Cell("mixed, starved 1 + 2", "mixed", 0.5 * FAMILIES["mixed"].rate, 1, 2),
)

_MODEL_LEN = 16_384
_STEP_TOKENS = 2_048
#: As `Cluster` has them.
_BLOCK_TOKENS, _SLOTS = 32, 64
#: vLLM's coordinator tells requests and KV use so often, on the machine's own clock.
_REPORT_MS = 100.0

MOST_RESIDUAL = 0.03
P99_RATIOS = (0.8, 1.25)
TELLING_DIFFERENCE = 0.02
#: Emulated seconds that the client may be late with a request, at P99; a fifth of the
#: shortest step.
MOST_SENT_LATE_S = 0.0025

_FOLDER = Path(".cache/validation")
_LATE = "does not keep up"


class Case(NamedTuple):
    """One cell under one setup."""

    cell: Cell
    setup: str

    @property
    def server(self) -> tuple[str, int, int]:
        """What a server is started with: setup, prefill and decode engines."""
        return self.setup, self.cell.prefill, self.cell.decode


class Both(NamedTuple):
    """A case's figures on paced engines and in virtual time."""

    paced: Run
    simulated: Run

    @property
    def residual(self) -> float:
        """Simulated less paced goodput."""
        return float(self.simulated["goodput"] - self.paced["goodput"])

    def ratio(self, of: str, part: str) -> float:
        """Simulated over paced."""
        return float(self.simulated[of][part] / self.paced[of][part])


def cases() -> list[Case]:
    return [Case(cell, setup) for cell in CELLS for setup in SETUPS]


def paced_runs(slow_down: float, seed: int) -> dict[Case, Run]:
    """All cases on real servers, those made before from the store."""
    store = _FOLDER / "paced.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    code = code_version()
    keys = {
        case: f"{code} {as_words(case)} {DURATION_S:g} {slow_down:g} {seed}"
        for case in cases()
    }
    found = stored(store)
    missing = [case for case in cases() if keys[case] not in found]
    for server in dict.fromkeys(case.server for case in missing):
        on_it = [case for case in missing if case.server == server]
        for case, run in _measured(on_it, slow_down, seed):
            found[keys[case]] = run
            if not disturbed(run):
                with store.open("a") as file:
                    file.write(as_line(keys[case], run))
    return {case: found[key] for case, key in keys.items()}


def _measured(
    on_it: Sequence[Case], slow_down: float, seed: int
) -> Iterator[tuple[Case, Run]]:
    """Cases that share a server, which is started for them."""
    setup, prefill, decode = on_it[0].server
    print(f"starting {prefill} + {decode} paced engines: {setup}", file=sys.stderr)
    # A folder of its own: what was disturbed before must not be found there.
    output = _FOLDER / f"{time.time():.0f}"
    cluster = a_cluster(setup, prefill, decode, slow_down)
    with cluster:
        settings = Settings(profile=PROFILE, slow_down=slow_down)
        benchmark = Benchmark({setup: cluster.url}, settings, output)
        for case in on_it:
            traffic = Traffic(
                workload=case.cell.workload, rate=case.cell.rate, duration=DURATION_S
            )
            before = _late_warnings(cluster)
            (run,) = benchmark.runs(traffic, [seed])
            yield case, {**run, "late": _late_warnings(cluster) - before}


def _late_warnings(cluster: Cluster) -> int:
    """How often engines have said that their steps came late."""
    return cluster.log.read_text(errors="replace").count(_LATE)


def disturbed(run: Run) -> bool:
    """Whether the machine did not keep up with a run."""
    return bool(run["late"] or run["sent_late_p99_s"] > MOST_SENT_LATE_S)


def a_cluster(setup: str, prefill: int, decode: int, slow_down: float) -> Cluster:
    pace = Pace(PROFILE, slow_down=slow_down, prefill=prefill)
    blocks = load(PROFILE).costs.kv_capacity_tokens // _BLOCK_TOKENS + 1
    return Cluster(
        make_tiny_model(Path(".cache/tiny")),
        engines=prefill + decode,
        prefill=prefill,
        arguments=[
            *_of_server(grid.SETUPS[setup]),
            *arguments(pace),
            # The others price nothing, and refuse a profile.
            *(_prices(slow_down) if setup == DEFAULT else ()),
            *("--max-model-len", str(_MODEL_LEN)),
            *("--hf-overrides", json.dumps({"max_position_embeddings": _MODEL_LEN})),
            *("--max-num-batched-tokens", str(_STEP_TOKENS)),
            *("--num-gpu-blocks-override", str(blocks)),
            "--no-async-scheduling",
        ],
        environ={"VLLM_SERVER_DEV_MODE": "1"},
        log=_FOLDER / f"server-{prefill}-{decode}-{SETUPS.index(setup)}.log",
    )


def _of_server(words: str) -> Iterator[str]:
    """A setup's words, as `vllm serve` takes them."""
    options = iter(shlex.split(words))
    for option, value in zip(options, options, strict=True):
        if option == "--policy":
            yield from ("--router-policy", value)
        else:
            key, value = value.split("=", 1)
            yield from (f"--router-config.{key}", value)


def _prices(slow_down: float) -> list[str]:
    """What work costs on the paced engines, for policies and orders that price on
    their clock."""
    profile = load(PROFILE)
    costs = profile.costs.faster(1 / slow_down).changed(
        transfer_base_s=profile.costs.transfer_base_s * slow_down,
        transfer_bytes_per_s=profile.costs.transfer_bytes_per_s / slow_down,
    )
    path = _FOLDER / f"slow-{slow_down:g}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save(msgspec.structs.replace(profile, costs=costs), path)
    return ["--router-config.profile", str(path)]


def as_words(case: Case) -> str:
    """A case, as `calrouter simulate` takes it."""
    cell = case.cell
    return (
        f"--workload {cell.workload} --rate {cell.rate:g} --prefill {cell.prefill} "
        f"--decode {cell.decode} {grid.SETUPS[case.setup]}"
    )


def simulated_run(case: Case, slow_down: float, seed: int) -> Run:
    """The same in virtual time."""
    return simulated(
        f"{as_words(case)} --duration {DURATION_S:g} --seed {seed} --profile {PROFILE} "
        f"--max-model-len {_MODEL_LEN} --max-num-seqs {_SLOTS} "
        f"--max-num-batched-tokens {_STEP_TOKENS} --block-size {_BLOCK_TOKENS} "
        f"--report-ms {max(1.0, _REPORT_MS / slow_down):g} --output {_FOLDER}"
    )


def verdict(found: dict[Case, Both]) -> dict[str, Any]:
    """The three checks, over all cases."""
    ratios = [both.ratio("ttft_s", "p99") for both in found.values()]
    residual = fmean(abs(both.residual) for both in found.values())
    disagree = [cell.name for cell in CELLS if not _same_best(cell, found)]
    lost = [
        f"{case.cell.name}: {case.setup}"
        for case, both in found.items()
        if disturbed(both.paced)
    ]
    return {
        "mean_abs_goodput_residual": residual,
        "ttft_p99_ratio_least": min(ratios),
        "ttft_p99_ratio_most": max(ratios),
        "another_best_setup": disagree,
        "disturbed": lost,
        "passes": not lost
        and residual <= MOST_RESIDUAL
        and P99_RATIOS[0] <= min(ratios)
        and max(ratios) <= P99_RATIOS[1]
        and not disagree,
    }


def _same_best(cell: Cell, found: dict[Case, Both]) -> bool:
    """Whether no setup beats the simulator's best one by a telling difference."""
    of = {case.setup: both for case, both in found.items() if case.cell == cell}
    simulated = max(of, key=lambda setup: of[setup].simulated["goodput"])
    best = max(both.paced["goodput"] for both in of.values())
    return bool(best - of[simulated].paced["goodput"] <= TELLING_DIFFERENCE)


_COLUMNS = {
    "TTFT P50, ms": ("ttft_s", "p50"),
    "TTFT P99, ms": ("ttft_s", "p99"),
    "TPOT P50, ms": ("tpot_s", "p50"),
    "TPOT P99, ms": ("tpot_s", "p99"),
}


def rows(found: dict[Case, Both]) -> Iterator[list[str]]:
    """Cells of the table: paced, simulated, and the second less or over the first."""
    for case, both in found.items():
        cells = [case.cell.name, case.setup]
        paced, simulated = both.paced["goodput"], both.simulated["goodput"]
        cells.append(f"{paced:.3f} / {simulated:.3f} ({both.residual:+.3f})")
        for of, part in _COLUMNS.values():
            paced, simulated = both.paced[of][part], both.simulated[of][part]
            ratio = both.ratio(of, part)
            cells.append(f"{1e3 * paced:.3g} / {1e3 * simulated:.3g} ({ratio:.2f})")
        yield cells


def main() -> int:
    options = _options()
    end_servers_when_terminated()
    paced = paced_runs(options.slow_down, options.seed)
    found = {
        case: Both(paced[case], simulated_run(case, options.slow_down, options.seed))
        for case in cases()
    }
    result = verdict(found)
    headings = ["cell", "setup", "goodput", *_COLUMNS]
    if options.markdown:
        print(markdown(headings, rows(found)))
    else:
        table = Table(*headings, title="Paced engines / simulated (simulated to paced)")
        for cells in rows(found):
            table.add_row(*cells)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(json.dumps(result))
    return 0 if result["passes"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--slow-down",
        type=float,
        default=4.0,
        metavar="FACTOR",
        help="of the engines; more takes longer, and asks less of the machine "
        "(default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--markdown", action="store_true", help="the table for docs/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
