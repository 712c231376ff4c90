"""A KV connector without a network: the test says when a transfer has ended."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import Request

READ = {"do_remote_prefill": True}
KEEP = {"do_remote_decode": True}
FETCH = {"fetch": True}


class FarKV(KVConnectorBase_V1):
    """Scheduler side of prefill and decode apart, as NIXL's: a request with `READ` gets
    its prompt's KV from afar, one with `KEEP` leaves its blocks to a reader. One with
    `FETCH` gets it from afar when it was preempted, as from a store.
    """

    def __init__(self) -> None:
        self.reading: set[str] = set()
        self.kept: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        fetched = params.get("fetch") and request.num_preemptions
        if not (params.get("do_remote_prefill") or fetched):
            return 0, False
        count = max(0, request.num_prompt_tokens - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
        if num_external_tokens:
            self.reading.add(request.request_id)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, None]:
        params = request.kv_transfer_params or {}
        keep = bool(params.get("do_remote_decode") and block_ids)
        if keep:
            self.kept.add(request.request_id)
        return keep, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return (0,)

    def bind_kv_cache_manager(self, manager: Any) -> None: ...
    def on_new_request(self, request: Request) -> None: ...
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any, **__: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self, *_: Any, **__: Any) -> None: ...
