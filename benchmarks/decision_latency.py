"""How long one choice of a prefill and a decode engine takes.

    python -m benchmarks.decision_latency [--json]

One operation is one choice of a pair by the policy `calibrated`: a prefill engine and a
decode engine, each by the least price among its pool. Pools are 2 + 4, 16 + 48 and
256 + 768 engines. Before each choice an engine's message is heard, after it both legs
are booked and the oldest are released, so that no two choices see the same state; only
the choice is timed.

  C++           in the core, by its own clock (some 0.03 microseconds are the clock's)
  C++, all new  the same when the figures of every engine have changed
  C++, deadline by the policy `deadline`, which goes through each prefill engine's queue
  binding       the same two calls from Python
  decide        with the reason and all scores as Python objects, as the router calls it
  NumPy         the same price, one array operation for all engines of a pool
  Python        the same price, one engine after the other

All replay the same script of messages and requests, as far as each gets in its time,
and all but `deadline` must pick the same engines; otherwise the run ends with an error.
The factor is the median of a row over C++'s.

What would mislead:
- A warm loop: code and state are in the CPU's caches, which a server's are not always.
- A quiet cluster. The core keeps what no request changes of an engine's price until the
  engine's figures change: at most five do between two choices of the script. The row
  "C++, all new" has every engine change before every choice.
- Absolute times of a shared machine. Compare within one run only.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.price import (
    A40_QWEN_3B,
    Booking,
    Books,
    NumpyRouter,
    PlainRouter,
    Pool,
    Request,
)
from benchmarks.quantiles import quantiles_us
from vllm_calrouter import _core
from vllm_calrouter._core import Costs, Phase, Policy, Table

SIZES = (6, 64, 1024)
_CHOICES = 20_000
#: Seconds that each of the slow versions may take at each size.
_BUDGET_S = 4.0
_LEGS_AN_ENGINE = 8
_BLOCK_TOKENS = 16
_KV_BLOCKS = A40_QWEN_3B.kv_capacity_tokens // _BLOCK_TOKENS

#: The one version that places by another rule.
DEADLINE = "C++, deadline"

Pick = tuple[int, int]
Script = list[tuple[dict[str, float] | None, int, int, float, float]]


def split(engines: int) -> int:
    """Prefill engines of so many: 2 of 6, else a quarter."""
    return 2 if engines == 6 else engines // 4


def costs_of(engines: int, seed: int) -> list[Costs]:
    """Engines of unlike speed, so that no two prices are equal by construction."""
    draw = random.Random(seed)
    return [_slowed(A40_QWEN_3B, draw.uniform(0.8, 1.5)) for _ in range(engines)]


def _slowed(costs: Costs, factor: float) -> Costs:
    return Costs(
        prefill_base_s=costs.prefill_base_s * factor,
        prefill_per_token_s=costs.prefill_per_token_s * factor,
        prefill_per_token_sq_s=1e-9 * factor,
        decode_base_s=costs.decode_base_s * factor,
        decode_per_seq_s=costs.decode_per_seq_s * factor,
        decode_per_context_token_s=1e-8 * factor,
        transfer_base_s=1e-3,
        transfer_bytes_per_s=costs.transfer_bytes_per_s,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        kv_capacity_tokens=costs.kv_capacity_tokens,
    )


def script_of(engines: int, choices: int, seed: int) -> Script:
    """For each choice: the message heard before it, prompt, output, now, and when its
    first token is due."""
    draw = random.Random(seed)
    script: Script = []
    for index in range(choices):
        now_s = index * 0.01
        running = draw.randrange(128)
        message = {
            "rank": draw.randrange(engines),
            "incarnation": 1,
            "sequence": index + 1,
            # All but what was booked for the last requests, two legs each.
            "booking_seen": max(0, 2 * (index - engines)),
            "prefill_tokens": draw.choice((0, draw.randrange(8000))),
            "output_tokens": running * draw.randrange(1, 400),
            "context_tokens": running * draw.randrange(50, 450),
            "running": running,
            "waiting": draw.choice((0, 0, draw.randrange(20))),
            "waiting_remote": draw.randrange(3),
            "kv_total_blocks": _KV_BLOCKS,
            "kv_free_blocks": draw.randrange(_KV_BLOCKS),
            "kv_pinned_blocks": 0,
            "block_tokens": _BLOCK_TOKENS,
            "now_s": now_s,
        }
        prompt, output = draw.randrange(1, 4000), draw.randrange(1, 800)
        # Some of those that wait are late by then, at any size.
        due_s = now_s + draw.uniform(0.0, 0.01 * _LEGS_AN_ENGINE * engines)
        script.append((message, prompt, output, now_s, due_s))
    return script


@dataclass
class Core:
    """The core's table and policies for one size."""

    table: Table
    prefill: Policy
    decode: Policy

    @classmethod
    def of(cls, costs: list[Costs], policy: str = "calibrated") -> Core:
        engines, prefill = len(costs), split(len(costs))
        # Messages of a script are far apart where engines are many.
        table = Table(engines, dead_s=1e9)
        for rank, cost in enumerate(costs):
            table.set_costs(rank, cost)
        make = _core.make_policy
        return cls(
            table,
            make(policy, 0, prefill, serves=Phase.PREFILL),
            make(policy, prefill, engines, serves=Phase.DECODE),
        )


