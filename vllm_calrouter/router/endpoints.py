"""The router's HTTP pages, by vLLM's interface for endpoint plugins."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_calrouter._core import Phase

if TYPE_CHECKING:
    from starlette.datastructures import State

    from vllm_calrouter.router.client import RouterClient
    from vllm_calrouter.router.router import Router


class RouterEndpoints:
    """`GET /router/state`: this API server's books, what it heard of the engines and
    how long ago, and what they hold now."""

    name = "calrouter"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/router/state", self._state, methods=["GET"])

    async def init_state(
        self, engine_client: Any, state: State, args: Namespace
    ) -> None:
        state.calrouter_client = getattr(engine_client, "engine_core", None)
        given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
        keys = [key for key in given if key]
        state.calrouter_auth = (
            AuthenticationMiddleware(app=None, tokens=keys) if keys else None
        )

    async def _state(self, request: Request) -> JSONResponse:
        app = request.app.state
        auth = app.calrouter_auth
        if auth is not None and not auth.verify_token(request.headers):
            # vLLM guards a fixed list of path prefixes, and this one is not in it.
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        client: RouterClient = app.calrouter_client
        assert client.router is not None
        engines = await client.engine_states()
        heard = client.subscriber.describe() if client.subscriber else []
        state = describe(client.router)
        return JSONResponse({**state, "heard": heard, "engines": engines})


def describe(router: Router) -> dict[str, Any]:
    """A router's books as plain data; counts of legs and tokens by rank."""
    table = router.placer.table
    return {
        "router": router.index,
        "uid": router.uid,
        "policy": router.options.policy,
        "prefill_engines": router.pools.prefill,
        "requests_under_way": router.requests_under_way,
        "idle": table.is_idle(),
        "load": [
            {
                "rank": rank,
                "prefill_legs": table.legs(rank, Phase.PREFILL),
                "decode_legs": table.legs(rank, Phase.DECODE),
                "prompt_tokens": table.prompt_tokens(rank),
                "output_tokens": table.output_tokens(rank),
            }
            for rank in range(router.pools.engines)
        ],
    }
