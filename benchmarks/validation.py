"""Whether simulated figures are those of real servers: both, with the same requests.

    python -m benchmarks.validation [--slow-down FACTOR] [--markdown]

For each policy a real `vllm serve` with 2 prefill + 2 decode engines, whose steps take
what a profile says (`vllm_calrouter.emulation`) times a slow-down, so that few cores
keep up: real schedulers, KV caches, NIXL transfers, API server and HTTP. The client of
`calrouter bench` sends each workload, and `calrouter simulate` serves the same requests
in virtual time. Times are in emulated seconds: the clock's, divided by the slow-down.

Passes (exit code 0) when the mean absolute difference in goodput is at most 0.03, each
P99 of TTFT is 0.8 to 1.25 times the other, and where paced policies differ by more than
0.02 in goodput the simulator names the same best one. Takes about 45 minutes, and a
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
from benchmarks.runs import as_line, stored
from examples.cpu_cluster import Cluster
from examples.tiny_model import make_tiny_model
from vllm_calrouter.bench.compare import Benchmark, Settings
from vllm_calrouter.calibration import load, save
from vllm_calrouter.emulation import Pace, arguments
from vllm_calrouter.runs import code_version
from vllm_calrouter.simulation.pool import simulated
from vllm_calrouter.workloads.options import Traffic

Run = dict[str, Any]

PROFILE = "a40-qwen2.5-3b"
POLICIES = ("round_robin", "least_loaded", "calibrated")
#: Workloads and rates, requests a second, that keep 2 + 2 engines under pressure.
RATES = {"mixed": 21.0, "docs": 10.0, "chat": 30.0}
DURATION_S = 20.0

PREFILL, DECODE = 2, 2
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
    """One workload under one policy."""

    workload: str
    policy: str


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
    return [Case(workload, policy) for workload in RATES for policy in POLICIES]


def paced_runs(slow_down: float, seed: int) -> dict[Case, Run]:
    """All cases on real servers, those made before from the store."""
    store = _FOLDER / "paced.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    code = code_version()
    keys = {
        case: f"{code} {case.workload} {RATES[case.workload]:g} {DURATION_S:g} "
        f"{case.policy} {slow_down:g} {seed}"
        for case in cases()
    }
    found = stored(store)
    for policy in POLICIES:
        missing = [c for c in cases() if c.policy == policy and keys[c] not in found]
        if not missing:
            continue
        for case, run in _measured(policy, missing, slow_down, seed):
            found[keys[case]] = run
            if not disturbed(run):
                with store.open("a") as file:
                    file.write(as_line(keys[case], run))
    return {case: found[key] for case, key in keys.items()}


def _measured(
    policy: str, missing: Sequence[Case], slow_down: float, seed: int
) -> Iterator[tuple[Case, Run]]:
    print(f"starting {PREFILL} + {DECODE} paced engines, {policy}", file=sys.stderr)
    cluster = a_cluster(policy, slow_down)
    # A folder of its own: what was disturbed before must not be found there.
    output = _FOLDER / f"{policy}-{time.time():.0f}"
    with cluster:
        settings = Settings(profile=PROFILE, slow_down=slow_down)
        benchmark = Benchmark({policy: cluster.url}, settings, output)
        for case in missing:
            traffic = Traffic(
                workload=case.workload,
                rate=RATES[case.workload],
                duration=DURATION_S,
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


def a_cluster(policy: str, slow_down: float) -> Cluster:
    pace = Pace(PROFILE, slow_down=slow_down, prefill=PREFILL)
    blocks = load(PROFILE).costs.kv_capacity_tokens // _BLOCK_TOKENS + 1
    return Cluster(
        make_tiny_model(Path(".cache/tiny")),
        engines=PREFILL + DECODE,
        prefill=PREFILL,
        policy=policy,
        arguments=[
            *arguments(pace),
            *_prices(slow_down),
            *("--max-model-len", str(_MODEL_LEN)),
            *("--hf-overrides", json.dumps({"max_position_embeddings": _MODEL_LEN})),
            *("--max-num-batched-tokens", str(_STEP_TOKENS)),
            *("--num-gpu-blocks-override", str(blocks)),
            "--no-async-scheduling",
        ],
        environ={"VLLM_SERVER_DEV_MODE": "1"},
        log=_FOLDER / f"{policy}.log",
    )


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


def simulated_run(case: Case, slow_down: float, seed: int) -> Run:
    """The same in virtual time."""
    return simulated(
        f"--workload {case.workload} --rate {RATES[case.workload]:g} "
        f"--duration {DURATION_S:g} --seed {seed} --policy {case.policy} "
        f"--prefill {PREFILL} --decode {DECODE} --profile {PROFILE} "
        f"--max-model-len {_MODEL_LEN} --max-num-seqs {_SLOTS} "
        f"--max-num-batched-tokens {_STEP_TOKENS} --block-size {_BLOCK_TOKENS} "
        f"--report-ms {max(1.0, _REPORT_MS / slow_down):g} --output {_FOLDER}"
    )


def verdict(found: dict[Case, Both]) -> dict[str, Any]:
    """The three checks, over all cases."""
    ratios = [both.ratio("ttft_s", "p99") for both in found.values()]
    residual = fmean(abs(both.residual) for both in found.values())
    disagree = [w for w in RATES if not _same_best(w, found)]
    lost = [f"{c.workload}, {c.policy}" for c, b in found.items() if disturbed(b.paced)]
    return {
        "mean_abs_goodput_residual": residual,
        "ttft_p99_ratio_least": min(ratios),
        "ttft_p99_ratio_most": max(ratios),
        "another_best_policy": disagree,
        "disturbed": lost,
        "passes": not lost
        and residual <= MOST_RESIDUAL
        and P99_RATIOS[0] <= min(ratios)
        and max(ratios) <= P99_RATIOS[1]
        and not disagree,
    }


def _same_best(workload: str, found: dict[Case, Both]) -> bool:
    """Whether no policy beats the simulator's best one by a telling difference."""
    of = {case.policy: both for case, both in found.items() if case[0] == workload}
    simulated = max(of, key=lambda policy: of[policy].simulated["goodput"])
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
        cells = [case.workload, case.policy]
        paced, simulated = both.paced["goodput"], both.simulated["goodput"]
        cells.append(f"{paced:.3f} / {simulated:.3f} ({both.residual:+.3f})")
        for of, part in _COLUMNS.values():
            paced, simulated = both.paced[of][part], both.simulated[of][part]
            ratio = both.ratio(of, part)
            cells.append(f"{1e3 * paced:.3g} / {1e3 * simulated:.3g} ({ratio:.2f})")
        yield cells


def main() -> int:
    options = _options()
    paced = paced_runs(options.slow_down, options.seed)
    found = {
        case: Both(paced[case], simulated_run(case, options.slow_down, options.seed))
        for case in cases()
    }
    result = verdict(found)
    headings = ["workload", "policy", "goodput", *_COLUMNS]
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
        default=8.0,
        metavar="FACTOR",
        help="of the engines; more takes longer, and asks less of the machine "
        "(default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="the table for docs/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
