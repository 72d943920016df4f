"""GET /, the live page, and /page/..., the plain files that it is made of.

The page is a client of the API like any other and is open without a key, for it has none; it asks nobody else, and its
policy lets it load nothing from anywhere.
"""

from __future__ import annotations

from pathlib import Path

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
    "cache-control": "no-cache",  # asked for again, by its tag: a new version is seen at once
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
