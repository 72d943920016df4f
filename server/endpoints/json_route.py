"""Routes with a JSON body: its limits, parsing, unknown fields, and the responses that /openapi.json describes.

Unknown fields are ignored and logged, because APIs grow. A field is rejected if ignoring it would change the answer: a
field of another path or server, or a misspelled one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Sequence
from difflib import get_close_matches
from functools import cache
from inspect import signature
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from outrider.protocol.sampling import MAX_SEED
from outrider.server.problems import Problem
from outrider.server.schemas import AnthropicErrorBody, ApiRequest, OpenAIErrorBody

log = logging.getLogger(__name__)

BODY_TIMEOUT_SECONDS = 60.0
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
SCHEMA_REF_PREFIX = "#/components/schemas/"

_UNION_ALTERNATIVES = frozenset({"str", "int", "float", "bool", "none"})
_REASONS = {  # in place of pydantic's sentences, by the type of error
    "extra_forbidden": "no such field is known here; leave it out",
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
}
_MIN_SIMILARITY = 0.9
_MAX_LOGGED_NAMES = 200
_MAX_NAME = 80
_IGNORED_FIELDS = frozenset(
    {
        "cache_control", "cache_prompt", "client_metadata", "container", "context_management", "fallbacks", "include",
        "inference_geo", "max_tool_calls", "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "speed", "store", "stream_options", "timeout", "truncation", "user",
        "verbosity",
    }
)  # fmt: skip
"""Fields of the APIs without effect on the answer, and of some paths that other paths may ignore."""

_OTHER_SERVERS_FIELDS = frozenset(
    {
        "add_special_tokens", "allowed_token_ids", "chat_template", "documents", "format", "images", "input_extra",
        "json", "logits_processors", "lora", "lora_path", "n_predict", "num_beams", "options", "prompt_embeds",
        "prompt_logprobs", "random_seed", "samplers", "stop_regex", "thinking_budget", "thinking_budget_tokens",
        "truncate_prompt_tokens",
    }
)  # fmt: skip
"""Fields of vLLM, llama.cpp, SGLang, Mistral and others that change the text there, whatever their value, but not
those that only matter together with another one, such as mirostat_tau."""

_NEUTRAL_VALUES = {
    "bad_words": [], "best_of": 1, "dry_multiplier": 0, "dynatemp_range": 0, "echo": False, "extra_body": {},
    "include_stop_str_in_output": False, "length_penalty": 1, "mirostat": 0, "n": 1, "n_keep": 0, "n_probs": 0,
    "repeat_penalty": 1, "skip_special_tokens": True, "stop_token_ids": [], "tfs_z": 1, "top_a": 0, "top_n_sigma": -1,
    "typ_p": 1, "typical_p": 1, "use_beam_search": False, "xtc_probability": 0,
}  # fmt: skip
"""Such fields, and some of other paths, with the value that has no effect there."""

_REQUEST_SCHEMAS: set[type[ApiRequest]] = set()
"""The request schemas of all paths."""


def response_docs(
    whole: type[BaseModel], chunk: type[BaseModel] | None = None, streams: bool = False, anthropic: bool = False
) -> dict[Any, Any]:
    """Describes a path's responses. `whole` is the full response.

    `chunk`: the schema of the events of a stream that ends with [DONE]. `streams`: it has events of several kinds.
    """
    content: dict[str, Any] = {"text/event-stream": {}} if streams else {}
    if chunk is not None:
        kinds = [{"$ref": SCHEMA_REF_PREFIX + kind.__name__} for kind in (chunk, OpenAIErrorBody)]
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
        item = {"type": "object", "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}, "required": ["data"]}
        content = {"text/event-stream": {"itemSchema": item}}
    return {200: {"model": whole, "content": content}, **error_docs(anthropic)}


def error_docs(anthropic: bool = False) -> dict[Any, Any]:
    """Describes a path's errors."""
    shape: type[BaseModel] = AnthropicErrorBody if anthropic else OpenAIErrorBody
    named = {status: {"model": shape} for status in ERROR_STATUSES}
    return {**named, "4XX": {"model": shape}}  # with a range FastAPI adds no 422


def extend_openapi(app: FastAPI, names: Sequence[str], event: type[BaseModel]) -> None:
    """Adds the accepted model `names` and the schema of the `event`, which no response names, to the OpenAPI document.

    The first request for the document generates it, because that takes a quarter of a second.
    """
    app.openapi_version = "3.2.0"  # the first version with schemas for stream items
    generate = app.openapi

    @cache
    def extended() -> dict[str, Any]:
        # FastAPI writes bounds as floats, which can't hold the largest seed.
        document: dict[str, Any] = json.loads(
            json.dumps(generate()),
            parse_float=lambda text: min(int(float(text)), MAX_SEED) if float(text).is_integer() else float(text),
        )
        app.openapi_schema = document
        shapes = document["components"]["schemas"]
        shape = event.model_json_schema(ref_template=SCHEMA_REF_PREFIX + "{model}", mode="serialization")
        shapes.update(shape.pop("$defs", {}))
        shapes[event.__name__] = shape
        for shape in shapes.values():
            for kind in shape.get("properties", {}).get("model", {}).get("anyOf", ()):
                if kind["type"] == "string":
                    kind["enum"] = list(names)
        return document

    app.openapi = extended  # type: ignore[method-assign]  # as FastAPI's documentation extends it


