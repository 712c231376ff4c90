from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.v1.engine.core import EngineCore

from benchmarks.bare_scheduler import bare_config, bare_scheduler
from vllm_calrouter.engine import scheduler
from vllm_calrouter.engine.connector import kv_role
from vllm_calrouter.engine.observer import observed
from vllm_calrouter.messages import decode
from vllm_calrouter.options import CONFIG_KEY, RouterOptions, to_config


class Plain:
    """Stands for vLLM's scheduler: takes its arguments and has its limits."""

    def __init__(self, vllm_config: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self.max_num_active_reqs = 64
        self.max_num_running_reqs = 64
        self.max_num_scheduled_tokens = 2048


def config(rank: int, **options: Any) -> Any:
    options.setdefault("telemetry", "off")
    options.setdefault("order", "fcfs")
    chosen = f"{Plain.__module__}.{Plain.__qualname__}"
    extra = {
        CONFIG_KEY: to_config(RouterOptions(**options)),
        CONFIG_KEY + "_scheduler": chosen,
    }
    parallel = SimpleNamespace(data_parallel_index=rank)
    return SimpleNamespace(additional_config=extra, parallel_config=parallel)


LIMITS = {
    "prefill": 1,
    "prefill_max_num_batched_tokens": 512,
    "decode_max_num_seqs": 16,
}


@pytest.mark.parametrize(("rank", "limits"), [(0, (64, 512)), (1, (16, 2048))])
def test_each_role_gets_its_limits_and_keeps_the_rest(
    rank: int, limits: tuple[int, int]
) -> None:
    made = scheduler.build_scheduler(config(rank, **LIMITS), block_size=16)
    assert isinstance(made, Plain)
    assert made.kwargs == {"block_size": 16}
    assert (made.max_num_active_reqs, made.max_num_scheduled_tokens) == limits


def test_a_unified_pool_keeps_vllm_s_limits() -> None:
    made = scheduler.build_scheduler(config(0))
    assert (made.max_num_active_reqs, made.max_num_scheduled_tokens) == (64, 2048)


@pytest.mark.parametrize(
    ("rank", "prefill", "role"),
    [(0, 1, "prefill"), (1, 1, "decode"), (1, 0, "both")],
)
def test_an_engine_tells_from_its_start_who_it_is(
    rank: int, prefill: int, role: str, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    options = RouterOptions(prefill=prefill, telemetry=f"ipc://{folder}")
    made = bare_scheduler(bare_config(), blocks=10, extend=observed)
    scheduler.observe(made, options, rank)
    with zmq.Context() as context, context.socket(zmq.SUB) as ear:
        ear.setsockopt(zmq.SUBSCRIBE, b"")
        ear.connect(f"ipc://{folder}/engine-{rank}")
        heard = decode(ear.recv())
    assert (heard.rank, heard.role, heard.kv_total_blocks) == (rank, role, 9)
    made.observer.close()


def test_an_engine_that_is_not_to_tell_is_vllm_s_own_class() -> None:
    assert type(scheduler.build_scheduler(config(0))) is Plain


def test_a_limit_vllm_no_longer_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="max_num_active_reqs"):
        scheduler.apply_limits(SimpleNamespace(), {"max_num_seqs": 3})


def test_the_state_can_be_asked_for_by_name() -> None:
    scheduler.build_scheduler(config(0))
    assert getattr(EngineCore, scheduler.STATE_UTILITY) is scheduler.engine_state


def test_roles_follow_ranks() -> None:
    roles = [kv_role(rank, prefill=2) for rank in range(4)]
    assert roles == ["kv_producer", "kv_producer", "kv_consumer", "kv_consumer"]
