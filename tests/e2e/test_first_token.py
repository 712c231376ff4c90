"""The first token straight from prefill, on real engines.

That the text stays what one engine writes is what all of `test_two_legs.py` shows, for
it is on there. Here: where it begins, where it ends at once, and where it steps aside.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.e2e.talk import Server, prompt_ids

ONE_ENGINE = 2
EOS = "<|im_end|>"


def eos_id(server: Server) -> int:
    answer = server.post("/tokenize", prompt=EOS, add_special_tokens=False)
    (number,) = answer["tokens"]
    assert isinstance(number, int)
    return number


def both(server: Server, prompt: list[int], **body: Any) -> tuple[Any, dict[str, Any]]:
    """A completion over two legs, equal to one engine's, and its journal line."""
    expected = server.complete(prompt, rank=ONE_ENGINE, **body)
    name = uuid.uuid4().hex
    choice = server.complete(prompt, request_id=name, **body)
    assert choice == expected
    return choice, server.line_of(name)


def test_ends_at_once(split: Server) -> None:
    eos = eos_id(split)
    prompt = prompt_ids(64, seed=21)
    first = split.complete(prompt, rank=ONE_ENGINE, max_tokens=2)["token_ids"][0]
    for body, count in (
        ({"logit_bias": {str(eos): 100.0}}, 1),
        ({"stop_token_ids": [first]}, 1),
        ({"logit_bias": {str(eos): 100.0}, "min_tokens": 3}, 4),
        ({"logit_bias": {str(eos): 100.0}, "ignore_eos": True}, 8),
    ):
        choice, line = both(split, prompt, max_tokens=8, **body)
        assert len(choice["token_ids"]) == count, body
        assert line["output_tokens"] == count
        assert (line["decode_rank"] is None) == (count == 1)
        assert line["first_token_bypass"] is None
    assert split.settle() == ""


def test_stop_strings_in_and_across_the_first_tokens(split: Server) -> None:
    prompt = prompt_ids(40, seed=5)
    text = split.complete(prompt, rank=ONE_ENGINE, max_tokens=12)["text"]
    alone = []
    for start, length in itertools.product(range(4), (1, 2, 3)):
        stop = text[start : start + length]
        for include in (False, True):
            _, line = both(
                split,
                prompt,
                max_tokens=12,
                stop=[stop],
                include_stop_str_in_output=include,
            )
            alone.append(line["decode_rank"] is None)
    assert any(alone), "no stop string ended a request with its first token"
    assert not all(alone), "no stop string was found in a later token"
    assert split.settle() == ""


def test_split_characters_are_put_together(split: Server) -> None:
    answer = split.post("/tokenize", prompt="é€😀ß", add_special_tokens=False)
    body = {"max_tokens": 10, "allowed_token_ids": answer["tokens"]}
    for seed in range(3):
        prompt = prompt_ids(33, seed=300 + seed)
        whole = both(split, prompt, **body)[0]["text"]
        request = {"model": "tiny", "prompt": prompt, "stream": True, "temperature": 0}
        with split.http.stream("POST", "/v1/completions", json=request | body) as got:
            lines = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        texts = [json.loads(line)["choices"][0]["text"] for line in lines]
        assert "".join(texts) == whole


BYPASSED: dict[str, dict[str, Any]] = {
    "structured_output": {"structured_outputs": {"choice": ["red fox", "dog"]}},
    "penalties": {"presence_penalty": 0.5},
    "seed": {"temperature": 1.0, "seed": 7},
    "bad_words": {"bad_words": ["quick brown"]},
    "client": {"vllm_xargs": {"first_token": "off"}},
}


@pytest.mark.parametrize("cause", BYPASSED)
def test_what_is_not_exact_steps_aside_and_is_counted(
    split: Server, cause: str
) -> None:
    name = "vllm:calrouter_first_token_bypasses_total"
    count = split.metric(name, cause=cause)
    _, line = both(split, prompt_ids(40, seed=9), max_tokens=6, **BYPASSED[cause])
    assert line["first_token_bypass"] == cause
    assert line["prefill_s"] < line["ttft_s"]
    assert split.metric(name, cause=cause) == count + 1


def test_first_tokens_and_pauses_are_metrics(split: Server) -> None:
    sent = split.metric("vllm:calrouter_first_tokens_total")
    pauses = split.metric("vllm:calrouter_first_token_pause_seconds_count")
    split.complete(prompt_ids(30, seed=31), max_tokens=3)
    assert split.metric("vllm:calrouter_first_tokens_total") == sent + 1
    told = split.metric("vllm:calrouter_first_token_pause_seconds_count")
    assert told == pauses + 1


def log_probabilities(
    server: Server, prompt: list[int], tokens: list[int]
) -> list[float]:
    """Of each token as the next one, at temperature 1, where only these may come."""
    choice = server.complete(
        prompt,
        rank=ONE_ENGINE,
        max_tokens=1,
        logprobs=512,
        return_tokens_as_token_ids=True,
    )
    top = choice["logprobs"]["top_logprobs"][0]
    logs = np.array([top[f"token_id:{token}"] for token in tokens])
    result: list[float] = (logs - np.logaddexp.reduce(logs)).tolist()
    return result


def test_sampled_text_keeps_its_distribution(split: Server) -> None:
    """First and second token together, against the model's own probabilities."""
    prompt = prompt_ids(40, seed=41)
    ask = {"rank": ONE_ENGINE, "max_tokens": 1, "logprobs": 8}
    ranked = split.complete(prompt, **ask, return_tokens_as_token_ids=True)
    top = ranked["logprobs"]["top_logprobs"][0]
    tokens = [int(name.split(":")[1]) for name in list(top)[:3]]

    first = log_probabilities(split, prompt, tokens)
    expected = {
        (a, b): np.exp(log_a + log_b)
        for a, log_a in zip(tokens, first, strict=True)
        for b, log_b in zip(
            tokens, log_probabilities(split, [*prompt, a], tokens), strict=True
        )
    }
    draws, rounds = 200, 6
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        answer = split.post(
            "/v1/completions",
            prompt=prompt,
            n=draws,
            max_tokens=2,
            temperature=1.0,
            ignore_eos=True,
            allowed_token_ids=tokens,
            return_token_ids=True,
        )
        seen.update(tuple(choice["token_ids"]) for choice in answer["choices"])
    total = draws * rounds
    assert sum(seen.values()) == total
    # Cells too rare for the test's normal approximation are taken together.
    rare = [pair for pair in expected if expected[pair] * total < 5]
    cells = [(seen[pair], expected[pair]) for pair in expected if pair not in rare]
    if rare:
        cells.append((sum(seen[p] for p in rare), sum(expected[p] for p in rare)))
    assert len(cells) >= 4
    chi_square = sum((n - p * total) ** 2 / (p * total) for n, p in cells)
    # Normal approximation of chi square (Wilson and Hilferty, 1931): 5 sigma.
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    assert (chi_square / freedom) ** (1 / 3) < 1 - spread + 5 * spread**0.5


def test_a_cache_that_cannot_be_read_is_computed_again(split: Server) -> None:
    prompt = prompt_ids(70, seed=51)
    expected = split.complete(prompt, rank=ONE_ENGINE, max_tokens=5)["token_ids"]
    nowhere = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "nobody",
        "remote_request_id": "nothing",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_num_tokens": 70,
    }
    # On the other decode engine, whose prefix cache does not know the prompt.
    got = split.complete(prompt, rank=3, max_tokens=5, kv_transfer_params=nowhere)
    assert got["token_ids"] == expected
    assert split.settle() == ""
