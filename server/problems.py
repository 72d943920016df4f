"""Errors as HTTP statuses and response bodies, in each API's format. No traceback is ever sent."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from outrider.protocol import errors
from outrider.protocol.process import current_request
from outrider.protocol.sampling import SamplingParams
from outrider.server.schemas import AnthropicError, AnthropicErrorBody, OpenAIError, OpenAIErrorBody

CLIENT_CLOSED_REQUEST = 499
"""The status recorded when the client disconnects before the response starts."""
RETRY_SECONDS = 1
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def is_anthropic(scope: Scope) -> bool:
    """Whether errors use Anthropic's format."""
    is_own_path = str(scope.get("path", "")).startswith(("/v1/messages", "/messages"))
    return is_own_path or b"anthropic-version" in dict(scope["headers"])


@dataclass(eq=False)
class Problem(errors.OutriderError):
    """An error. `param` is the field at fault, `code` a machine-readable kind (Anthropic: `error_code`).

    `methods`: those that the path supports.
    """

    message: str
    param: str | None = None
    status: int = 400
    code: str | None = None
    methods: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, anthropic: bool, request_id: str | None = None) -> bytes:
        """Returns the JSON body in one API's format. `request_id`: by default the current request's."""
        request_id = request_id or current_request.get() or ""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            details = {"error_code": self.code} if self.code is not None else None
            wrong = AnthropicError(type=kind, message=self.message, details=details)
            return AnthropicErrorBody(error=wrong, request_id=request_id).model_dump_json().encode()
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = OpenAIError(message=self.message, type=kind, param=self.param, code=self.code)
        return OpenAIErrorBody(error=error, request_id=request_id).model_dump_json().encode()

    def response(self, scope: Scope, request_id: str | None = None) -> Response:
        """Returns the response to a request, in the format of its API."""
        body = self.body(is_anthropic(scope), request_id)
        return Response(body, self.status, headers=self.headers, media_type="application/json")

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.methods is not None:
            return {"allow": self.methods}
        if self.status == 504:
            return {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients would generate the answer again
        return {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}


def to_problem(error: Exception) -> Problem:
    """Converts an exception. Unexpected ones become a generic message."""
    match error:
        case Problem():
            return error
        case ClientDisconnect():
            return Problem("the client has disconnected", status=CLIENT_CLOSED_REQUEST)
        case HTTPException(status_code=404):
            return Problem("no such path; /openapi.json lists them", status=404)
        case HTTPException(status_code=405, headers=headers):
            methods = (headers or {}).get("Allow", "GET")  # static files have none
            methods = "GET, HEAD" if methods == "GET" else methods
            return Problem(f"this path does not support this method; expected {methods}", status=405, methods=methods)
        case errors.ServerBusy():
            return Problem(str(error), status=429, code="rate_limit_exceeded")
        case errors.EndpointError() | errors.WorkerError():
            return Problem(str(error), status=503)
        case errors.UnknownDrafter():
            return Problem(str(error), "speculation")
        case errors.PromptTooLong():
            return Problem(str(error), code="context_length_exceeded")
        case errors.InvalidRequest() | errors.ModelError():
            first = str(error).partition(" ")[0]  # errors of a sampling parameter begin with its name
            return Problem(str(error), first if first in SamplingParams.__dataclass_fields__ else None)
        case errors.OutriderError():
            return Problem(str(error), status=500)
    return Problem("the server failed to answer this request; see its log", status=500)
