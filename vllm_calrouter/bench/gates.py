"""What must be right before anything is measured.

A server that gives other tokens than asked, other text for the same greedy request, or
has pairs that never moved a KV cache, is fast or slow for reasons of its own.
"""

from __future__ import annotations

from typing import Any

from vllm_calrouter.bench.prompts import prompt
from vllm_calrouter.bench.server import About, BenchError, Server
from vllm_calrouter.workloads import Arrival

#: Prompt and output tokens: shorter, as long and longer than KV blocks of 16 to 128.
_LENGTHS = ((1, 2), (16, 1), (33, 17), (128, 2), (300, 40))


async def check(server: Server, about: About) -> None:
    """Ask for a few tokens; raises BenchError that says which gate is shut."""
    counts = await server.counts()
    if counts.running:
        raise BenchError(
            f"{server.name} is serving {counts.running} other request(s): measure it "
            "alone"
        )
    pairs = about.prefill * (about.engines - about.prefill)
    if counts.warm_ups < pairs:
        raise BenchError(
            f"{server.name} has warmed {counts.warm_ups} of {pairs} prefill-decode "
            "pairs: start it with --router-config.warm_up true"
        )
    for number, (prompt_tokens, output_tokens) in enumerate(_LENGTHS):
        if prompt_tokens + output_tokens > about.max_model_len:
            continue
        asked = Arrival(0.0, prompt_tokens, output_tokens)
        # Salted, so that the second does not find the first in a prefix cache.
        first, second = [
            await server.complete(_body(asked, number, about, f"gate {number} {turn}"))
            for turn in (1, 2)
        ]
        _check_tokens(server, asked, first)
        if _text(first) != _text(second):
            raise BenchError(
                f"{server.name} gives two texts for one greedy request of "
                f"{prompt_tokens} + {output_tokens} tokens: it does not compute right"
            )


def _body(asked: Arrival, number: int, about: About, salt: str) -> dict[str, Any]:
    return {
        "model": about.model,
        "prompt": prompt(asked, number),
        "max_tokens": asked.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_salt": salt,
    }


def _check_tokens(server: Server, asked: Arrival, told: dict[str, Any]) -> None:
    usage = told["usage"]
    found = usage["prompt_tokens"], usage["completion_tokens"]
    if found != (asked.prompt_tokens, asked.output_tokens):
        raise BenchError(
            f"{server.name} was asked for {asked.prompt_tokens} + "
            f"{asked.output_tokens} tokens and gave {found[0]} + {found[1]}"
        )


def _text(told: dict[str, Any]) -> str:
    text: str = told["choices"][0]["text"]
    return text
