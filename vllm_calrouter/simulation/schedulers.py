"""vLLM's scheduler for an engine that has no model: configuration and construction."""

from __future__ import annotations

import json
import tempfile
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_calrouter.engine.observer import Observer, observed
from vllm_calrouter.engine.scheduler import build_scheduler
from vllm_calrouter.options import (
    CONFIG_KEY,
    RouterOptions,
    to_config,
)
from vllm_calrouter.simulation import connector
from vllm_calrouter.transport import OFF

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

    from vllm_calrouter.calibration import EngineCosts
    from vllm_calrouter.messages import EngineMessage

#: A model vLLM can read the configuration of. Nothing of it is ever computed, and its
#: KV cache is as large as the profile says: only its length matters.
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


ObservedScheduler = observed(Scheduler)


class _Nobody:
    """Whom no message goes to: the cluster asks, and moves it in virtual time."""

    def tell(self, message: EngineMessage, step_began_s: float | None) -> None: ...

    def close(self) -> None: ...


_NOBODY = _Nobody()


class _Asked(Observer):
    """An observer that only speaks when asked."""

    def _tell(self) -> None: ...


class Schedulers:
    """Makes the schedulers of a cluster's engines.

    Args:
        options: the router's; role limits and scheduler hooks apply as in an engine.
        max_model_len: longest prompt with its output, in tokens.
        max_num_seqs, max_num_batched_tokens: vLLM's limits of every engine.
        block_tokens: tokens of a KV block.
        prefix_caching: whether blocks are found again by their content.
    """

    def __init__(
        self,
        options: RouterOptions,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self._options = options
        self._block_tokens = block_tokens
        with tempfile.TemporaryDirectory() as directory:
            model = {**_MODEL, "max_position_embeddings": max_model_len}
            (Path(directory) / "config.json").write_text(json.dumps(model))
            self._config = EngineArgs(
                model=directory,
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                async_scheduling=False,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                block_size=block_tokens,
                enable_prefix_caching=prefix_caching,
            ).create_engine_config()
        self._structured_output = StructuredOutputManager(self._config)
        self.block_hasher: Callable[[Any], list[Any]] | None = None
        if prefix_caching:
            hash_block = get_hash_fn_by_name("sha256")
            init_none_hash(hash_block)
            self.block_hasher = get_request_block_hasher(block_tokens, hash_block)

    def make(
        self,
        rank: int,
        costs: EngineCosts,
        clock: Callable[[], float],
        *,
        kv_tokens: int,
    ) -> Any:
        """The scheduler of one engine, on the cluster's clock.

        Args:
            rank: of the engine.
            costs: by which it orders what waits.
            clock: seconds.
            kv_tokens: what its KV cache holds.
        """
        # One is the null block.
        blocks = kv_tokens // self._block_tokens + 1
        scheduler = build_scheduler(
            self._config_of(rank, blocks),
            costs=costs,
            clock=clock,
            kv_cache_config=self._kv_cache(blocks),
            structured_output_manager=self._structured_output,
            block_size=self._block_tokens,
            include_finished_set=True,
        )
        if self._options.listens:
            scheduler.observer = _Asked(
                scheduler, rank=rank, role=self._options.role_of(rank), to=_NOBODY
            )
        return scheduler

    def _config_of(self, rank: int, blocks: int) -> VllmConfig:
        config = copy(self._config)
        config.cache_config = copy(config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.data_parallel_index = rank
        quiet = msgspec.structs.replace(self._options, telemetry=OFF)
        config.additional_config = {
            CONFIG_KEY: to_config(quiet),
            CONFIG_KEY + "_scheduler": f"{__name__}.ObservedScheduler",
        }
        if self._options.prefill:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector=connector.VirtualConnector.__name__,
                kv_connector_module_path=connector.__name__,
                kv_role="kv_both",
                engine_id=str(rank),
            )
        return config

    def _kv_cache(self, blocks: int) -> KVCacheConfig:
        spec = FullAttentionSpec(
            block_size=self._block_tokens,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.float32,
        )
        return KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
