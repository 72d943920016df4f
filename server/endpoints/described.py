"""How paths describe their answers in /openapi.json, and how they read their bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.responses import Response

from outrider.server.problems import Refused
from outrider.server.shapes.plain import AnthropicProblem, OpenAIProblem

ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)


def described(whole: type[BaseModel], event: type[BaseModel] | None = None, anthropic: bool = False) -> dict[Any, Any]:
    """`whole` is the answer, `event` what a stream has in each event's data."""
    content: dict[str, Any] = {}
    if event is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"events; the data of each is a {event.__name__}, then [DONE]"}
        }
    answers: dict[Any, Any] = {200: {"model": whole, "content": content}}
    return answers | problems(anthropic)


def problems(anthropic: bool = False) -> dict[Any, Any]:
    """All that may go wrong at a path."""
    shape: type[BaseModel] = AnthropicProblem if anthropic else OpenAIProblem
    named = {status: {"model": shape} for status in ERRORS}
    return {**named, "4XX": {"model": shape}}  # with a range FastAPI adds none of its own


class _Strict(Request):
    """A request whose body is JSON to the letter: UTF-8, no NaN, not nested without end."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from None


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return strictly


def typed() -> type[APIRoute]:
    """The class of routes that read their bodies so."""
    return _Route