class JsonRoute(APIRoute):
    """A route with a JSON body of one shape for a served model, whose endpoint returns a schema or a Response.

    FastAPI's handler also supports forms, files and nested dependencies, and takes a tenth of a request's time.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        first, *others = signature(endpoint, eval_str=True).parameters.values()
        shape: type[ApiRequest] = first.annotation
        _REQUEST_SCHEMAS.add(shape)

        async def handle(request: Request) -> Response:
            context = request.app.state.context
            _check_content_type(request)
            body = await _read_body(request, context.settings.max_body_mb)
            try:  # strict JSON: UTF-8, no NaN, limited nesting
                payload = shape.model_validate(from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False))
            except ValidationError as error:
                raise _report_invalid(error) from None
            except ValueError as error:
                half = "; a text has half of a surrogate pair" if "hex escape" in str(error) else ""
                raise Problem(f"the body is not JSON: {error}{half}") from None
            if payload.model_extra:
                log_ignored(context.ignored, request.url.path, find_ignored_fields(payload))
            context.check_model(payload.model)
            given = {"request": request, "context": context}
            answer: BaseModel | Response = await endpoint(payload, **{one.name: given[one.name] for one in others})
            if isinstance(answer, BaseModel):
                return Response(answer.model_dump_json(), media_type="application/json")
            return answer

        return handle


def _report_invalid(error: ValidationError) -> Problem:
    """Reports an unsupported field, else the first invalid one; of a union's, the right type's that got furthest."""
    wrong = error.errors(include_url=False)
    first = max(wrong, key=lambda e: (e["type"] == "unsupported", not e["type"].endswith("_type"), len(e["loc"])))
    path = [str(part) for part in first["loc"] if _is_field(part)]
    if first["type"] == "extra_forbidden" and not _is_field(first["loc"][-1]):
        path.append(str(first["loc"][-1]))
    reason = _REASONS.get(first["type"], first["msg"])
    code = first.get("ctx", {}).get("code")
    return Problem(f"{'.'.join(path) or 'the body'}: {reason}", path[0] if path else None, code=code)


def _is_field(part: str | int) -> bool:
    """Whether `part` is a field name or index, not pydantic's name of a union alternative."""
    return isinstance(part, int) or (part.islower() and part.isidentifier() and part not in _UNION_ALTERNATIVES)


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Problem("content-type is not JSON; expected application/json", status=415)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Problem(
            f"the body is compressed ({coding[:40]}), which is not supported; send it uncompressed",
            status=415,
            code="request_body_encoding_unsupported",
        )


async def _read_body(request: Request, max_mb: int) -> bytearray:
    """Reads the whole body within a time limit.

    Raises:
        Problem: it is too large, or late.
        ClientDisconnect: the client left.
    """
    too_large = Problem(f"the body is larger than {max_mb} MB (--max-body-mb)", status=413)
    stated, most, body = request.headers.get("content-length", ""), max_mb * 2**20, bytearray()
    if stated.isdigit() and int(stated) > most:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for data in request.stream():
                body += data
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Problem(f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} s", status=408) from None
    return body


def find_ignored_fields(payload: ApiRequest) -> list[str]:
    """Returns the names of unknown fields, which are ignored, cut at `_MAX_NAME`: comparing 30 MB takes ten seconds.

    Raises:
        Problem: one must not be ignored.
    """
    names = [
        name[:_MAX_NAME]
        for name, value in (payload.model_extra or {}).items()
        if name not in _IGNORED_FIELDS and value not in (None, _NEUTRAL_VALUES.get(name))
    ]
    for name in names:
        snake = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()  # topP is top_p: clients in JavaScript write both
        if near := get_close_matches(snake, _effective_fields(type(payload)), 1, _MIN_SIMILARITY):
            raise Problem(f"{name}: no such field is known here; did you mean {near[0]}?", name)
        if snake in _OTHER_SERVERS_FIELDS or snake in _NEUTRAL_VALUES or snake in _fields_of_all_paths():
            raise Problem(f"{name}: this path does not support it, and ignoring it would change the answer", name)
    return names


def log_ignored(logged: set[str], path: str, names: list[str]) -> None:
    """Logs each name once, up to a number of names, which are then in `logged`."""
    for name in names:
        if name not in logged and len(logged) < _MAX_LOGGED_NAMES:
            logged.add(name)
            log.warning("ignored the unknown field %r of a request to %s", name, path)


@cache
def _effective_fields(shape: type[ApiRequest]) -> tuple[str, ...]:
    """Returns the fields of `shape` that affect the answer; refused ones have type Any."""
    return tuple(name for name, field in shape.model_fields.items() if field.annotation is not Any)


@cache
def _fields_of_all_paths() -> frozenset[str]:
    return frozenset(name for shape in _REQUEST_SCHEMAS for name in _effective_fields(shape))
