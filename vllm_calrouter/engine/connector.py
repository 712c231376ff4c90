"""NIXL with a role per rank.

vLLM takes one `--kv-transfer-config` for all data-parallel ranks, and is dropping
`kv_both` for NIXL: here each rank gets the one role it plays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

from vllm_calrouter.engine.nixl_sleep import let_sleep
from vllm_calrouter.seam import router_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def kv_role(rank: int, prefill: int) -> str:
    """vLLM's name for what the engine of this rank does with KV caches."""
    return "kv_producer" if rank < prefill else "kv_consumer"


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """`NixlConnector` as vLLM knows it, told its rank's role before it is built."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        options = router_options(vllm_config)
        assert options is not None, "this connector is chosen by the router only"
        rank = vllm_config.parallel_config.data_parallel_index
        # The scheduler reads the role again from this configuration afterwards.
        vllm_config.kv_transfer_config.kv_role = kv_role(rank, options.prefill)
        let_sleep(options.nixl_sleep_ms)
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to read from afar: never more than the prefill engine computed.

        vLLM counts the whole prompt, and a decode leg's may end in a first token that
        only this engine computes. Where the rest fills its last block exactly, one
        token too many asks for a block that the other side does not have.
        """
        count, asynchronous = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        remote = (request.kv_transfer_params or {}).get("remote_num_tokens")
        if not count or not remote:
            return count, asynchronous
        count = max(0, min(count, remote - num_computed_tokens))
        return count, asynchronous and count > 0
