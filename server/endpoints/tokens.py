"""POST /tokenize and /detokenize, in llama.cpp's fields and in vLLM's."""

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
from outrider.server.shapes.plain import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

router = APIRouter(route_class=typed())


@router.post("/tokenize", response_model=None, responses=described(Tokenized))
async def tokenize(asked: TokenizeRequest, desk: TheDesk) -> Response:
    """The tokens of a text or of a conversation."""
    desk.check_model(asked.model)
    tokens = await asyncio.to_thread(_tokens, asked, desk.model)
    return as_json(Tokenized(tokens=list(tokens), count=len(tokens), max_model_len=desk.model.context_length))


@router.post("/detokenize", response_model=None, responses=described(Detokenized))
async def detokenize(asked: DetokenizeRequest, desk: TheDesk) -> Response:
    """The text of tokens, special ones spelled out."""
    desk.check_model(asked.model)
    size = desk.model.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    wrong = next((token for token in asked.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise Refused(f"tokens: {wrong} is no token; expected ids from 0 to {size - 1}", "tokens")
    text = await asyncio.to_thread(desk.model.codec.decode, tuple(asked.tokens))
    return as_json(Detokenized(content=text, prompt=text))


def _tokens(asked: TokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    given = [one for one in (asked.content, asked.prompt, asked.messages) if one is not None]
    if len(given) != 1:
        raise Refused("expected content, prompt or messages, and one of them only")
    if asked.messages is not None:
        box = toolbox(model, chat.tools(asked.tools), Choice())
        keywords = asked.chat_template_kwargs or {}
        talk = Conversation(chat.messages(asked.messages), box.tools, keywords, answer=asked.add_generation_prompt)
        return model.prompt(talk).tokens
    special = asked.add_special if asked.add_special_tokens is None else asked.add_special_tokens
    return model.tokens(str(given[0]), special)
