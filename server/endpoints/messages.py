"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import AliasChoices, AliasPath, BaseModel, Field, model_validator
from starlette.responses import Response

from outrider.orchestrator.pairing.detokenizer import TextStream
from outrider.protocol.sampling import MAX_COUNT
from outrider.server import mapping, schemas
from outrider.server.answers.choices import (
    AnswerPlan,
    ChoiceState,
    Part,
    PartUpdate,
    TextPart,
    ThinkingPart,
    plan_answer,
)
from outrider.server.answers.formatter import BlockFormatter, build_statistics, event, typed_event
from outrider.server.endpoints.json_route import JsonRoute, response_docs
from outrider.server.model.served import ServedModel, TemplateInput, Toolbox
from outrider.server.model.tool_format import ToolCall, add_turn
from outrider.server.problems import Problem
from outrider.server.server_context import ContextDependency

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_STOP_REASONS: dict[str, StopReason] = {"tool": "tool_use", "length": "max_tokens"}
_BILLING_LABEL = "x-anthropic-billing-header:"
_SIGNATURE = "outrider"
"""Ends every thinking block. Nothing verifies it, but clients don't send thinking without a signature back."""
_BLOCKS_WITHOUT_TEXT = ("tool_result", "tool_use", "thinking", "redacted_thinking", "tool_addition", "tool_removal")
_TOOL_CHOICE_KINDS: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


class ClientTool(schemas.Function):
    """A tool that the client runs; `input_schema` is a JSON schema. Anthropic's own tools are rejected."""

    name: schemas.Name = Field(validation_alias=AliasChoices("name", "mcp_server_name"))
    type: str | None = None
    defer_loading: bool | None = Field(None, description="hide it until a tool_reference or tool_addition names it")
    parameters: schemas.JsonObject | None = Field(None, alias="input_schema")


class Block(schemas.ContentPart):
    """A block: text, thinking, or a tool's use, result, reference, addition or removal. Images are rejected."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: schemas.JsonObject | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], schemas.bounded()] | None = None
    tool: ClientTool | None = Field(default=None, validation_alias=AliasPath("tool", "definition"))
    tool_name: str | None = Field(default=None, validation_alias=AliasChoices("tool_name", AliasPath("tool", "name")))

    @model_validator(mode="after")
    def _put_reference_into_words(self) -> Self:
        if self.type == "tool_reference":
            self.type, self.text = "text", f"The tool {self.tool_name} can be called now."
        return self


class OutputConfig(schemas.LooseSchema):
    effort: str | None = None
    format: schemas.JsonObject | None = None


class Turn(schemas.LooseSchema):
    """A message. A system turn may have an effort instead of `content`; it holds until a later turn changes it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], schemas.bounded()] | None = None
    output_config: OutputConfig | None = None
    clear_at: Literal["next_user_message", "never"] | None = Field(None, description="when a system turn is left out")


