"""POST /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from outrider.orchestrator.client.dialogue import Chunk
from outrider.protocol.sampling import MAX_LOGPROBS
from outrider.server import mapping, schemas
from outrider.server.answers.choices import AnswerPlan, ChoiceState, Part, TextPart, ThinkingPart, plan_answer
from outrider.server.answers.formatter import CompletionFormatter, report_speculation
from outrider.server.endpoints.json_route import JsonRoute, response_docs
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem
from outrider.server.server_context import ContextDependency

FinishReason = Literal["stop", "length", "tool_calls"]
_REASONS: dict[str, FinishReason] = {"length": "length", "tool": "tool_calls"}


class FunctionCall(schemas.LooseSchema):
    name: str
    arguments: str | schemas.JsonObject = "{}"


class MessageToolCall(schemas.LooseSchema):
    id: str | None = None
    function: FunctionCall


class ChatMessage(schemas.LooseSchema):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: schemas.Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], schemas.bounded(schemas.MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="vLLM's name for reasoning_content")
    prefix: bool | None = Field(None, description="Mistral's and DeepSeek's name for continue_final_message")


class Tool(schemas.LooseSchema):
    type: schemas.FunctionType
    function: schemas.Function


class NamedToolChoice(schemas.LooseSchema):
    """Names a function; as `tool_choice`, requires a call of it."""

    type: schemas.FunctionType = "function"
    function: schemas.Function


class AllowedTools(schemas.LooseSchema):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], schemas.bounded(schemas.MAX_TOOLS, least=1)]


class AllowedToolsChoice(schemas.LooseSchema):
    """Limits calls to some functions; `mode` required: one of them must be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ConversationRequest(schemas.ApiRequest):
    """The fields that become the prompt."""

    messages: Annotated[list[ChatMessage], schemas.bounded(least=1)] | None = None
    tools: Annotated[list[Tool], schemas.bounded(schemas.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: schemas.JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = Field(None, description="DashScope's field for this entry of chat_template_kwargs")


class ChatRequest(ConversationRequest, schemas.Sampling):
    """A chat completion."""

    messages: Annotated[list[ChatMessage], schemas.bounded(least=1)]
    max_completion_tokens: schemas.TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: Annotated[list[str], schemas.bounded(schemas.MAX_STOPS)] | None = None
    audio: Annotated[Any, schemas.unsupported("audio output is not supported")] = None
    functions: Annotated[Any, schemas.unsupported("it is deprecated; use tools")] = None
    function_call: Annotated[Any, schemas.unsupported("it is deprecated; use tool_choice")] = None
    web_search_options: Annotated[Any, schemas.unsupported("web search is not supported")] = None


class ToolCallOut(schemas.ApiResponse):
    """A call, with an index in a stream."""

    id: str
    type: Literal["function"] = "function"
    function: dict[Literal["name", "arguments"], str]
    index: int | None = schemas.omit_if_none()

    @classmethod
    def of(cls, call: ToolCall, index: int | None = None) -> Self:
        """Converts a call. Its id is the model's own, or a new one."""
        function: dict[Literal["name", "arguments"], str] = {"name": call.name, "arguments": call.arguments}
        return cls(id=call.id or f"call_{secrets.token_hex(12)}", function=function, index=index)


class AnswerMessage(schemas.ApiResponse):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = schemas.omit_if_none()
    tool_calls: list[ToolCallOut] | None = schemas.omit_if_none()


class ChatChoice(schemas.ApiResponse):
    index: int
    message: AnswerMessage
    logprobs: schemas.ChatLogprobs | None = None
    finish_reason: FinishReason
    speculation: schemas.SpeculationReport | None = schemas.omit_if_none()


class ChatCompletion(schemas.CompletionBase):
    """The full response."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: schemas.Usage
    timings: schemas.Timings
    outrider: schemas.Outrider


class Delta(schemas.ApiResponse):
    """New content; empty fields are omitted."""

    role: Literal["assistant"] | None = schemas.omit_if_none()
    content: str | None = schemas.omit_if_none()
    reasoning_content: str | None = schemas.omit_if_none()
    tool_calls: list[ToolCallOut] | None = schemas.omit_if_none()


class ChunkChoice(schemas.ApiResponse):
    index: int
    delta: Delta
    logprobs: schemas.ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    speculation: schemas.SpeculationReport | None = schemas.omit_if_none()


class ChatChunk(schemas.CompletionBase):
    """An event of a stream. A choice's last event has timings; usage, if requested, has an event without choices."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


class ChatFormatter(CompletionFormatter):
    """Formats chat completions. In a stream each choice starts with its role."""

    prefix = "chatcmpl"
    response = ChatCompletion
    chunk = ChatChunk

    def __init__(self, plan: AnswerPlan, payload: ChatRequest) -> None:
        super().__init__(plan, payload)
        self._calls = [0] * len(plan.choices)

    def begin(self) -> bytes:
        first = Delta(role="assistant", content="")
        return b"".join(self._event([ChunkChoice(index=n, delta=first)]) for n in range(len(self._calls)))

    def _format_choice(self, choice: ChoiceState) -> ChatChoice:
        message = AnswerMessage(
            content=choice.text if choice.text or not choice.calls else None,
            reasoning_content=choice.thought or None,
            tool_calls=list(map(ToolCallOut.of, choice.calls)) or None,
        )
        return ChatChoice(message=message, **self._fields(choice, choice.chunks, choice.finish))

    def _format_chunk_choice(
        self, choice: ChoiceState, part: Part | None, chunks: Sequence[Chunk] = (), finish: str | None = None
    ) -> ChunkChoice:
        return ChunkChoice(delta=self._delta(choice.index, part), **self._fields(choice, chunks, finish))

    def _delta(self, index: int, part: Part | None) -> Delta:
        match part:
            case TextPart(text=text):
                return Delta(content=text)
            case ThinkingPart(text=text):
                return Delta(reasoning_content=text)
            case ToolCall():
                self._calls[index] += 1
                return Delta(tool_calls=[ToolCallOut.of(part, self._calls[index] - 1)])
        return Delta()

    def _fields(self, choice: ChoiceState, chunks: Sequence[Chunk], finish: str | None) -> dict[str, Any]:
        """Returns the fields that whole and streamed choices share."""
        reason = _REASONS.get(finish, "stop") if finish is not None else None
        placed = self._logprobs[choice.index].format(chunks)
        logprobs = schemas.ChatLogprobs(content=[token.spelled for token in placed]) if placed else None
        speculation = report_speculation(chunks)
        return {"index": choice.index, "finish_reason": reason, "logprobs": logprobs, "speculation": speculation}


def _tool_choice(payload: ConversationRequest) -> mapping.ToolSelection:
    single = payload.parallel_tool_calls is False
    match payload.tool_choice:
        case "any":  # Mistral's name for required
            return mapping.ToolSelection("required", single=single)
        case None | str() as kind:
            return mapping.ToolSelection(kind or "auto", single=single)
        case NamedToolChoice(function=function):
            return mapping.ToolSelection("required", (function.name,), single=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            return mapping.ToolSelection(allowed.mode, tuple(tool.function.name for tool in allowed.tools), single)


def to_conversation(model: ServedModel, payload: ConversationRequest) -> TemplateInput:
    """Converts a request to a template's input. Raises Problem for unsupported content and tools."""
    messages = payload.messages or []
    continues = bool(payload.continue_final_message or (messages and messages[-1].prefix))
    if continues and payload.add_generation_prompt:
        raise Problem(
            "continue_final_message and add_generation_prompt can't be used together", "continue_final_message"
        )
    if continues and messages[-1].role != "assistant":
        raise Problem("continue_final_message: the last message is not the assistant's", "continue_final_message")
    named = payload.model_dump(include={"enable_thinking", "reasoning_effort"})
    return TemplateInput(
        messages=[_convert_message(message, f"messages.{place}.content") for place, message in enumerate(messages)],
        box=mapping.select_tools(model, [tool.function for tool in payload.tools or ()], _tool_choice(payload)),
        keywords=mapping.template_keywords(payload.chat_template_kwargs, **named),
        answer=payload.add_generation_prompt is not False,
        continue_final=continues,
    )


def _convert_message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = mapping.join_text(message.content, where) or message.refusal or ""
    if message.role == "assistant":
        calls = [mapping.past_tool_call(c.function.name, c.function.arguments, c.id) for c in message.tool_calls or ()]
        return mapping.assistant_message(content, calls, message.reasoning_content or message.reasoning or "")
    if message.role == "tool":
        return mapping.tool_result(content, message.tool_call_id or "", message.name)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


router = APIRouter(route_class=JsonRoute)


@router.post("/chat/completions", response_model=None, responses=response_docs(ChatCompletion, ChatChunk))
async def complete(payload: ChatRequest, request: Request, context: ContextDependency) -> BaseModel | Response:
    """Generates an answer to a conversation."""
    if payload.modalities is not None and payload.modalities != ["text"]:
        raise Problem("modalities: only text output is supported; expected ['text'], or leave it out", "modalities")
    if payload.top_logprobs and not payload.logprobs:
        raise Problem("top_logprobs needs logprobs: true", "top_logprobs")
    newer, older = payload.max_completion_tokens, payload.max_tokens
    if None not in (newer, older) and newer != older:
        raise Problem(f"max_tokens is {older} and max_completion_tokens {newer}; expected one of them", "max_tokens")
    most = older if newer is None else newer
    source, form, model = to_conversation(context.model, payload), mapping.get_output_format(payload), context.model
    logprobs = payload.top_logprobs or 0 if payload.logprobs else None
    plan = await asyncio.to_thread(
        plan_answer, model, payload, source, form, payload.stop, most, logprobs, payload.n or 1
    )
    return await context.respond(request, ChatFormatter(plan, payload), payload.stream)
