"""Requests and engine answers as vLLM makes them, for tests without engines."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)

KV = {
    "do_remote_prefill": True,
    "remote_num_tokens": 10,
    "remote_block_ids": ([1],),
    "remote_engine_id": "p",
}


def request(name: str = "r", prompt: int = 10, **changes: Any) -> EngineCoreRequest:
    params = changes.pop("params", {})
    settings: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(range(prompt)),
        "mm_features": None,
        "sampling_params": SamplingParams(**{"max_tokens": 20, **params}),
        "pooling_params": None,
        "arrival_time": 1.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "external_req_id": f"user-{name}",
        **changes,
    }
    return EngineCoreRequest(**settings)


def answer(
    *outputs: EngineCoreOutput, dropped: tuple[str, ...] = ()
) -> EngineCoreOutputs:
    ends = {output.request_id for output in outputs if output.finished}
    return EngineCoreOutputs(
        outputs=list(outputs), finished_requests=ends | set(dropped)
    )


def token(name: str, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(name, [7], finish_reason=finish)


def prefilled(name: str, kv: dict[str, Any] | None = KV) -> EngineCoreOutput:
    return EngineCoreOutput(
        f"{name}-prefill",
        [7],
        finish_reason=FinishReason.LENGTH,
        kv_transfer_params=kv,
    )
