"""Real engines that serve by deadline: the same answers, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

from tests.e2e.talk import Server, gather, prompt_ids

#: From hopeless to far away; None: no deadline.
TARGETS_MS = (1, 200, 2_000, 60_000, None)


def wish(target_ms: int | None) -> dict[str, Any]:
    return {} if target_ms is None else {"vllm_xargs": {"slo_ttft_ms": target_ms}}


async def test_requests_of_all_deadlines_get_their_own_answers(split: Server) -> None:
    """Many more at once than the engines have slots, with prompts of all lengths."""
    rng = random.Random(3)
    asked = [
        (prompt_ids(rng.choice((20, 150, 700)), 900 + number), TARGETS_MS[number % 5])
        for number in range(60)
    ]
    alone = [split.complete(prompt, 3, max_tokens=6) for prompt, _ in asked[:10]]
    async with split.async_http() as http:

        async def complete(prompt: list[int], target_ms: int | None) -> dict[str, Any]:
            body = {
                **{"model": "tiny", "prompt": prompt, "max_tokens": 6},
                **{"temperature": 0, "return_token_ids": True, "ignore_eos": True},
                **wish(target_ms),
            }
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        answers = await gather(60, [complete(*one) for one in asked])
    assert all(len(one["token_ids"]) == 6 for one in answers)
    for one, whole in zip(answers, alone, strict=False):
        assert one["token_ids"][: len(whole["token_ids"])] == whole["token_ids"]
    assert split.settle() == ""
