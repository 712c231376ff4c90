"""The made-up model notices every way in which a KV cache can be the wrong one."""

from __future__ import annotations

from vllm_calrouter.emulation.made_up_model import continuation, kept, next_token

TOKENS = list(range(10, 80))


def test_the_same_text_goes_on_the_same_way() -> None:
    first = continuation(TOKENS, 5)
    assert first == continuation(TOKENS, 5)
    assert continuation(TOKENS + first[:2], 3) == first[2:]


def test_no_token_is_special() -> None:
    assert all(token >= 3 for token in continuation(TOKENS, 100))


def test_a_lost_block_changes_the_token() -> None:
    rows = kept(TOKENS, 2)
    rows[:, :32] = 0
    assert next_token(rows) != next_token(kept(TOKENS, 2))


def test_swapped_blocks_change_the_token() -> None:
    swapped = TOKENS[32:64] + TOKENS[:32] + TOKENS[64:]
    assert next_token(kept(swapped, 2)) != next_token(kept(TOKENS, 2))


def test_a_layer_in_another_s_place_changes_the_token() -> None:
    assert next_token(kept(TOKENS, 2).flip(0)) != next_token(kept(TOKENS, 2))
