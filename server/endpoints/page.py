"""GET /: the live page, its files in /page/, and /docs, which shows /openapi.json as HTML.

The page is an ordinary client of the API. It needs no key to load, and its content security policy allows no other
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated by ETag, so that a new version shows at once
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


files = _Files(directory=Path(__file__).parents[1] / "page")
router = APIRouter()


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return await files.get_response("index.html", request.scope)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    body = "".join(_reference(request.app.openapi()))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Outrider: paths and fields</title>'
    return Response(f"{head}{body}</html>", headers=HEADERS, media_type="text/html; charset=utf-8")


def _reference(described: Mapping[str, Any]) -> Iterator[str]:
    """Yields a heading for each path and method, and a table of the body's fields."""
    yield f"<h1>{escape(described['info']['title'])} {escape(described['info']['version'])}</h1>"
    yield '<p>The same for programs: <a href="openapi.json">/openapi.json</a></p>'
    shapes = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            shape = shapes.get(str(body.get("$ref", "")).rpartition("/")[2])
            if shape is not None:
                yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
                needed = shape.get("required", ())
                for name, field in shape["properties"].items():
                    note = f"{'required; ' if name in needed else ''}{field.get('description', '')}".removesuffix("; ")
                    yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
                    yield f"<td>{escape(note)}</td></tr>"
                yield "</table>"


def _type(field: Mapping[str, Any]) -> str:
    """Describes a field's type briefly."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"] if one.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    values = field.get("enum", [field["const"]] if "const" in field else [])
    bounds = [f"{word} {field[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in field]
    return " or ".join(map(str, values)) or " ".join([str(field.get("type", "anything")), *bounds])
