"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.server.shapes.base import (
    MAX_TOOLS,
    ApiRequest,
    ApiResponse,
    LooseShape,
    MaxTokens,
    Object,
    Outrider,
    Seed,
    Speculation,
    Stops,
    Temperature,
    Timeout,
    Timings,
    TopK,
    TopP,
    absent,
    bounded,
)


class Block(LooseShape):
    """A content block: text, thinking, tool_use or tool_result. Images and documents are rejected."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], bounded()] | None = None
    is_error: bool | None = None


class Turn(LooseShape):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], bounded()]


class ClientTool(LooseShape):
    """A tool that the client runs; `input_schema` is a JSON schema. Anthropic's own tools are rejected."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Object | None = None
    strict: bool | None = None


class ToolChoice(LooseShape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(LooseShape):
    type: str


class CountTokensRequest(ApiRequest):
    """The fields that become the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], bounded(least=1)]
    system: str | Annotated[list[Block], bounded()] | None = None
    tools: Annotated[list[ClientTool], bounded(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Object | None = None
    mcp_servers: Any = None
    output_config: Object | None = None
    output_format: Object | None = None
    thread: Any = None
    compaction: Any = None
    # Ignored: they have no effect on the answer.
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None
    fallbacks: Any = None


class MessagesRequest(CountTokensRequest):
    """A conversation to answer in at most `max_tokens`."""

    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    speculation: Speculation | None = None
    timeout: Timeout | None = None
    # Ignored as well.
    metadata: Any = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None


class TextBlock(ApiResponse):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(ApiResponse):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(ApiResponse):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Object


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(ApiResponse):
    """Token counts. `input_tokens` excludes tokens from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageAnswer(ApiResponse):
    """The full response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()


class TokenCount(ApiResponse):
    input_tokens: int
