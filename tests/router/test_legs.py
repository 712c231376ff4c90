from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.pooling_params import PoolingParams

from tests.router.requests import KV, request
from vllm_calrouter.router import legs


def test_a_plain_request_can_be_split() -> None:
    assert legs.why_one_leg(request()) is None


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("pooling", {"sampling_params": None, "pooling_params": PoolingParams()}),
        ("forced_rank", {"data_parallel_rank": 0}),
        ("streaming_input", {"resumable": True}),
        ("prompt_embeds", {"prompt_embeds": torch.zeros(3, 4)}),
        ("multimodal", {"mm_features": [object()]}),
        ("own_kv_transfer", {"params": {"extra_args": {"kv_transfer_params": KV}}}),
        ("prompt_logprobs", {"params": {"prompt_logprobs": 0}}),
        ("single_token", {"params": {"max_tokens": 1}}),
    ],
)
def test_what_cannot_be_split_has_a_cause(cause: str, changes: dict[str, Any]) -> None:
    if "sampling_params" in changes:
        changed = request()
        changed.sampling_params = None
        changed.pooling_params = changes["pooling_params"]
    else:
        changed = request(**changes)
    assert legs.why_one_leg(changed) == cause


def test_prefill_leg_asks_for_the_cheapest_token_and_keeps_the_cache() -> None:
    asked = request(params={"logprobs": 5, "min_tokens": 9, "stop": ["x"]})
    leg = legs.prefill_leg(asked, 1)
    assert leg.request_id != asked.request_id
    assert leg.data_parallel_rank == 1
    assert leg.prompt_token_ids == asked.prompt_token_ids
    assert leg.sampling_params.max_tokens == 1
    assert leg.sampling_params.logprobs is None
    assert leg.sampling_params.extra_args["kv_transfer_params"]["do_remote_decode"]


def test_decode_leg_is_the_request_itself_with_a_cache_to_read() -> None:
    asked = request(params={"logprobs": 5, "extra_args": {"mine": 1}})
    leg = legs.decode_leg(asked, 3, KV)
    assert leg.request_id == asked.request_id
    assert leg.sampling_params.logprobs == 5
    assert leg.sampling_params.extra_args == {"mine": 1, "kv_transfer_params": KV}


def test_the_request_is_never_changed() -> None:
    asked = request(params={"extra_args": {"mine": 1}})
    legs.prefill_leg(asked, 0)
    legs.release_leg(asked, 1, KV)
    assert asked.data_parallel_rank is None
    assert not asked.abort_immediately
    assert asked.sampling_params.extra_args == {"mine": 1}


def test_release_leg_ends_before_it_begins_under_a_name_of_its_own() -> None:
    leg = legs.release_leg(request(), 2, KV)
    assert leg.abort_immediately
    assert leg.request_id not in ("r", "r-prefill")
