"""The router's HTTP pages, by vLLM's interface for endpoint plugins."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_calrouter._core import Phase
from vllm_calrouter.router.intake import SloHeaders

if TYPE_CHECKING:
    from starlette.datastructures import State

    from vllm_calrouter.router.client import RouterClient
    from vllm_calrouter.router.router import Router


class RouterEndpoints:
    """The router's pages, and its ear for headers.

    - `GET /router/state`: this API server's books, where the engines are, what it heard
      of them and how long ago, what work costs there, how they would be split better,
      and what they hold now
      (`?engines=false`: without asking them, which waits for a step's end).
    - `GET /router/decisions`: the last requests it routed, as the journal has them.
    """

    name = "calrouter"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route("/router/state", self._state, methods=["GET"])
        app.add_api_route("/router/decisions", self._decisions, methods=["GET"])
        app.add_middleware(SloHeaders)

    async def init_state(
        self, engine_client: Any, state: State, args: Namespace
    ) -> None:
        state.calrouter_client = getattr(engine_client, "engine_core", None)
        given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
        keys = [key for key in given if key]
        state.calrouter_auth = (
            AuthenticationMiddleware(app=None, tokens=keys) if keys else None
        )

    async def _state(self, request: Request, engines: bool = True) -> JSONResponse:
        if _is_locked(request):
            return _unauthorized()
        client: RouterClient = request.app.state.calrouter_client
        assert client.router is not None
        held = await client.engine_states() if engines else []
        if client.subscriber:
            client.subscriber.refresh()
        heard = client.subscriber.describe() if client.subscriber else []
        hosts = [
            {"rank": engine.rank, "host": engine.host, "telemetry": engine.url}
            for engine in client.introductions
        ]
        costs = client.calibrator.describe() if client.calibrator else []
        return JSONResponse(
            {
                **describe(client.router),
                "served": client.served,
                "hosts": hosts,
                "heard": heard,
                "calibration": costs,
                "split": client.split.describe(),
                "engines": held,
            }
        )

    async def _decisions(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=500)] = 20,
        request_id: str | None = None,
    ) -> Response:
        if _is_locked(request):
            return _unauthorized()
        router = request.app.state.calrouter_client.router
        # As the journal is written: scores may be infinite, which JSON has no word for.
        found = msgspec.json.encode(router.decisions(limit, request_id))
        return Response(found, media_type="application/json")


def _is_locked(request: Request) -> bool:
    """Whether the server has a key and the request does not.

    vLLM guards a fixed list of path prefixes, and the router's is not in it.
    """
    auth = request.app.state.calrouter_auth
    return auth is not None and not auth.verify_token(request.headers)


def _unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, status_code=401)


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
