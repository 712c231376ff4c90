"""What work costs where nothing was measured, and vLLM's scheduler limits."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_calrouter._core import Costs

#: NVIDIA A40, Qwen2.5-3B in BF16, TP 1, from the figures printed in "Calibrate, Then
#: Route": a decode step of 13.237 ms alone, 2.9 % more in a batch of eight, a base of
#: 66.7 ms a prefill, 36,864 bytes of KV a token, 60,000 tokens of KV an engine. It
#: prints neither a prefill time by length nor a transfer time. The slope is a bound by
#: the hardware: 2 x 3.09e9 FLOP a token at the 149.7e12 FLOP/s of the A40's data sheet.
#: Transfers are priced at PCIe 4.0 x16, 32e9 bytes/s, the A40's own link.
A40_QWEN_3B = Costs(
    prefill_base_s=0.0667,
    prefill_per_token_s=2 * 3.09e9 / 149.7e12,
    prefill_per_token_sq_s=0.0,
    decode_base_s=0.013237 * (1 - 0.029 / 7),
    decode_per_seq_s=0.013237 * 0.029 / 7,
    decode_per_context_token_s=0.0,
    transfer_base_s=0.0,
    transfer_bytes_per_s=32e9,
    kv_bytes_per_token=36_864,
    kv_capacity_tokens=60_000,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """One engine's scheduler limits, by vLLM's names; its own defaults."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