@dataclass
class Run:
    picks: list[Pick]
    seconds: list[float]


def in_core(
    costs: list[Costs],
    script: Script,
    under_way: int,
    *,
    policy: str = "calibrated",
    all_new: bool = False,
) -> Run:
    core = Core.of(costs, policy)
    picks, seconds = _core.replay(
        core.table,
        core.prefill,
        core.decode,
        script,
        under_way=under_way,
        all_new=all_new,
    )
    return Run(picks, seconds)


def through_binding(
    costs: list[Costs], script: Script, under_way: int, *, decide: bool
) -> Run:
    core = Core.of(costs)
    table, prefill, decode = core.table, core.prefill, core.decode

    def hear(message: dict[str, Any]) -> None:
        table.hear(**message)

    def pick(prompt: int, output: int, now_s: float) -> Pick:
        return (
            prefill.pick(table, prompt, output, now_s=now_s),
            decode.pick(table, prompt, output, now_s=now_s),
        )

    def pick_and_explain(prompt: int, output: int, now_s: float) -> Pick:
        return (
            prefill.decide(table, prompt, output, now_s=now_s)[0],
            decode.decide(table, prompt, output, now_s=now_s)[0],
        )

    def book(phase: Phase, rank: int, prompt: int, output: int) -> int:
        return table.book(rank, phase, prompt, output)

    choose = pick_and_explain if decide else pick
    return timed(script, under_way, hear, choose, book, table.release)


def in_python(books: Books, engines: int, script: Script, under_way: int) -> Run:
    prefill = Pool(0, split(engines), Phase.PREFILL)
    decode = Pool(split(engines), engines, Phase.DECODE)

    def pick(prompt: int, output: int, now_s: float) -> Pick:
        request = Request(prompt, output, now_s=now_s)
        return books.pick(prefill, request), books.pick(decode, request)

    def book(phase: Phase, rank: int, prompt: int, output: int) -> int:
        return books.book(Booking(rank, phase, prompt, output))

    return timed(script, under_way, books.hear, pick, book, books.release)


def timed(
    script: Script,
    under_way: int,
    hear: Callable[[dict[str, Any]], None],
    pick: Callable[[int, int, float], Pick],
    book: Callable[[Phase, int, int, int], int],
    release: Callable[[int], Any],
) -> Run:
    """Replay a script as the core does, until the budget is spent."""
    run = Run([], [])
    bookings: deque[tuple[int, int]] = deque()
    ends_s = time.perf_counter() + _BUDGET_S
    for message, prompt, output, now_s, _ in script:
        if message is not None:
            hear(message)
        began_s = time.perf_counter()
        p, d = pick(prompt, output, now_s)
        done_s = time.perf_counter()
        run.picks.append((p, d))
        run.seconds.append(done_s - began_s)
        bookings.append(
            (
                book(Phase.PREFILL, p, prompt, 1),
                book(Phase.DECODE, d, prompt, output),
            )
        )
        if len(bookings) > under_way:
            for number in bookings.popleft():
                release(number)
        if done_s > ends_s:
            break
    return run


def runs_of(engines: int, choices: int, seed: int) -> Iterator[tuple[str, Run]]:
    costs = costs_of(engines, seed)
    script = script_of(engines, choices, seed)
    under_way = _LEGS_AN_ENGINE * engines
    yield "C++", in_core(costs, script, under_way)
    yield "C++, all new", in_core(costs, script, under_way, all_new=True)
    yield DEADLINE, in_core(costs, script, under_way, policy="deadline")
    for name, decide in (("binding", False), ("decide", True)):
        yield name, through_binding(costs, script, under_way, decide=decide)
    yield "NumPy", in_python(NumpyRouter(costs), engines, script, under_way)
    yield "Python", in_python(PlainRouter(costs), engines, script, under_way)


def measure(engines: int, *, choices: int = _CHOICES, seed: int = 1) -> dict[str, Run]:
    """Every version at one size; raises AssertionError when any two differ."""
    runs = dict(runs_of(engines, choices, seed))
    for name, run in runs.items():
        same = run.picks == runs["C++"].picks[: len(run.picks)]
        # Not `assert`, which `python -O` leaves out.
        if not same and name != DEADLINE:
            raise AssertionError(f"{name} and C++ picked unlike engines of {engines}")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last")
    args = parser.parse_args()
    grid = Grid(title="One choice of a pair, microseconds")
    for column in ("engines", "version", "p50", "p99", "factor", "choices"):
        grid.add_column(column, justify="left" if column == "version" else "right")
    result = {}
    for engines in SIZES:
        base = 0.0
        for name, run in measure(engines).items():
            us = quantiles_us(run.seconds)
            base = base or us["p50"]
            grid.add_row(
                f"{split(engines)} + {engines - split(engines)}",
                name,
                f"{us['p50']:.2f}",
                f"{us['p99']:.2f}",
                f"{us['p50'] / base:.1f}",
                f"{len(run.picks):,}",
            )
            if name == "C++":
                result[str(engines)] = {"p50_us": us["p50"], "p99_us": us["p99"]}
        grid.add_section()
    Console().print(grid)
    print("All versions but deadline picked the same engines.")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
