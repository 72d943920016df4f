"""GET /health, /ready, /version, /metrics and /v1/models; POST /tokenize, /detokenize and /apply-template.

/tokenize and /detokenize accept llama.cpp's and vLLM's fields.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import Response

from outrider import __version__
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats, is_serving
from outrider.server.endpoints.chat import ChatMessage, ConversationRequest, to_conversation
from outrider.server.endpoints.json_route import JsonRoute, error_docs, response_docs
from outrider.server.model.served import ServedModel
from outrider.server.model.tool_format import FALLBACK_NOTE
from outrider.server.problems import Problem
from outrider.server.schemas import MAX_TOKENS, ApiRequest, ApiResponse, bounded, omit_if_none
from outrider.server.server_context import ContextDependency, ServerContext


class TokenizeRequest(ConversationRequest):
    """`content` (llama.cpp) or `prompt` (vLLM) is a text; `messages` is a conversation."""

    content: str | None = None
    prompt: str | None = None
    return_token_strs: bool = Field(False, description="vLLM's: return each token's text")
    with_pieces: bool = Field(False, description="llama.cpp's: return tokens as objects with id and piece")
    add_special: bool = Field(True, description="add the tokenizer's special tokens")
    add_special_tokens: bool | None = None


class TemplateRequest(ConversationRequest):
    """A conversation, as in /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], bounded(least=1)]


class DetokenizeRequest(ApiRequest):
    tokens: Annotated[list[int], bounded(MAX_TOKENS)]


class Model(ApiResponse):
    """A model, with the fields that OpenAI's and Anthropic's clients expect."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: datetime
    owned_by: str = "outrider"
    display_name: str
    lifecycle: Literal["active"] = "active"
    max_model_len: int
    chat_template: bool
    max_input_tokens: int = Field(description="Anthropic's name for max_model_len")
    description: str | None = omit_if_none()


class ModelList(ApiResponse):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class Piece(ApiResponse):
    """A token and the text it adds, or its bytes if they are not text."""

    id: int
    piece: str | list[int]


class TokenizeResponse(ApiResponse):
    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = omit_if_none()


class TemplateResponse(ApiResponse):
    """The prompt that the model reads."""

    prompt: str


class DetokenizeResponse(ApiResponse):
    """The text, under llama.cpp's and vLLM's names."""

    content: str
    prompt: str


class Ready(ApiResponse):
    """Whether requests are admitted; `workers` has each worker's state by name."""

    status: Literal["ready", "starting", "ending", "unreachable"]
    workers: dict[str, str] = Field(default_factory=dict)


router = APIRouter()


@router.get("/health", responses=error_docs())
async def health() -> dict[Literal["status"], str]:
    """Reports that the HTTP process is alive."""
    return {"status": "ok"}


@router.get("/version", responses=error_docs())
async def version() -> dict[Literal["version"], str]:
    """Returns Outrider's version."""
    return {"version": __version__}


@router.get("/ready", responses={**error_docs(), 503: {"model": Ready}})
async def ready(context: ContextDependency, response: Response) -> Ready:
    """Returns 200 if requests are admitted, else 503 with the reason."""
    stats = await _fetch_stats(context)
    if stats is None or context.draining:
        response.status_code = 503
        return Ready(status="unreachable" if stats is None else "ending")
    is_ready = is_serving(stats.workers)
    response.status_code = 200 if is_ready else 503
    return Ready(status="ready" if is_ready else "starting", workers={one.name: one.state for one in stats.workers})


@router.get("/metrics", response_class=Response, responses={**error_docs(), 200: {"content": {"text/plain": {}}}})
async def metrics(context: ContextDependency) -> Response:
    """Returns metrics for Prometheus."""
    text = await asyncio.to_thread(context.metrics.text, await _fetch_stats(context))  # may take long
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _fetch_stats(context: ServerContext) -> Stats | None:
    try:
        return await context.backend.stats()
    except OutriderError:
        return None


text_router = APIRouter(route_class=JsonRoute)


