from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.pooling_params import PoolingParams

from tests.router.requests import KV, request
from vllm_calrouter.router import legs

BOOKED = {"router": "me", "booking": 5, "output_tokens": 20}


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
    leg = legs.prefill_leg(asked, 1, BOOKED)
    assert leg.request_id != asked.request_id
    assert leg.data_parallel_rank == 1
    assert leg.prompt_token_ids == asked.prompt_token_ids
    assert leg.sampling_params.max_tokens == 1
    assert leg.sampling_params.logprobs is None
    assert leg.sampling_params.extra_args["kv_transfer_params"]["do_remote_decode"]


def test_decode_leg_is_the_request_itself_with_a_cache_to_read() -> None:
    asked = request(params={"logprobs": 5, "extra_args": {"mine": 1}})
    leg = legs.decode_leg(asked, 3, BOOKED, KV)
    assert leg.request_id == asked.request_id
    assert leg.sampling_params.logprobs == 5
    assert leg.sampling_params.extra_args == {
        "mine": 1,
        "kv_transfer_params": KV,
        "calrouter": BOOKED,
    }


def test_the_request_is_never_changed() -> None:
    asked = request(params={"extra_args": {"mine": 1}})
    legs.one_leg(asked, 0, BOOKED)
    legs.prefill_leg(asked, 0, BOOKED)
    legs.decode_leg(asked, 0, BOOKED, KV)
    legs.release_leg(asked, 1, KV)
    assert asked.data_parallel_rank is None
    assert not asked.abort_immediately
    assert asked.sampling_params.extra_args == {"mine": 1}


def test_every_leg_says_whose_it_is() -> None:
    asked = request(params={"extra_args": {"calrouter": "a client's own"}})
    made = [
        legs.one_leg(asked, 0, BOOKED),
        legs.prefill_leg(asked, 0, BOOKED),
        legs.decode_leg(asked, 0, BOOKED, None),
    ]
    for leg in made:
        assert leg.sampling_params.extra_args["calrouter"] == BOOKED


def test_two_prefill_legs_share_nothing() -> None:
    one, other = (
        legs.prefill_leg(request(), 0, {"router": "me", "booking": number})
        for number in (1, 2)
    )
    assert one.sampling_params.extra_args["calrouter"]["booking"] == 1
    assert other.sampling_params.extra_args["calrouter"]["booking"] == 2


def test_a_pooling_leg_says_whose_it_is_and_the_request_is_not_changed() -> None:
    asked = request()
    asked.sampling_params = None
    asked.pooling_params = PoolingParams(extra_kwargs={"mine": 1})
    leg = legs.one_leg(asked, 2, BOOKED)
    assert leg.pooling_params.extra_kwargs == {"mine": 1, "calrouter": BOOKED}
    assert asked.pooling_params.extra_kwargs == {"mine": 1}


def test_release_leg_ends_before_it_begins_under_a_name_of_its_own() -> None:
    leg = legs.release_leg(request(), 2, KV)
    assert leg.abort_immediately
    assert leg.request_id not in ("r", "r-prefill")
