"""OpenAI's chat completions and text completions: POST /v1/chat/completions and /v1/completions.

`Part`: OpenAI's chat completions: POST /v1/chat/completions.

`CompletionRequest`: OpenAI's text completions: POST /v1/completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.shapes.base import (
    MOST_CHOICES,
    MOST_STOPS,
    MOST_TOKENS,
    MOST_TOOLS,
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
    many,
)

Finish = Literal["stop", "length", "tool_calls"]


class Part(LooseShape):
    """A part of a message. Only text is read; images, sounds and files are refused."""

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
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], many()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCalled], many(MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same, as vLLM calls it now")


class Function(LooseShape):
    """What a model may call; `parameters` is a JSON schema."""

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
    """The one function that is to be called."""

    type: Literal["function"]
    function: Named


class ToolAllowed(LooseShape):
    type: Literal["function"] = "function"
    function: Named


class Allowed(StrictShape):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolAllowed], many(MOST_TOOLS, least=1)]


class ToolsAllowed(LooseShape):
    """Some of the functions; `mode`: whether one of them is to be called."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatRequest(Sampling):
    """A conversation that is to be answered."""

    messages: Annotated[list[ChatMessage], many(least=1)]
    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[Tool], many(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChosen | ToolsAllowed | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: Annotated[list[str], many(MOST_STOPS)] | None = None
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
    """A token's text, its bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class SpelledToken(LikelyToken):
    """One that was generated, and the likeliest of its place."""

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
    """The whole answer."""

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
    """What is new; only what there is of it is sent."""

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
    """An event of a stream. Timings come with a choice's end; usage, if wanted, in a last event without choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = absent()
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()


Tokens = Annotated[list[int], many(MOST_TOKENS, least=1)]


class CompletionRequest(Sampling):
    """Texts, or token ids, that are to be completed; no chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], many(MOST_CHOICES, least=1)]
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="vLLM's: tell what the text is of, too")


class CompletionLogprobs(ApiResponse):
    """Of each token: its text, the natural logarithm of its probability, the likeliest of its place by their texts, and
    where its text begins."""

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
    """The whole answer, and in the same shape each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = absent()
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()
