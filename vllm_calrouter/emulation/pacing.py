"""How long each step of a paced engine takes, and the waiting for it.

An engine's worker (`workers.py`, `cpu_worker.py`) hands every step to a `Pacer`, which
holds its result back until a profile says it is due.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger

from vllm_calrouter.calibration import EngineCosts, load
from vllm_calrouter.calibration.work import Work, work_of_rows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.calrouter")

#: Under this key of vLLM's `additional_config` workers find their `Pace`.
KEY = "calrouter_pace"

_WORKERS = {
    False: "vllm_calrouter.emulation.workers.PacedWorker",
    True: "vllm_calrouter.emulation.cpu_worker.PacedCpuWorker",
}

#: A step that takes longer than it should by more than this share is late, and when
#: more than that share of as many steps are, the machine does not keep up.
_LATE = 0.02
_LATE_SHARE = 0.05
_LATE_OF = 200


#: An engine that only waits for a KV cache, or for its reader, steps once in so many
#: seconds (vLLM's `EngineCoreProc._process_engine_step`). Slowed down with the rest, it
#: leaves the machine to those that compute.
_POLL_S = 0.001


class PaceError(ValueError):
    """A pace that cannot be; one line that says what is wrong."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What hardware a server's engines stand for.

    Fields:
        profile: a shipped profile's name, or a file.
        slow_down: every step takes so many times as long as on that hardware, so that
            a machine with few cores keeps up. Whoever reads times divides by it.
        speed: by rank, an engine's speed where it is not the profile's; 0.5: steps take
            twice as long.
        prefill: the first ranks, which only prefill and have that role's constants.
    """

    profile: str
    slow_down: float = 1.0
    speed: dict[int, float] = {}
    prefill: int = 0

    def __post_init__(self) -> None:
        if not 1e-3 <= self.slow_down <= 1e3:
            raise ValueError(
                f"`slow_down` must be from 0.001 to 1000: {self.slow_down}"
            )

    def costs(self, rank: int) -> EngineCosts:
        """What work costs an engine on this machine, slowed down.

        Raises ProfileError, or ValueError for an absurd speed.
        """
        costs = load(self.profile).costs_of(prefill=rank < self.prefill)
        return costs.faster(self.speed.get(rank, 1.0) / self.slow_down)


def arguments(pace: Pace, *, forward_pass: bool = False) -> list[str]:
    """Arguments of `vllm serve` for paced engines.

    Args:
        forward_pass: run the model (on a CPU) and wait out the rest of each step;
            without it tokens are made up, and cost next to nothing.
    """
    config = json.dumps({KEY: msgspec.to_builtins(pace, str_keys=True)})
    return ["--worker-cls", _WORKERS[forward_pass], "--additional-config", config]


def read_pace(additional_config: Any) -> Pace:
    """The pace that a server was started with; raises PaceError."""
    if not isinstance(additional_config, dict) or KEY not in additional_config:
        raise PaceError(
            f'a paced worker needs --additional-config \'{{"{KEY}": '
            '{"profile": "a40-qwen2.5-3b", "slow_down": 8}}\''
        )
    try:
        return msgspec.convert(additional_config[KEY], Pace, strict=False)
    except msgspec.ValidationError as error:
        raise PaceError(f"--additional-config {KEY}: {error}") from None


def work_of(step: SchedulerOutput) -> Work:
    """What vLLM's scheduler has put into a step."""
    running = step.scheduled_cached_reqs
    starts = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return work_of_rows(
        (tokens, starts[request] + tokens)
        for request, tokens in step.num_scheduled_tokens.items()
    )


class Pacer:
    """Holds each step's result back until it is due.

    A GPU starts the next step of a running batch at once, because vLLM prepares it
    during the one before. So does this: such a step begins when the last one ended, and
    what the scheduler took in between is not added. Of an engine that was idle, a step
    begins when it is handed over.

    Args:
        costs: how long a step takes, on the clock's time.
        poll_s: seconds that a step without work takes.
        clock, sleep: of the machine.
    """

    def __init__(
        self,
        costs: EngineCosts,
        *,
        poll_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._costs = costs
        self._poll_s = poll_s
        self._clock = clock
        self._sleep = sleep
        self._due_s: float | None = None
        self._ended_s = 0.0
        self._batch: Collection[str] = ()
        self._step_s = 0.0
        self._steps = 0
        self._late = 0

    def begin(self, step: SchedulerOutput) -> None:
        """The worker is about to compute a step."""
        if not step.total_num_scheduled_tokens:
            self._due_s = None
            if self._poll_s:
                self._sleep(self._poll_s)
            return
        self._step_s = self._costs.step_s(*work_of(step))
        began_s = self._clock()
        goes_on = any(request in self._batch for request in step.num_scheduled_tokens)
        # After a longer break the engine stood still.
        if goes_on and began_s - self._ended_s < self._step_s:
            began_s = self._ended_s
        self._batch = step.num_scheduled_tokens.keys()
        self._due_s = began_s + self._step_s

    def end(self) -> None:
        """The step's result is there; returns when it is due."""
        if self._due_s is None:
            return
        ahead_s = self._due_s - self._clock()
        if ahead_s > 0:
            self._sleep(ahead_s)
            self._ended_s = self._due_s
        else:
            self._ended_s = self._clock()
        self._note(late=-ahead_s > _LATE * self._step_s)
        self._due_s = None

    def _note(self, *, late: bool) -> None:
        self._late += late
        self._steps += 1
        if self._steps < _LATE_OF:
            return
        if self._late > _LATE_SHARE * _LATE_OF:
            logger.warning(
                "%d of %d steps took longer than the profile says: this machine does "
                "not keep up, raise slow_down",
                self._late,
                self._steps,
            )
        self._steps = self._late = 0


class Paced:
    """Goes before a worker class of vLLM's and holds its results back."""

    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pace = read_pace(self.vllm_config.additional_config)
        rank = self.vllm_config.parallel_config.data_parallel_index
        poll_s = _POLL_S * max(0.0, pace.slow_down - 1)
        self._pacer = Pacer(pace.costs(rank), poll_s=poll_s)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._pacer.begin(scheduler_output)
        output = super().execute_model(  # type: ignore[misc]
            scheduler_output, *args, **kwargs
        )
        if output is not None:
            self._pacer.end()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._pacer.end()
        return output
