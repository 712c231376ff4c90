"""A message as an engine sends it, for tests without engines."""

from __future__ import annotations

from typing import Any

from vllm_calrouter.messages import EngineMessage, StepTiming


def message(**changes: Any) -> EngineMessage:
    fields: dict[str, Any] = {
        "rank": 0,
        "role": "both",
        "incarnation": 7,
        "sequence": 1,
        "prefill_tokens": 900,
        "output_tokens": 300,
        "context_tokens": 4000,
        "running": 5,
        "waiting": 2,
        "waiting_remote": 1,
        "kv_total_blocks": 1000,
        "kv_free_blocks": 700,
        "kv_pinned_blocks": 30,
        "block_tokens": 16,
        "max_seqs": 64,
        "max_batched_tokens": 2048,
        "preemptions": 0,
        "transfers_in_flight": 1,
        "transfers": 0,
        "transfer_bytes": 0,
        "transfer_s": 0.0,
        "recent_transfers": [],
        "steps": 1,
        "recent_steps": [StepTiming(0, 0, 0, 0.0, 0)],
        "step_age_s": 0.0,
        "seen": {},
        **changes,
    }
    return EngineMessage(**fields)
