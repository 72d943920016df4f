"""How paths describe their answers in /openapi.json, and how they read their bodies, which have to be JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from inspect import signature
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from outrider.server.mapping.unknown import ignorable
from outrider.server.problems import Refused
from outrider.server.shapes.base import ApiRequest
from outrider.server.shapes.plain import AnthropicProblem, OpenAIProblem

ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)


SCHEMAS = "#/components/schemas/"
KINDS = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
"""Events of many shapes, which `type` tells apart."""


def described(whole: type[BaseModel], events: dict[str, Any] | None = None, anthropic: bool = False) -> dict[Any, Any]:
    """`whole` is the answer, `events` what a stream of it has, if there is one."""
    content = {"text/event-stream": {"itemSchema": events}} if events is not None else {}
    answers: dict[Any, Any] = {200: {"model": whole, "content": content}}
    return answers | problems(anthropic)


def chunks(shape: type[BaseModel]) -> dict[str, Any]:
    """Events that are a `shape` each, or an error, and in the end [DONE]."""
    kinds = [{"$ref": SCHEMAS + kind.__name__} for kind in (shape, OpenAIProblem)]
    return _event({"anyOf": [_json({"anyOf": kinds}), {"const": "[DONE]"}]})


def named_events() -> dict[str, Any]:
    """Events with a name, which is their data's type, too."""
    return _event(_json(KINDS), {"event": {"type": "string"}})


def _event(data: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    fields = {"data": data, **(more or {})}
    return {"type": "object", "properties": fields, "required": list(fields)}


def _json(shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": shape}


def problems(anthropic: bool = False) -> dict[Any, Any]:
    """All that may go wrong at a path."""
    shape: type[BaseModel] = AnthropicProblem if anthropic else OpenAIProblem
    named = {status: {"model": shape} for status in ERRORS}
    return {**named, "4XX": {"model": shape}}  # with a range FastAPI adds none of its own


def describe(app: FastAPI, names: Sequence[str], events: Sequence[type[BaseModel]]) -> None:
    """Makes the description: a request's `model` is one of `names`, and the shapes of `events` are there."""
    app.openapi_version = "3.2.0"  # the first that has words for the items of a stream
    shapes = app.openapi()["components"]["schemas"]
    for event in events:
        shape = event.model_json_schema(ref_template=SCHEMAS + "{model}", mode="serialization")
        shapes.update(shape.pop("$defs", {}))
        shapes[event.__name__] = shape
    for shape in shapes.values():
        asked = shape.get("properties", {}).get("model", {})
        for kind in asked.get("anyOf", ()):
            if kind["type"] == "string":
                kind["enum"] = list(names)


class _Route(APIRoute):
    """A path whose body is JSON, one shape of it, and whose endpoint answers for itself.

    FastAPI's own handler is made for forms, files and dependencies of dependencies too, and takes a tenth of a request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        first, *others = signature(endpoint, eval_str=True).parameters.values()
        shape: type[ApiRequest] = first.annotation

        async def strictly(request: Request) -> Response:
            _check_kind(request)
            asked = _read(shape, await request.body())
            if asked.model_extra:
                request.app.state.context.ignored.note(request.url.path, ignorable(asked))
            given = {"request": request, "context": request.app.state.context}
            answer: Response = await endpoint(asked, **{one.name: given[one.name] for one in others})
            return answer

        return strictly


def _read(shape: type[ApiRequest], body: bytes) -> ApiRequest:
    """JSON to the letter: UTF-8, no NaN, not nested without end."""
    try:
        return shape.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in wrong]) from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None


def typed() -> type[APIRoute]:
    """The class of routes that read their bodies so."""
    return _Route


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused("content-type is not JSON; expected application/json", status=415)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Refused(
            f"the body is compressed ({coding[:40]}), and no compressed body is read here; send it as it is",
            status=415,
            details="request_body_encoding_unsupported",
        )
