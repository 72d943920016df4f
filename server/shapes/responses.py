"""OpenAI's responses: POST /v1/responses. Nothing is stored, so each request has the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.shapes.base import (
    MAX_TOOLS,
    ApiResponse,
    CachedTokens,
    Generation,
    LooseShape,
    MaxTokens,
    Object,
    Outrider,
    ReasoningTokens,
    Speculation,
    Timings,
    absent,
    bounded,
)
from outrider.server.shapes.chat import SpelledToken


class Content(LooseShape):
    """A part of a message: input_text or output_text."""

    type: str
    text: str | None = None


class Item(LooseShape):
    """A message, a function call, its output, or earlier reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[Content], bounded()] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[Content], bounded()] | None = None


class FunctionTool(LooseShape):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FunctionChosen(LooseShape):
    type: Literal["function"]
    name: str


class FunctionsAllowed(LooseShape):
    """Limits calls to some functions; `mode` required: one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChosen], bounded(MAX_TOOLS, least=1)]


class Reasoning(LooseShape):
    effort: str | None = None


class ResponsesRequest(Generation):
    """An input to respond to."""

    input: str | Annotated[list[Item], bounded(least=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], bounded(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChosen | FunctionsAllowed | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MaxTokens | None = None
    text: Object | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Object | None = None
    speculation: Speculation | None = None
    include: Annotated[list[str], bounded(MAX_TOOLS)] | None = Field(
        None, description="message.output_text.logprobs; other values are ignored"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="inputs are never truncated: one that is too long is rejected, with auto too"
    )
    max_tool_calls: int | None = None
    # Ignored: they have no effect on the answer.
    metadata: Any = None
    store: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    stream_options: Any = None
    client_metadata: Any = None


class InputTokens(ApiResponse):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OutputText(ApiResponse):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Object] = Field(default_factory=list)
    logprobs: list[SpelledToken] | None = absent()


class OutputMessage(ApiResponse):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class OutputCall(ApiResponse):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningText(ApiResponse):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ApiResponse):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Object] = Field(default_factory=list)
    content: list[ReasoningText]
    status: str


Output = OutputMessage | OutputCall | OutputReasoning


class WrittenTokens(CachedTokens):
    """`cache_write_tokens`: tokens that were added to the prompt cache."""

    cache_write_tokens: int = 0


class ResponsesUsage(ApiResponse):
    input_tokens: int
    input_tokens_details: WrittenTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(ApiResponse):
    """The response and its status."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[Output]
    error: Object | None = None
    incomplete_details: Object | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | Object
    tools: list[Object]
    metadata: Object = Field(default_factory=dict)
    usage: ResponsesUsage | None = None
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()
