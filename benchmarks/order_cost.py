"""What an order costs an engine in each step, on vLLM's real scheduler.

    python -m benchmarks.order_cost

Many requests wait, some are admitted in each step, and as many arrive. Measured is what
is the order's own, by itself: reading the arrivals, choosing, and taking stock of the
step. Medians over steps, so that a machine that is busy with other things does little
harm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click

from benchmarks.bare_scheduler import (
    bare_config,
    bare_request,
    bare_scheduler,
    made_up_output,
)
from vllm_calrouter.calibration import load
from vllm_calrouter.engine.ordered import order_queue, ordered
from vllm_calrouter.messages import BOOKING
from vllm_calrouter.options import FCFS, ORDERS

_COSTS = load("a40-qwen2.5-3b").costs
_TOKENS = (50, 500)


class Watch:
    """Sums up the time spent in methods of an object."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def over(self, owner: Any, *names: str) -> None:
        """From now on time these."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            answer = method(*args)
            self.spent_s += time.perf_counter() - began
            return answer

        return timed

    def take(self) -> float:
        """Seconds since the last call."""
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s


class Engine:
    """A scheduler with a clock of its own and a queue that stays as long as it is."""

    def __init__(self, order: str, waiting: int) -> None:
        self.now_s = 0.0
        self._rng = random.Random(1)
        self._number = 0
        self._scheduler = bare_scheduler(
            bare_config(max_num_seqs=64, max_num_batched_tokens=2048),
            blocks=4000,
            extend=ordered,
        )
        order_queue(self._scheduler, order, 5.0, _COSTS, lambda: self.now_s)
        self._watch = Watch()
        ordering = self._scheduler.ordering
        self._watch.over(ordering, "begin_step", "end_step", "step_done")
        methods = ("add_request", "pop_request", "peek_request")
        self._watch.over(self._scheduler.waiting, *methods)
        for _ in range(waiting):
            self._scheduler.add_request(self._request())

    def step(self) -> tuple[float, int]:
        """One step and as many arrivals as it admitted.

        Returns seconds of the order's, and how many were admitted.
        """
        self._watch.take()
        step = self._scheduler.schedule()
        self._scheduler.update_from_output(step, made_up_output(self._scheduler, step))
        self.now_s += 0.05
        for _ in step.scheduled_new_reqs:
            self._scheduler.add_request(self._request())
        return self._watch.take(), len(step.scheduled_new_reqs)

    def _request(self) -> Any:
        self._number += 1
        tokens = self._rng.randint(*_TOKENS)
        booking = {
            "router": "a",
            "booking": self._number,
            "sent_s": self.now_s,
            "deadline_s": self._rng.choice((0.175, 0.525, 60.0)),
        }
        return bare_request(
            f"r{self._number}",
            [self._rng.randrange(500) for _ in range(tokens)],
            output_tokens=1,
            extra_args={BOOKING: booking},
        )


@click.command(help=__doc__)
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True)
def main(steps: int) -> None:
    click.echo("| waiting | order | admitted a step | µs a step |")
    click.echo("|---|---|---|---|")
    for waiting in (10, 100, 1000):
        for order in ORDERS:
            if order == FCFS:
                continue
            engine = Engine(order, waiting)
            for _ in range(30):
                engine.step()
            seconds, admitted = zip(*(engine.step() for _ in range(steps)), strict=True)
            mean = sum(admitted) / steps
            cost = 1e6 * median(seconds)
            click.echo(f"| {waiting} | {order} | {mean:.1f} | {cost:.0f} |")


if __name__ == "__main__":
    main()
