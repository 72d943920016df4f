"""The small paths: models, tokens, health, and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outrider.server.shapes.base import MOST_TOKENS, MOST_TOOLS, ApiRequest, ApiResponse, Object, absent, many
from outrider.server.shapes.chat import ChatMessage, Tool


class Model(ApiResponse):
    """Has what OpenAI's and Anthropic's clients look for."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: str = "outrider"
    display_name: str
    lifecycle: Literal["active"] = "active"
    max_model_len: int | None
    chat_template: bool
    max_input_tokens: int | None = Field(description="the same, as Anthropic calls it")
    description: str | None = absent()


class Models(ApiResponse):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenizeRequest(ApiRequest):
    """`content` (llama.cpp's) and `prompt` (vLLM's) are a text; `messages` a conversation."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], many()] | None = None
    tools: Annotated[list[Tool], many(MOST_TOOLS)] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = Field(False, description="vLLM's: each token's text, too")
    with_pieces: bool = Field(False, description="llama.cpp's: tokens as objects with id and piece")
    add_special: bool = Field(True, description="what the tokenizer puts around a text")
    add_special_tokens: bool | None = None


class Piece(ApiResponse):
    """A token, and what it adds to a text: bytes where that is no text by itself."""

    id: int
    piece: str | list[int]


class Tokenized(ApiResponse):
    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = absent()


class TemplateRequest(ApiRequest):
    """A conversation, as /v1/chat/completions takes it."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], many(least=1)]
    tools: Annotated[list[Tool], many(MOST_TOOLS)] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Applied(ApiResponse):
    """The text that the model reads."""

    prompt: str


class DetokenizeRequest(ApiRequest):
    model: str | None = None
    tokens: Annotated[list[int], many(MOST_TOKENS)]


class Detokenized(ApiResponse):
    """The same text in llama.cpp's field and in vLLM's."""

    content: str
    prompt: str


class Health(ApiResponse):
    status: Literal["ok"] = "ok"


class Version(ApiResponse):
    version: str


class Ready(ApiResponse):
    """Whether requests are completed now; `workers` by name and state."""

    status: Literal["ready", "starting", "ending", "unreachable"]
    workers: dict[str, str] = Field(default_factory=dict)


class OpenAIError(ApiResponse):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIProblem(ApiResponse):
    """An error as OpenAI writes it."""

    error: OpenAIError
    request_id: str | None = absent()


class ErrorDetails(ApiResponse):
    """`error_code` is the kind, for programs."""

    error_code: str


class AnthropicError(ApiResponse):
    type: str
    message: str
    details: ErrorDetails | None = absent()


class AnthropicProblem(ApiResponse):
    """An error as Anthropic writes it."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str
