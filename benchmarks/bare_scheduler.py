"""vLLM's own scheduler without an engine: stepped by hand, with made-up outputs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16

#: What the scheduler reads of a model: its lengths and sizes, no weights.
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
}

_TOKEN = 7


def bare_config(**arguments: Any) -> VllmConfig:
    """A configuration of a model that exists on paper only."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        settings: dict[str, Any] = {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "async_scheduling": False,
            "disable_log_stats": True,
            **arguments,
        }
        return EngineArgs(**settings).create_engine_config()


def bare_scheduler(
    config: VllmConfig,
    *,
    blocks: int,
    asynchronous: bool = False,
    extend: Callable[[type], type] = lambda plain: plain,
) -> Any:
    """A scheduler over `blocks` KV blocks, of vLLM's class or what `extend` makes."""
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    init_none_hash(sha256)
    # Where this machine's platform knows no asynchronous scheduling, its class runs.
    config.scheduler_config.async_scheduling = asynchronous
    scheduler_class = extend(AsyncScheduler if asynchronous else Scheduler)
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        include_finished_set=True,
        log_stats=False,
    )


def bare_request(
    name: str,
    prompt: Sequence[int],
    *,
    output_tokens: int,
    extra_args: dict[str, Any] | None = None,
) -> Request:
    """A request as the engine hands it to its scheduler."""
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, extra_args=extra_args
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


def made_up_output(scheduler: Any, step: SchedulerOutput) -> ModelRunnerOutput:
    """What a model runner would answer: a token for whoever has its prompt computed.

    Call it when the step was just scheduled, as `is_prefill_chunk` says how far a
    request is then.
    """
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[
            [] if scheduler.requests[name].is_prefill_chunk else [_TOKEN]
            for name in names
        ],
    )
