"""What work costs where nothing was measured, and vLLM's scheduler limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_calrouter._core import Costs


class EngineCosts(Protocol):
    """Anything with the constants of `_core.Costs`, as a profile's are."""

    @property
    def prefill_base_s(self) -> float: ...
    @property
    def prefill_per_token_s(self) -> float: ...
    @property
    def prefill_per_token_sq_s(self) -> float: ...
    @property
    def decode_base_s(self) -> float: ...
    @property
    def decode_per_seq_s(self) -> float: ...
    @property
    def decode_per_context_token_s(self) -> float: ...
    @property
    def transfer_base_s(self) -> float: ...
    @property
    def transfer_bytes_per_s(self) -> float: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...


def core_costs(costs: EngineCosts) -> Costs:
    """The same constants for the core; raises ValueError on what cannot be."""
    return Costs(
        prefill_base_s=costs.prefill_base_s,
        prefill_per_token_s=costs.prefill_per_token_s,
        prefill_per_token_sq_s=costs.prefill_per_token_sq_s,
        decode_base_s=costs.decode_base_s,
        decode_per_seq_s=costs.decode_per_seq_s,
        decode_per_context_token_s=costs.decode_per_context_token_s,
        transfer_base_s=costs.transfer_base_s,
        transfer_bytes_per_s=costs.transfer_bytes_per_s,
        kv_bytes_per_token=costs.kv_bytes_per_token,
        kv_capacity_tokens=costs.kv_capacity_tokens,
    )


#: NVIDIA A40, Qwen2.5-3B in BF16, TP 1, after the figures printed in "Calibrate, Then
#: Route": a decode step of 13.237 ms alone and 2.9 % more in a batch of eight, 66.7 ms
#: for a typical prompt, 36,864 bytes of KV a token, 60,000 tokens of KV an engine.
#: Assumed, as it prints no more: a typical prompt has 512 tokens; a prefill step reads
#: the weights once, as a decode step does; attention costs prefill, per token of
#: context, 36 layers * 2,048 / 2.77e9 parameters of the rest, and decode the reading of
#: its KV at the A40's 696 GB/s; transfers take 2 ms, and two thirds of PCIe 4.0 x16.
A40_QWEN_3B = Costs(
    prefill_base_s=0.013237,
    prefill_per_token_s=1.03016e-4,
    prefill_per_token_sq_s=2.74194e-9,
    decode_base_s=0.013182161,
    decode_per_seq_s=2.77207e-5,
    decode_per_context_token_s=5.29655e-8,
    transfer_base_s=0.002,
    transfer_bytes_per_s=2.0e10,
    kv_bytes_per_token=36_864,
    kv_capacity_tokens=60_000,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """One engine's scheduler limits, by vLLM's names; its own defaults."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