@text_router.post("/tokenize", response_model=None, responses=response_docs(TokenizeResponse))
async def tokenize(payload: TokenizeRequest, context: ContextDependency) -> TokenizeResponse:
    """Tokenizes a text or a conversation."""
    return await asyncio.to_thread(_tokenize, payload, context.model)


@text_router.post("/apply-template", response_model=None, responses=response_docs(TemplateResponse))
async def apply(payload: TemplateRequest, context: ContextDependency) -> TemplateResponse:
    """Applies the chat template to a conversation."""
    prompt = await asyncio.to_thread(context.model.tokenize_conversation, to_conversation(context.model, payload))
    return TemplateResponse(prompt=context.model.codec.decode(prompt.tokens))


@text_router.post("/detokenize", response_model=None, responses=response_docs(DetokenizeResponse))
async def detokenize(payload: DetokenizeRequest, context: ContextDependency) -> DetokenizeResponse:
    """Decodes tokens; special tokens are spelled out."""
    size = context.model.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    wrong = next((token for token in payload.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise Problem(f"tokens: {wrong} is not a token id; expected ids from 0 to {size - 1}", "tokens")
    text = await asyncio.to_thread(context.model.codec.decode, tuple(payload.tokens))
    return DetokenizeResponse(content=text, prompt=text)


def _tokenize(payload: TokenizeRequest, model: ServedModel) -> TokenizeResponse:
    given = [one for one in (payload.content, payload.prompt, payload.messages) if one is not None]
    if len(given) != 1:
        raise Problem("expected exactly one of content, prompt and messages")
    if payload.messages is not None:
        tokens = list(model.tokenize_conversation(to_conversation(model, payload)).tokens)
    else:
        special = payload.add_special if payload.add_special_tokens is None else payload.add_special_tokens
        tokens = list(model.encode(str(given[0]), special))
    spelled = [model.codec.spelling.of(token) for token in tokens]
    return TokenizeResponse(
        tokens=list(map(_piece, tokens, spelled)) if payload.with_pieces else tokens,
        count=len(tokens),
        max_model_len=model.context_length,
        token_strs=[one.decode(errors="replace") for one in spelled] if payload.return_token_strs else None,
    )


def _piece(token: int, spelled: bytes) -> Piece:
    try:
        return Piece(id=token, piece=spelled.decode())
    except UnicodeDecodeError:
        return Piece(id=token, piece=list(spelled))


models_router = APIRouter()


@models_router.get("/models", responses=error_docs())
async def models(context: ContextDependency) -> ModelList:
    """Lists the served model under each of its names."""
    names = context.model.names
    return ModelList(data=[_describe_model(context, name) for name in names], first_id=names[0], last_id=names[-1])


@models_router.get("/models/{name:path}", responses=error_docs())
async def model(name: str, context: ContextDependency) -> Model:
    """Returns one model."""
    context.check_model(name)
    return _describe_model(context, name)


@models_router.post("/embeddings", include_in_schema=False)
async def embeddings(context: ContextDependency) -> Response:
    """Rejects embeddings, which frameworks request along with chat completions."""
    reason = f"embeddings are not supported: {context.model.id} generates text; use another server's base URL for them"
    raise Problem(reason, status=404)


@models_router.api_route("/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
@models_router.api_route("/chat/completions/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
@models_router.api_route("/conversations{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def stored_conversation() -> Response:
    """Rejects what needs an earlier answer or a stored conversation, such as reading one, and compaction."""
    raise Problem("nothing is stored or compacted here; send the whole conversation with each request", status=404)


def _describe_model(context: ServerContext, name: str) -> Model:
    return Model(
        id=name,
        created=context.model.loaded_at,
        created_at=datetime.fromtimestamp(context.model.loaded_at, UTC),
        display_name=name,
        max_model_len=context.model.context_length,
        chat_template=context.model.template is not None,
        max_input_tokens=context.model.context_length,
        description=FALLBACK_NOTE if context.model.tools_as_text else None,
    )
