"""Small paths: GET /health, /ready, /version, /metrics and /v1/models; POST /tokenize, /detokenize and
/apply-template.

GET /health, /ready, /version and /metrics.

POST /tokenize, /detokenize and /apply-template, in llama.cpp's fields and in vLLM's.

GET /v1/models, and what is asked for beside a model of text and is not there.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats
from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.endpoints import chat
from outrider.server.endpoints.described import described, problems, typed
from outrider.server.mapping.speech import ToolSelection, toolbox
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.problems import Refused
from outrider.server.server_context import ServerContext, TheServer, as_json
from outrider.server.shapes.chat import ChatMessage
from outrider.server.shapes.plain import (
    Applied,
    Detokenized,
    DetokenizeRequest,
    Health,
    Model,
    Models,
    Piece,
    Ready,
    TemplateRequest,
    Tokenized,
    TokenizeRequest,
    Version,
)

router = APIRouter()


@router.get("/health", responses=problems())
async def health() -> Health:
    """This process lives."""
    return Health()


@router.get("/version", responses=problems())
async def version() -> Version:
    """Outrider's own."""
    return Version(version=PACKAGE_VERSION)


@router.get("/ready", responses={**problems(), 503: {"model": Ready}})
async def ready(context: TheServer, response: Response) -> Ready:
    """Whether requests are completed now: 200, or 503 with what is awaited."""
    stats = await _stats(context)
    if stats is None or context.draining:
        response.status_code = 503
        return Ready(status="unreachable" if stats is None else "ending")
    workers = {worker.name: worker.state for worker in stats.workers}
    is_ready = any(worker.role == "target" and worker.state == "ready" for worker in stats.workers)
    response.status_code = 200 if is_ready else 503
    return Ready(status="ready" if is_ready else "starting", workers=workers)


@router.get("/metrics", response_class=Response, responses={**problems(), 200: {"content": {"text/plain": {}}}})
async def metrics(context: TheServer) -> Response:
    """For Prometheus."""
    text = await asyncio.to_thread(context.metrics.text, await _stats(context))  # others have news to write meanwhile
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _stats(context: ServerContext) -> Stats | None:
    try:
        return await context.backend.stats()
    except OutriderError:
        return None


text_router = APIRouter(route_class=typed())


@text_router.post("/tokenize", response_model=None, responses=described(Tokenized))
async def tokenize(asked: TokenizeRequest, context: TheServer) -> Response:
    """The tokens of a text or of a conversation."""
    context.check_model(asked.model)
    return as_json(await asyncio.to_thread(_tokenized, asked, context.model))


@text_router.post("/apply-template", response_model=None, responses=described(Applied))
async def apply(asked: TemplateRequest, context: TheServer) -> Response:
    """The text that a conversation becomes."""
    context.check_model(asked.model)
    prompt = await context.prompt(_talk(asked, asked.messages, context.model))
    return as_json(Applied(prompt=await asyncio.to_thread(context.model.codec.decode, prompt.tokens)))


@text_router.post("/detokenize", response_model=None, responses=described(Detokenized))
async def detokenize(asked: DetokenizeRequest, context: TheServer) -> Response:
    """The text of tokens, special ones spelled out."""
    context.check_model(asked.model)
    size = context.model.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    wrong = next((token for token in asked.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise Refused(f"tokens: {wrong} is not a token id; expected ids from 0 to {size - 1}", "tokens")
    text = await asyncio.to_thread(context.model.codec.decode, tuple(asked.tokens))
    return as_json(Detokenized(content=text, prompt=text))


def _tokenized(asked: TokenizeRequest, model: ServedModel) -> Tokenized:
    tokens = list(_tokens(asked, model))
    spelled = [model.codec.spelling.of(token) for token in tokens]
    return Tokenized(
        tokens=list(map(_piece, tokens, spelled)) if asked.with_pieces else tokens,
        count=len(tokens),
        max_model_len=model.context_length,
        token_strs=[one.decode(errors="replace") for one in spelled] if asked.return_token_strs else None,
    )


def _tokens(asked: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    given = [one for one in (asked.content, asked.prompt, asked.messages) if one is not None]
    if len(given) != 1:
        raise Refused("expected exactly one of content, prompt and messages")
    if asked.messages is not None:
        return model.prompt(_talk(asked, asked.messages, model)).tokens
    special = asked.add_special if asked.add_special_tokens is None else asked.add_special_tokens
    return model.tokens(str(given[0]), special)


def _talk(asked: TokenizeRequest | TemplateRequest, said: list[ChatMessage], model: ServedModel) -> TemplateInput:
    if asked.continue_final_message:
        chat.check_own_turn(said)
    return TemplateInput(
        chat.messages(said),
        toolbox(model, chat.tools(asked.tools), ToolSelection()).tools,
        asked.chat_template_kwargs or {},
        answer=asked.add_generation_prompt,
        go_on=asked.continue_final_message,
    )


def _piece(token: int, spelled: bytes) -> Piece:
    try:
        return Piece(id=token, piece=spelled.decode())
    except UnicodeDecodeError:
        return Piece(id=token, piece=list(spelled))


models_router = APIRouter()


@models_router.get("/models", responses=problems())
async def models(context: TheServer) -> Models:
    """The model that is served, by each of its names."""
    names = context.model.names
    return Models(data=[_model(context, name) for name in names], first_id=names[0], last_id=names[-1])


@models_router.get("/models/{name:path}", responses=problems())
async def model(name: str, context: TheServer) -> Model:
    """One name's."""
    context.check_model(name)
    return _model(context, name)


@models_router.post("/embeddings", include_in_schema=False)
async def embeddings(context: TheServer) -> Response:
    """Frameworks ask for them beside a chat model."""
    raise Refused(
        f"embeddings are not served here: {context.model.id} is a model that writes text, and Outrider has none that"
        " makes embeddings; point the embeddings' base URL at a server that does",
        status=404,
    )


def _model(context: ServerContext, name: str) -> Model:
    made = context.model.loaded_at
    return Model(
        id=name,
        created=made,
        created_at=datetime.fromtimestamp(made, UTC).isoformat().replace("+00:00", "Z"),
        display_name=name,
        max_model_len=context.model.context_length,
        chat_template=context.model.template is not None,
        max_input_tokens=context.model.context_length,
        description=context.model.note or None,
    )
