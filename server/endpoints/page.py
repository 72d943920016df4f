"""GET /: the live page, its files in /page/, and /docs, which shows /openapi.json as HTML.

The page is an ordinary client of the API. It needs no key to load, and its content security policy allows no other
host.
"""

from __future__ import annotations

from collections.abc import Mapping
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


_FOLDER = Path(__file__).parents[1]
files = _Files(directory=_FOLDER / "page")
router = APIRouter()


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return await files.get_response("index.html", request.scope)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Shows each path and method, and the fields of its body."""
    from jinja2 import ChainableUndefined, Environment  # deferred: few requests need it

    environment = Environment(autoescape=True, undefined=ChainableUndefined)
    template = environment.from_string((_FOLDER / "docs.html").read_text(encoding="utf-8"))
    body = template.render(request.app.openapi(), type_of=_type)
    return Response(body, headers=HEADERS, media_type="text/html; charset=utf-8")


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
