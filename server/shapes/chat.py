"""OpenAI's chat and text completions, and the bodies of /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.shapes.base import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    ApiRequest,
    ApiResponse,
    LooseShape,
    MaxTokens,
    Object,
    Outrider,
    Sampling,
    Speculated,
    StrictShape,
    Timings,
    Usage,
    absent,
    bounded,
)

Finish = Literal["stop", "length", "tool_calls"]


class Part(LooseShape):
    """A part of a message. Only text is supported; images, audio and files are rejected."""

    type: str
    text: str | None = None


class FunctionCalled(LooseShape):
    name: str
    arguments: str | Object = "{}"


class ToolCalled(LooseShape):
    id: str | None = None
    type: str | None = None
    function: FunctionCalled


class ChatMessage(LooseShape):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], bounded()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCalled], bounded(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="vLLM's name of reasoning_content")


class Function(LooseShape):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(LooseShape):
    type: str
    function: Function | None = None


class Named(StrictShape):
    name: str


class ToolChosen(LooseShape):
    """Requires a call of one function."""

    type: Literal["function"]
    function: Named


class ToolAllowed(LooseShape):
    type: Literal["function"] = "function"
    function: Named


class Allowed(StrictShape):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolAllowed], bounded(MAX_TOOLS, least=1)]


class ToolsAllowed(LooseShape):
    """Limits calls to some functions; `mode` required: one of them must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatRequest(Sampling):
    """A chat completion."""

    messages: Annotated[list[ChatMessage], bounded(least=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChosen | ToolsAllowed | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: Annotated[list[str], bounded(MAX_STOPS)] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None


class FunctionOut(ApiResponse):
    name: str
    arguments: str


class ToolCallOut(ApiResponse):
    id: str
    type: Literal["function"] = "function"
    function: FunctionOut


class ToolCallDelta(ToolCallOut):
    index: int


class AnswerMessage(ApiResponse):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = absent()
    tool_calls: list[ToolCallOut] | None = absent()


class LikelyToken(ApiResponse):
    """A token's text and bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class SpelledToken(LikelyToken):
    """A generated token, and the likeliest at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(ApiResponse):
    content: list[SpelledToken]
    refusal: None = None


class ChatChoice(ApiResponse):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    speculation: Speculated | None = absent()


class ChatCompletion(ApiResponse):
    """The full response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    outrider: Outrider


class Delta(ApiResponse):
    """New content; empty fields are omitted."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    reasoning_content: str | None = absent()
    tool_calls: list[ToolCallDelta] | None = absent()


class ChunkChoice(ApiResponse):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    speculation: Speculated | None = absent()


class ChatChunk(ApiResponse):
    """An event of a stream. A choice's last event has timings; usage, if requested, has an event without choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = absent()
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()


Tokens = Annotated[list[int], bounded(MAX_TOKENS, least=1)]


class CompletionRequest(Sampling):
    """A completion of texts or token ids. No chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], bounded(MAX_CHOICES, least=1)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="vLLM's: return token ids")


class CompletionLogprobs(ApiResponse):
    """For each token: text, log-probability, the likeliest at its position by text, and its text's offset."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ApiResponse):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = absent()
    speculation: Speculated | None = absent()


class Completion(ApiResponse):
    """The full response, and each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = absent()
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()


class TokenizeRequest(ApiRequest):
    """`content` (llama.cpp) or `prompt` (vLLM) is a text; `messages` is a conversation."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], bounded()] | None = None
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = Field(False, description="vLLM's: return each token's text")
    with_pieces: bool = Field(False, description="llama.cpp's: return tokens as objects with id and piece")
    add_special: bool = Field(True, description="add the tokenizer's special tokens")
    add_special_tokens: bool | None = None


class TemplateRequest(ApiRequest):
    """A conversation, as in /v1/chat/completions."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], bounded(least=1)]
    tools: Annotated[list[Tool], bounded(MAX_TOOLS)] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(ApiRequest):
    model: str | None = None
    tokens: Annotated[list[int], bounded(MAX_TOKENS)]
