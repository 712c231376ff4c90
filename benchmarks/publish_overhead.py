"""What telling routers costs an engine, as a share of a decode step.

    python -m benchmarks.publish_overhead [--json]

vLLM's real scheduler is stepped without a model: plain, and with the observer and a
real publisher that six subscribers are connected to. Both sides get the same requests
in the same order (a batch of 64 that is kept full, 200 more waiting) and so run the
same steps; they take turns, a block of steps each, and step k of one is compared with
step k of the other. A step is paced to 13 ms as on a GPU: the engine's thread lets go
of the GIL in the middle of it, where the publisher's thread mostly has its turn.

  observing   CPU time of the engine's thread in `schedule` and `update_from_output`,
              with the observer (which sends) less without
  publishing  CPU time of the publisher's own thread. It holds the GIL for at most this
              long, and the engine's thread waits for it at most this long, if it wants
              to run at that very moment: all of it is counted as lost
  share       both, over the duration of a step

Each figure is the median over rounds of the round's mean: not every step tells, and
what other processes add to some rounds is left out.

What would mislead:
- A busy machine. Whoever shares its caches and cores makes every microsecond longer,
  the scheduler's own too, which is printed to tell.
- Tight loops. Paced steps find cold caches, as an engine's do; a loop without pauses
  would show half the cost.
- ZeroMQ's own thread, which writes to the sockets. It never holds the GIL, so it is
  not in the share.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from tqdm import tqdm

from benchmarks.bare_scheduler import (
    BLOCK_TOKENS,
    bare_config,
    bare_request,
    bare_scheduler,
    made_up_output,
)
from vllm_calrouter import transport
from vllm_calrouter.engine.observer import Observer, observed
from vllm_calrouter.engine.publisher import Publisher

_PROMPT_TOKENS = 500
_OUTPUT_TOKENS = (50, 150)
_WAITING = 200
_ROUTERS = 6
BLOCK_STEPS = 25
#: The first steps prefill the whole batch at once, which no running engine does.
_WARM_UP_STEPS = 60


@dataclass
class Side:
    """One scheduler that is kept busy, and what its steps took."""

    scheduler: Any
    publisher: Publisher | None
    batch: int
    stepping_s: list[float] = field(default_factory=list)
    publishing_s: list[float] = field(default_factory=list)
    messages: int = 0
    _draw: random.Random = field(default_factory=lambda: random.Random(0))
    _added: int = 0

    def refill(self) -> None:
        """Keep the batch full, and as many requests as ever waiting."""
        while len(self.scheduler.requests) < self.batch + _WAITING:
            self._added += 1
            booking = {"router": "r" * 32, "booking": self._added, "output_tokens": 100}
            request = bare_request(
                f"cmpl-{self._added:032x}",
                [self._draw.randrange(3, 400) for _ in range(_PROMPT_TOKENS)],
                output_tokens=self._draw.randrange(*_OUTPUT_TOKENS),
                extra_args={"calrouter": booking},
            )
            self.scheduler.add_request(request)

    def step(self, step_s: float) -> float:
        """One step of an engine whose model takes the rest of `step_s`.

        Returns the CPU seconds that it took of the engine's thread.
        """
        self.refill()
        began_s = time.perf_counter()
        cpu_s = time.thread_time()
        output = self.scheduler.schedule()
        scheduled_s = time.thread_time() - cpu_s
        answer = made_up_output(self.scheduler, output)
        time.sleep(max(0.0, began_s + step_s - time.perf_counter()))
        cpu_s = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        return scheduled_s + time.thread_time() - cpu_s

    def block(self, steps: int, step_s: float) -> None:
        """Some steps, noted."""
        sent = self.publisher.sent if self.publisher else 0
        for _ in range(steps):
            cpu_s = self.publisher.cpu_s if self.publisher else 0.0
            self.stepping_s.append(self.step(step_s))
            if self.publisher:
                self.publishing_s.append(self.publisher.cpu_s - cpu_s)
        if self.publisher:
            self.messages += self.publisher.sent - sent


@contextmanager
def sides(batch: int) -> Iterator[tuple[Side, Side]]:
    """A plain scheduler and one that tells, with routers that listen."""
    config = bare_config(
        max_num_seqs=batch, max_num_batched_tokens=2048, max_model_len=4096
    )
    most_tokens = _PROMPT_TOKENS + _OUTPUT_TOKENS[1]
    blocks = 2 + batch * (most_tokens // BLOCK_TOKENS + 2)

    def scheduler(extend: Callable[[type], type] = lambda plain: plain) -> Any:
        return bare_scheduler(config, blocks=blocks, extend=extend)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"ipc://{folder}"
        publisher = Publisher(address, 0)
        stack.callback(publisher.close)
        context = stack.enter_context(zmq.Context())
        for _ in range(_ROUTERS):
            ear = stack.enter_context(context.socket(zmq.SUB))
            ear.setsockopt(zmq.CONFLATE, 1)
            ear.setsockopt(zmq.SUBSCRIBE, b"")
            ear.connect(transport.endpoint(address, 0))
        telling = scheduler(observed)
        telling.observer = Observer(telling, rank=0, role="both", to=publisher)
        yield Side(scheduler(), None, batch), Side(telling, publisher, batch)


def measure(batch: int, step_s: float, rounds: int) -> tuple[Side, Side]:
    """Let both sides take turns; each begins every other round."""
    with sides(batch) as (plain, telling):
        for side in (plain, telling):
            for _ in range(_WARM_UP_STEPS):
                side.step(0.0)
        gc.collect()
        # As an engine does when it has started.
        gc.freeze()
        for turn in tqdm(range(rounds), desc="rounds", leave=False):
            for side in (plain, telling) if turn % 2 else (telling, plain):
                side.block(BLOCK_STEPS, step_s)
        gc.unfreeze()
    return plain, telling


def summary(plain: Side, telling: Side, step_s: float) -> dict[str, Any]:
    """The share of a step, and what it is made of (microseconds a step)."""
    pairs = zip(telling.stepping_s, plain.stepping_s, strict=True)
    scheduler_us = typical_us(plain.stepping_s)
    observing_us = typical_us([with_s - without_s for with_s, without_s in pairs])
    publishing_us = typical_us(telling.publishing_s)
    steps = len(plain.stepping_s)
    return {
        "share_of_step": round((observing_us + publishing_us) / (step_s * 1e6), 5),
        "observing_us": round(observing_us, 1),
        "publishing_us": round(publishing_us, 1),
        "scheduler_us": round(scheduler_us, 1),
        "share_of_scheduler": round((observing_us + publishing_us) / scheduler_us, 4),
        "messages_per_step": round(telling.messages / steps, 3),
        "batch": telling.batch,
        "step_ms": step_s * 1e3,
        "steps": steps,
    }


def typical_us(times_s: Sequence[float]) -> float:
    """Median over rounds of the round's mean, in microseconds."""
    rounds = range(0, len(times_s), BLOCK_STEPS)
    means_s = [statistics.fmean(times_s[r : r + BLOCK_STEPS]) for r in rounds]
    return statistics.median(means_s) * 1e6


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    return (
        f"batch {result['batch']}, steps of {result['step_ms']:g} ms, "
        f"{result['steps']} pairs of steps, "
        f"{result['messages_per_step']:.2f} messages a step; microseconds a step\n"
        f"  scheduler alone    {result['scheduler_us']:8.1f}\n"
        f"  observing          {result['observing_us']:8.1f}\n"
        f"  publishing         {result['publishing_us']:8.1f}\n"
        f"  share of a step    {result['share_of_step']:8.2%}   "
        f"({result['share_of_scheduler']:.1%} of the scheduler's own time)"
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=13.0)
    parser.add_argument("--rounds", type=int, default=40, help="at least 2")
    parser.add_argument("--json", action="store_true", help="last line: JSON")
    parsed = parser.parse_args(words)
    if parsed.rounds < 2 or parsed.batch < 1 or not parsed.step_ms > 0:
        parser.error("--rounds must be at least 2, --batch 1, --step-ms above 0")
    return parsed


def main() -> None:
    parsed = arguments()
    step_s = parsed.step_ms / 1e3
    plain, telling = measure(parsed.batch, step_s, parsed.rounds)
    result = summary(plain, telling, step_s)
    print(table(result))
    if parsed.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
