"""POST /tokenize, /detokenize and /apply-template, in llama.cpp's fields and in vLLM's."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from outrider.server.desk import TheDesk, as_json
from outrider.server.endpoints.described import described, typed
from outrider.server.mapping import chat
from outrider.server.mapping.toolbox import Choice, toolbox
from outrider.server.model.served import Conversation, ServedModel
from outrider.server.problems import Refused
from outrider.server.shapes.chat import ChatMessage
from outrider.server.shapes.plain import (
    Applied,
    Detokenized,
    DetokenizeRequest,
    Piece,
    TemplateRequest,
    Tokenized,
    TokenizeRequest,
)

router = APIRouter(route_class=typed())


@router.post("/tokenize", response_model=None, responses=described(Tokenized))
async def tokenize(asked: TokenizeRequest, desk: TheDesk) -> Response:
    """The tokens of a text or of a conversation."""
    desk.check_model(asked.model)
    return as_json(await asyncio.to_thread(_tokenized, asked, desk.model))


@router.post("/apply-template", response_model=None, responses=described(Applied))
async def apply(asked: TemplateRequest, desk: TheDesk) -> Response:
    """The text that a conversation becomes."""
    desk.check_model(asked.model)
    prompt = await desk.prompt(_talk(asked, asked.messages, desk.model))
    return as_json(Applied(prompt=await asyncio.to_thread(desk.model.codec.decode, prompt.tokens)))


@router.post("/detokenize", response_model=None, responses=described(Detokenized))
async def detokenize(asked: DetokenizeRequest, desk: TheDesk) -> Response:
    """The text of tokens, special ones spelled out."""
    desk.check_model(asked.model)
    size = desk.model.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    wrong = next((token for token in asked.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise Refused(f"tokens: {wrong} is not a token id; expected ids from 0 to {size - 1}", "tokens")
    text = await asyncio.to_thread(desk.model.codec.decode, tuple(asked.tokens))
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


def _talk(asked: TokenizeRequest | TemplateRequest, said: list[ChatMessage], model: ServedModel) -> Conversation:
    if asked.continue_final_message:
        chat.check_own_turn(said)
    return Conversation(
        chat.messages(said),
        toolbox(model, chat.tools(asked.tools), Choice()).tools,
        asked.chat_template_kwargs or {},
        answer=asked.add_generation_prompt,
        go_on=asked.continue_final_message,
    )


def _piece(token: int, spelled: bytes) -> Piece:
    try:
        return Piece(id=token, piece=spelled.decode())
    except UnicodeDecodeError:
        return Piece(id=token, piece=list(spelled))
