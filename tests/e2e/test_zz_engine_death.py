"""An engine dies. Last of all, since vLLM then ends the whole server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.talk import Server, prompt_ids


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_request_hangs_and_the_server_ends(
    request: pytest.FixtureRequest, role: str
) -> None:
    server: Server = request.getfixturevalue(
        "split" if role == "prefill" else "unified"
    )
    rank, prompt, tokens = (0, 3000, 3) if role == "prefill" else (1, 5, 4000)

    def ask(seed: int) -> str:
        body = {
            "model": "tiny",
            "prompt": prompt_ids(prompt, 500 + seed),
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        try:
            answer = server.http.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return "no answer"
        if answer.status_code != 200:
            return str(answer.status_code)
        return str(answer.json()["choices"][0]["finish_reason"])

    with ThreadPoolExecutor(60) as pool:
        asking = [pool.submit(ask, seed) for seed in range(60)]
        while server.metric("vllm:calrouter_legs_in_flight", engine=str(rank)) < 2:
            assert not all(future.done() for future in asking)
        server.cluster.engine(rank).kill()
        ends = [future.result(timeout=90) for future in asking]
    assert set(ends) - {"length"} <= {"no answer", "500", "abort"}
    assert set(ends) != {"length"}
    server.cluster.wait_for_exit(60)
    assert f"EngineCore_DP{rank}" in server.cluster.log.read_text()
