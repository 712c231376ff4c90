"""Embeddings and scores: one leg, on any engine, at the plugin's defaults."""

from __future__ import annotations

import math

from tests.e2e.talk import Server


def embed(server: Server, text: str, rank: int | None = None) -> list[float]:
    answer = server.post("/v1/embeddings", rank, input=text)
    vector: list[float] = answer["data"][0]["embedding"]
    return vector


def test_embeddings_do_not_depend_on_the_engine(pooling: Server) -> None:
    vectors = [embed(pooling, "hello there", rank) for rank in (None, 0, 1)]
    for a, b in zip(vectors[0], vectors[1], strict=True):
        assert math.isclose(a, b, abs_tol=1e-5)
    for a, b in zip(vectors[0], vectors[2], strict=True):
        assert math.isclose(a, b, abs_tol=1e-5)


def test_scores_are_answered_and_both_engines_used(pooling: Server) -> None:
    for _ in range(4):
        answer = pooling.post("/score", text_1="a fox", text_2=["a dog", "a fox"])
        scores = [item["score"] for item in answer["data"]]
        assert scores[1] > scores[0]
    for engine in ("0", "1"):
        used = pooling.metric(
            "vllm:calrouter_decisions_total", engine=engine, policy="calibrated"
        )
        assert used > 0
    assert pooling.settle() == ""
