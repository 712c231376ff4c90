"""A worker without a model or kernels, for releases whose kernels do not load here.

What it calls a KV cache is real to everything but the model: allocated by vLLM, filled
block by block, moved by NIXL. It writes each token's id where the model would write
that token's keys, and the next token depends on all ids it reads back: a cache that did
not arrive, or arrived in the wrong blocks, changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes

_LAYER = "model.layers.0.self_attn.attn"
_FIRST_ID = 3
_IDS = 400


def next_token(ids: list[int]) -> int:
    """The token after `ids`: any change or swap among them changes it."""
    mixed = 0
    for position, token in enumerate(ids):
        mixed = (mixed * 31 + token * (position + 1)) % 1_000_003
    return _FIRST_ID + mixed % _IDS


@dataclass
class Sequence:
    """What the worker knows of a request: its token ids and its blocks."""

    ids: list[int]
    blocks: list[int] = field(default_factory=list)


class KernelFreeWorker(Worker):  # type: ignore[misc]
    """Does all of a worker's work except the forward pass."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            "gloo",
        )

    def load_model(self, **_: Any) -> None:
        self._sequences: dict[str, Sequence] = {}

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        config = self.model_config.hf_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            dtype=torch.float32,
        )
        return {_LAYER: spec}

    def determine_available_memory(self) -> int:
        memory_bytes: int = self.cache_config.kv_cache_memory_bytes
        return memory_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        layout = self.cache_config.get_resolved_kv_cache_layout()
        sizes = [self.cache_config.block_size]
        caches = allocate_kv_cache(kv_cache_config, self.device, layout, sizes)
        self._cache = caches[_LAYER]
        if has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(caches)

    def compile_or_warm_up_model(self) -> Any:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        self._take_in(scheduler_output)
        if not has_kv_transfer_group():
            return self._step(scheduler_output)
        mixin = KVConnectorModelRunnerMixin
        with (
            set_forward_context(None, self.vllm_config),
            mixin._get_kv_connector_output(scheduler_output) as transferred,
        ):
            output = self._step(scheduler_output)
        if output is EMPTY_MODEL_RUNNER_OUTPUT:
            return ModelRunnerOutput.with_kv_conn_output_only(transferred)
        output.kv_connector_output = transferred
        return output

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _take_in(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self._sequences.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            blocks = list(new.block_ids[0])
            self._sequences[new.req_id] = Sequence(list(new.prompt_token_ids), blocks)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self._sequences[name]
            if name in cached.resumed_req_ids:
                sequence.blocks.clear()
            if blocks is not None:
                sequence.blocks += blocks[0]

    def _step(self, scheduled: Any) -> ModelRunnerOutput:
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        cached = scheduled.scheduled_cached_reqs
        computed = {
            n.req_id: n.num_computed_tokens for n in scheduled.scheduled_new_reqs
        }
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduled.num_scheduled_tokens)
        sampled = [
            self._advance(name, computed[name], scheduled.num_scheduled_tokens[name])
            for name in names
        ]
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled_token_ids=sampled)

    def _advance(self, name: str, computed: int, count: int) -> list[int]:
        """Write `count` tokens' ids; the sampled token once all are written."""
        sequence = self._sequences[name]
        end = computed + count
        for position in range(computed, end):
            self._slot(sequence, position)[0] = sequence.ids[position]
        if end < len(sequence.ids):
            return []
        ids = [int(self._slot(sequence, position)[0]) for position in range(end)]
        sequence.ids.append(next_token(ids))
        return sequence.ids[-1:]

    def _slot(self, sequence: Sequence, position: int) -> torch.Tensor:
        size = self.cache_config.block_size
        slot: torch.Tensor = self._cache[
            sequence.blocks[position // size], 0, position % size
        ]
        return slot
