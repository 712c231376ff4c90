"""The NIXL subclass, without a transfer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_calrouter.engine.connector import NixlConnector, kv_role


def test_the_first_ranks_produce_and_the_others_consume() -> None:
    assert [kv_role(rank, 2) for rank in range(4)] == [
        *("kv_producer", "kv_producer"),
        *("kv_consumer", "kv_consumer"),
    ]


def matched(
    answer: tuple[int, bool], computed: int, params: dict[str, Any] | None
) -> Any:
    """What the connector makes of vLLM's own `answer`."""
    connector = NixlConnector.__new__(NixlConnector)
    connector.connector_scheduler = SimpleNamespace(
        get_num_new_matched_tokens=lambda *_: answer
    )
    request = SimpleNamespace(kv_transfer_params=params)
    return connector.get_num_new_matched_tokens(request, computed)


@pytest.mark.parametrize(
    ("prompt", "remote", "computed", "expected"),
    [
        (33, 32, 0, (32, True)),
        (33, 32, 16, (16, True)),
        # All that is there to read is here already.
        (33, 32, 32, (0, False)),
        (32, 32, 0, (32, True)),
    ],
)
def test_no_more_is_read_than_was_computed(
    prompt: int, remote: int, computed: int, expected: tuple[int, bool]
) -> None:
    params = {"do_remote_prefill": True, "remote_num_tokens": remote}
    assert matched((prompt - computed, True), computed, params) == expected


@pytest.mark.parametrize("params", [None, {}, {"remote_num_tokens": 0}])
def test_what_is_not_ours_is_vllm_s_answer(params: dict[str, Any] | None) -> None:
    assert matched((33, True), 0, params) == (33, True)
    assert matched((0, False), 0, params) == (0, False)