class ToolChoice(schemas.LooseSchema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(schemas.LooseSchema):
    type: Literal["enabled", "adaptive", "disabled"]


class CountTokensRequest(schemas.ApiRequest):
    """The fields that become the prompt."""

    messages: Annotated[list[Turn], schemas.bounded(least=1)]
    system: str | Annotated[list[Block], schemas.bounded()] | None = None
    tools: Annotated[list[ClientTool], schemas.bounded(schemas.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: schemas.JsonObject | None = None
    mcp_servers: Annotated[Any, schemas.unsupported("MCP servers are not called here; expected client tools")] = None
    output_config: OutputConfig | None = None
    output_format: schemas.JsonObject | None = None
    thread: Annotated[
        Any,
        schemas.unsupported(
            "conversations are not stored; send all messages, without thread", "thread_unsupported_request"
        ),
    ] = None
    compaction: Annotated[Any, schemas.unsupported("conversations are not shortened; leave it out")] = None


class MessagesRequest(CountTokensRequest, schemas.Generation):
    """A conversation to answer in at most `max_tokens`; with 0 the prompt is read into the prompt cache."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    stop_sequences: schemas.Stops | None = None


class TextBlock(schemas.ApiResponse):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(schemas.ApiResponse):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(schemas.ApiResponse):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: schemas.JsonObject


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(schemas.ApiResponse):
    """Token counts. `input_tokens` excludes tokens from the cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: dict[Literal["thinking_tokens"], int] | None = schemas.omit_if_none()
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageAnswer(schemas.ApiResponse):
    """The full response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    timings: schemas.Timings | None = schemas.omit_if_none()
    outrider: schemas.Outrider | None = schemas.omit_if_none()


class TokenCount(schemas.ApiResponse):
    input_tokens: int


class MessageFormatter(BlockFormatter):
    """Formats a message.

    A stream is message_start, content blocks, message_delta with the stop reason and usage, and message_stop.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        super().__init__(plan)
        self._common: dict[str, Any] = {"id": f"msg_{secrets.token_hex(12)}", "model": plan.model.id}

    def format_response(self) -> MessageAnswer:
        (choice,) = self.plan.choices
        content = [_to_block(part) for part in choice.parts]
        return MessageAnswer(**self._common, content=content, **self._reason(choice), **self._numbers(choice))

    def begin(self) -> bytes:
        used = MessagesUsage(input_tokens=self.plan.prompt_tokens, output_tokens=0)
        return typed_event("message_start", message=MessageAnswer(**self._common, content=[], usage=used))

    def end(self) -> bytes:
        return typed_event("message_stop")

    def format_error(self, problem: Problem) -> bytes:
        return event(problem.body(anthropic=True), "error")

    def _keep_alive(self, note: str) -> bytes:
        return typed_event("ping")

    def _format_choice_end(self, choice: ChoiceState) -> bytes:
        return self._end_block() + typed_event("message_delta", delta=self._reason(choice), **self._numbers(choice))

    def _format_block_start(self, part: Part) -> bytes:
        return typed_event("content_block_start", index=self._at, content_block=_to_block(part, begun=True))

    def _format_block_delta(self, update: PartUpdate) -> bytes:
        return typed_event("content_block_delta", index=self._at, delta=_convert_delta(update.part))

    def _format_block_end(self, part: Part, status: str) -> bytes:
        """Ends the block; thinking ends with its signature."""
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        signature = isinstance(part, ThinkingPart) and typed_event("content_block_delta", index=self._at, delta=signed)
        return (signature or b"") + typed_event("content_block_stop", index=self._at)

    def _reason(self, choice: ChoiceState) -> dict[str, Any]:
        stop = find_stop_sequence(self.plan.model, choice) if choice.finish == "stop" else None
        reason = "stop_sequence" if stop is not None else _STOP_REASONS.get(choice.finish, "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _numbers(self, choice: ChoiceState) -> dict[str, Any]:
        held = choice.result.timings.cache_n
        used = MessagesUsage(
            input_tokens=self.plan.prompt_tokens - held,
            output_tokens=len(choice.tokens),
            output_tokens_details={"thinking_tokens": self._count_reasoning_tokens()},
            cache_read_input_tokens=held,
        )
        return {"usage": used, **build_statistics([choice])}


def _convert_delta(part: Part) -> dict[str, str]:
    match part:
        case TextPart(text=text):
            return {"type": "text_delta", "text": text}
        case ThinkingPart(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCall(arguments=arguments):
            return {"type": "input_json_delta", "partial_json": arguments}


def _to_block(part: Part, begun: bool = False) -> AnswerBlock:
    """Converts a part to a block. `begun`: without its content, which follows."""
    match part:
        case TextPart(text=text):
            return TextBlock(text="" if begun else text)
        case ThinkingPart(text=text):
            return ThinkingBlock(thinking="" if begun else text, signature="" if begun else _SIGNATURE)
        case ToolCall(name=name, arguments=arguments, id=own):
            given = {} if begun else mapping.parse_arguments(arguments)
            return ToolUseBlock(id=own or f"toolu_{secrets.token_hex(12)}", name=name, input=given)


def find_stop_sequence(model: ServedModel, choice: ChoiceState) -> str | None:
    """Returns the stop string that occurs first in the choice's text, or None."""
    ends = model.codec.end_tokens(choice.sampling)
    stream = TextStream(model.codec.spelling, choice.prompt.tokens, (), ends)
    text = stream.feed(choice.tokens).text + stream.finish().text
    found = [(place, stop) for stop in choice.sampling.stop if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def get_output_format(payload: CountTokensRequest) -> mapping.OutputFormat | None:
    """Returns the format of `output_config.format`, or of the older `output_format`. Raises Problem."""
    if payload.output_format is not None:
        return mapping.parse_output_format(payload.output_format, "output_format")
    return mapping.parse_output_format((payload.output_config or OutputConfig()).format, "output_config.format")


def _select_tools(model: ServedModel, payload: CountTokensRequest) -> Toolbox:
    tools = payload.tools or []
    known = {tool.name: tool for tool in tools}
    if len(known) < len(tools):
        raise Problem("tools: two have the same name; expected different names", "tools")
    offered = {tool.name: tool for tool in tools if not tool.defer_loading}  # first: the prompt cache has them
    blocks = [block for turn in payload.messages if isinstance(turn.content, list) for block in turn.content]
    for outer in blocks:
        for block in [outer, *(outer.content if isinstance(outer.content, list) else [])]:
            if block.type == "tool_removal":
                offered.pop(block.tool_name or "", None)
            elif (tool := block.tool or known.get(block.tool_name or "")) is not None:
                offered[tool.name] = known[tool.name] = tool
    for tool in offered.values():
        if tool.type not in (None, "custom"):
            raise Problem(f"tools: {schemas.CLIENT_TOOLS.format(given=repr(tool.type[:40]))}", "tools")
    return mapping.select_tools(model, list(offered.values()), _tool_choice(payload))


def _tool_choice(payload: CountTokensRequest) -> mapping.ToolSelection:
    choice = payload.tool_choice
    if choice is None:
        return mapping.ToolSelection()
    if choice.type != "tool":
        return mapping.ToolSelection(_TOOL_CHOICE_KINDS[choice.type], single=bool(choice.disable_parallel_tool_use))
    if choice.name is None:
        raise Problem("tool_choice: type tool needs the tool's name", "tool_choice")
    return mapping.ToolSelection("required", (choice.name,), single=True)


def to_conversation(model: ServedModel, payload: CountTokensRequest) -> TemplateInput:
    """Converts a request to a template's input. A final assistant turn is continued, as in Anthropic's API."""
    box = _select_tools(model, payload)
    messages: list[Mapping[str, Any]] = []
    # Claude Code's label differs for each request and would defeat the prompt cache.
    given = payload.system
    if isinstance(given, list):
        given = [block for block in given if not (block.text or "").startswith(_BILLING_LABEL)]
    if system := mapping.join_text(given, "system"):
        messages.append({"role": "system", "content": system})
    last_user = max((place for place, turn in enumerate(payload.messages) if turn.role == "user"), default=0)
    for place, turn in enumerate(payload.messages):
        if turn.role == "system" and turn.clear_at == "next_user_message" and place < last_user:
            continue
        for message in _convert_turn(turn, f"messages.{place}.content"):
            add_turn(messages, message)
    configs = [payload.output_config, *(turn.output_config for turn in payload.messages)]
    efforts = [config.effort for config in configs if config is not None and config.effort is not None]
    keywords = mapping.template_keywords(
        payload.chat_template_kwargs,
        enable_thinking=payload.thinking.type != "disabled" if payload.thinking is not None else None,
        reasoning_effort=efforts[-1] if efforts else None,
    )
    last = messages[-1] if messages else {}
    continue_final = last.get("role") == "assistant" and not last.get("tool_calls") and bool(last["content"])
    return TemplateInput(messages, box, keywords, continue_final=continue_final)


def _convert_turn(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """Converts one turn to messages. Tool results are messages of their own, before the user's text."""
    if turn.content is None and (turn.role != "system" or turn.output_config is None):
        raise Problem(f"{where}: Field required", where)
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content or []
    results = [block for block in blocks if block.type == "tool_result"]
    calls = [block for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    rest = [block for block in blocks if block.type not in _BLOCKS_WITHOUT_TEXT]
    for block in results:
        yield mapping.tool_result(mapping.join_text(block.content, where), block.tool_use_id or "", None)
    text = mapping.join_text(rest, where)
    if turn.role == "assistant":
        made = [mapping.past_tool_call(block.name or "", block.input or {}, block.id) for block in calls]
        yield mapping.assistant_message(text, made, "".join(thoughts))
    elif text or (turn.role == "user" and (rest or not blocks)):
        yield {"role": turn.role, "content": text}


router = APIRouter(route_class=JsonRoute)


@router.post("/messages", response_model=None, responses=response_docs(MessageAnswer, streams=True, anthropic=True))
async def answer(payload: MessagesRequest, request: Request, context: ContextDependency) -> BaseModel | Response:
    """Generates an answer to a conversation."""
    source, form = to_conversation(context.model, payload), get_output_format(payload)
    stops, most = payload.stop_sequences, payload.max_tokens
    plan = await asyncio.to_thread(plan_answer, context.model, payload, source, form, stops, most or 1)
    plan.choices[0].finish = "" if most else "length"  # the token after the prompt is ignored
    return await context.respond(request, MessageFormatter(plan), payload.stream)


@router.post("/messages/count_tokens", response_model=None, responses=response_docs(TokenCount, anthropic=True))
async def count(payload: CountTokensRequest, context: ContextDependency) -> TokenCount:
    """Counts the tokens of a conversation."""
    return TokenCount(input_tokens=await context.count_tokens(to_conversation(context.model, payload)))
