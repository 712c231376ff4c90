"""A worker for `vllm serve --worker-cls` that runs `made_up_model` in place of a model.

vLLM's own worker drives it: scheduling, KV cache allocation, the KV connector and its
transfers are the real ones, and only the forward pass is not. So it runs on a release
of vLLM that has no kernels for this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_calrouter.emulation.made_up_model import kept, next_token


class KernelFreeWorker(Worker):  # type: ignore[misc]
    """vLLM's worker, less all that touches a device or a model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # It refuses the second model runner without Triton, which nothing here needs.
        gpu_worker.HAS_TRITON = True
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            "gloo",
        )
        self.model_runner = self.make_runner()

    def make_runner(self) -> KernelFreeRunner:
        return KernelFreeRunner(self.vllm_config)

    def load_model(self, **_: Any) -> None:
        """Nothing to load."""

    def determine_available_memory(self) -> int:
        size: int | None = self.cache_config.kv_cache_memory_bytes
        assert size is not None, "add --kv-cache-memory-bytes: there is no profiling"
        return size

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)


@dataclass
class Text:
    """A request as a model runner knows it."""

    tokens: list[int]
    blocks: list[int]
    computed: int


class KernelFreeRunner:
    """What `Worker` asks of its model runner."""

    is_pooling_model = False

    #: How much of a text's end the next token depends on; None: on all of it.
    reads_tokens: int | None = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.caches: list[torch.Tensor] = []
        self.block_size = 0
        self.texts: dict[str, Text] = {}
        self.output: ModelRunnerOutput | None = None

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        model = self.vllm_config.model_config
        spec = FullAttentionSpec(
            block_size=self.vllm_config.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(self.vllm_config.parallel_config),
            head_size=model.get_head_size(),
            dtype=torch.float32,
        )
        layers = model.get_num_layers(self.vllm_config.parallel_config)
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(layers)}

    def initialize_kv_cache(self, kv_cache_config: Any, **_: Any) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        self.block_size = group.kv_cache_spec.block_size
        caches = allocate_kv_cache(
            kv_cache_config,
            torch.device("cpu"),
            self.vllm_config.cache_config.get_resolved_kv_cache_layout(),
            [self.block_size],
        )
        self.caches = [caches[name] for name in sorted(caches)]
        if has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(caches)

    def execute_model(self, scheduled: Any, *_: Any) -> ModelRunnerOutput | None:
        """One step; with tokens to compute, `sample_tokens` hands out the result."""
        self._follow(scheduled)
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                scheduled
            ) as transfers,
        ):
            sampled = {
                request: self._compute(self.texts[request], count)
                for request, count in scheduled.num_scheduled_tokens.items()
            }
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request: i for i, request in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            # Complete only here: the connector reports when the context ends.
            kv_connector_output=transfers,
        )
        if not sampled:
            return output
        self.output = output
        return None

    def sample_tokens(self, _: Any) -> ModelRunnerOutput | None:
        output, self.output = self.output, None
        return output

    def take_draft_token_ids(self) -> None:
        return None

    def reset_mm_cache(self) -> None:
        """Nothing cached."""

    def reset_encoder_cache(self) -> None:
        """Nothing cached."""

    def shutdown(self) -> None:
        self.caches = []

    def _follow(self, scheduled: Any) -> None:
        """Take over what the scheduler says of new, running and finished requests."""
        assert not scheduled.kv_cache_block_copies, "no copies of blocks here"
        for request in scheduled.finished_req_ids:
            self.texts.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            # The longer list, where there is one, includes what was generated before
            # a preemption. It is the scheduler's own: a copy is ours to add to.
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            (blocks,) = new.block_ids
            self.texts[new.req_id] = Text(tokens, list(blocks), new.num_computed_tokens)
        running = scheduled.scheduled_cached_reqs
        for request, new_blocks, computed in zip(
            running.req_ids,
            running.new_block_ids,
            running.num_computed_tokens,
            strict=True,
        ):
            text = self.texts[request]
            if request in running.resumed_req_ids:
                text.blocks = []
            if new_blocks is not None:
                text.blocks += new_blocks[0]
            text.computed = computed

    def _compute(self, text: Text, count: int) -> list[int]:
        """Keep the next `count` tokens; the token after them if they are the last."""
        end = text.computed + count
        self._keep(text, text.computed, end)
        if end < len(text.tokens):
            return []
        token = next_token(self._read(text, end))
        text.tokens.append(token)
        return [token]

    def _keep(self, text: Text, start: int, end: int) -> None:
        blocks, offsets = self._places(text.blocks, start, end)
        rows = kept(text.tokens[start:end], len(self.caches))
        for cache, row in zip(self.caches, rows, strict=True):
            # [block, head, offset in block, content], the same in all content.
            cache[blocks, :, offsets] = row[:, None, None]

    def _read(self, text: Text, end: int) -> torch.Tensor:
        start = max(0, end - self.reads_tokens) if self.reads_tokens else 0
        blocks, offsets = self._places(text.blocks, start, end)
        # The mean of equal small integers is exact; of spoilt content it is another.
        return torch.stack(
            [cache[blocks, :, offsets].mean(dim=(1, 2)) for cache in self.caches]
        )

    def _places(
        self, blocks: Sequence[int], start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, end)
        return (
            torch.tensor(blocks)[positions // self.block_size],
            positions % self.block_size,
        )
