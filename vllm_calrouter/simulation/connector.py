"""KV transfer in virtual time, on vLLM's own connector interface.

The same hand-over as NIXL's pull: a prefill leg that finished keeps its blocks pinned
and says where they are; a decode leg allocates, waits for the KV cache from afar, and
tells the owner when it was read. What has to be moved is left in `take_reads`; whoever
runs the clock says when it arrived.

Not modelled: NIXL's lease. A decode leg reaches its engine at once and renews the lease
from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

#: Ends that leave a KV cache worth reading.
_READABLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(frozen=True, slots=True)
class Read:
    """A KV cache that an engine wants moved; 0 tokens only free it where it lies."""

    request_id: str
    tokens: int
    owner_rank: int
    owner_request_id: str


class VirtualConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Scheduler side of a KV transfer whose duration somebody else decides."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank: int = vllm_config.parallel_config.data_parallel_index
        self._reads: list[Read] = []

    def take_reads(self) -> list[Read]:
        """What is to be moved since the last call, in order."""
        reads, self._reads = self._reads, []
        return reads

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        # The decode leg's prompt may hold tokens the prefill engine never computed.
        held = min(params["remote_num_tokens"], request.num_prompt_tokens)
        missing = held - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._read_once(request, num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params:
            return False, None
        # A leg that ended before it was ever scheduled frees what it would have read.
        self._read_once(request, 0)
        keeps = params.get("do_remote_decode") and request.status in _READABLE
        if not keeps or not any(block_ids):
            return False, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_rank": self._rank,
            "remote_request_id": request.request_id,
            "remote_block_ids": block_ids,
            "remote_num_tokens": request.num_computed_tokens,
        }

    def _read_once(self, request: Request, tokens: int) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        # After a preemption the prompt is computed again: its owner let it go.
        params["do_remote_prefill"] = False
        self._reads.append(
            Read(
                request.request_id,
                tokens,
                params["remote_rank"],
                params["remote_request_id"],
            )
        )

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    # The worker's side has nothing to do: there is no worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
