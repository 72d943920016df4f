"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses.

Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from outrider.orchestrator.pairing.chat_template import Message
from outrider.protocol.sampling import MAX_LOGPROBS
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
from outrider.server.answers.formatter import (
    BlockFormatter,
    PlacedToken,
    build_statistics,
    describe_schema_violations,
    typed_event,
)
from outrider.server.endpoints.json_route import JsonRoute, response_docs
from outrider.server.model.served import ServedModel, TemplateInput, Toolbox
from outrider.server.model.tool_format import ToolCall, add_turn
from outrider.server.problems import Problem
from outrider.server.server_context import ContextDependency

_INCLUDE_LOGPROBS, _INCLUDE_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_READABLE = "readable:"
"""Begins `encrypted_content`, before the reasoning. Content without it is another server's, and is left out."""


class Item(schemas.LooseSchema):
    """A message, a function call, its output, or earlier reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: schemas.Content | None = None
    summary: schemas.Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: schemas.Content | None = None
    encrypted_content: str | None = None


class FunctionTool(schemas.Function):
    """A function, or another tool, which is ignored and may have no name."""

    type: str
    name: Annotated[str, Field(max_length=schemas.MAX_NAME_LENGTH)] = ""


class FunctionChoice(schemas.LooseSchema):
    type: schemas.FunctionType
    name: str


class AllowedFunctionsChoice(schemas.LooseSchema):
    """Limits calls to some functions; `mode` required: one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], schemas.bounded(schemas.MAX_TOOLS, least=1)]


class Reasoning(schemas.LooseSchema):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(schemas.OpenAIGeneration):
    """An input to respond to."""

    input: str | Annotated[list[Item], schemas.bounded(least=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], schemas.bounded(schemas.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctionsChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: schemas.MaxTokens | None = None
    text: schemas.JsonObject | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: schemas.JsonObject | None = None
    metadata: Any = Field(None, description="an object that the response repeats")
    include: Annotated[list[str], schemas.bounded(schemas.MAX_TOOLS)] | None = Field(
        None, description=f"{_INCLUDE_LOGPROBS}, {_INCLUDE_REASONING}; other values are ignored"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    previous_response_id: Annotated[
        str | None, schemas.unsupported("responses are not stored; send the whole input", "previous_response_not_found")
    ] = None
    conversation: Annotated[Any, schemas.unsupported("conversations are not stored; send the whole input")] = None
    background: Annotated[bool | None, schemas.unsupported("no response runs in the background; leave it out")] = None
    prompt: Annotated[Any, schemas.unsupported("prompts are not stored; send instructions and input")] = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="inputs are never truncated; one that is too long is refused, also with auto"
    )


class InputTokens(schemas.ApiResponse):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OutputText(schemas.ApiResponse):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[schemas.JsonObject] = Field(default_factory=list)
    logprobs: list[schemas.ChatTokenLogprob] | None = schemas.omit_if_none()


class OutputMessage(schemas.ApiResponse):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class OutputCall(schemas.ApiResponse):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningText(schemas.ApiResponse):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputReasoning(schemas.ApiResponse):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = schemas.omit_if_none()
    status: str


Output = OutputMessage | OutputCall | OutputReasoning


class ResponsesUsage(schemas.ApiResponse):
    """Token counts. `cache_write_tokens` were added to the prompt cache."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(schemas.ApiResponse):
    """The response and its status."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[Output]
    error: schemas.JsonObject | None = None
    incomplete_details: schemas.JsonObject | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | schemas.JsonObject
    tools: list[schemas.JsonObject]
    metadata: schemas.JsonObject = Field(default_factory=dict)
    usage: ResponsesUsage | None = None
    timings: schemas.Timings | None = schemas.omit_if_none()
    outrider: schemas.Outrider | None = schemas.omit_if_none()


class ResponseFormatter(BlockFormatter):
    """Formats a response, and its stream of numbered events. `payload` has the fields that the response repeats.

    The output's items are messages, reasoning and calls. Each is in `_items` once it is complete.
    """

    def __init__(self, plan: AnswerPlan, payload: ResponsesRequest) -> None:
        super().__init__(plan)
        # Coding agents also offer tools that run at OpenAI.
        others = sorted({tool.type[:40] for tool in payload.tools or () if tool.type != "function"})
        self._notes = [f"tools: {', '.join(others)} ignored; only function tools are supported"] if others else []
        self._lists_logprobs = plan.choices[0].sampling.logprobs is not None
        self._seals = _INCLUDE_REASONING in (payload.include or ())
        self._summarizes = payload.reasoning is not None and payload.reasoning.summary is not None
        self._placed: deque[PlacedToken] = deque()
        self._number = -1
        self._items: list[Output] = []
        self._name = self._id = ""
        self._rows: list[schemas.ChatTokenLogprob] = []
        choice, sampling = payload.tool_choice, plan.choices[0].sampling
        self._common: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "created_at": plan.created,
            "model": plan.model.id,
            "instructions": payload.instructions,
            "max_output_tokens": payload.max_output_tokens,
            "parallel_tool_calls": payload.parallel_tool_calls is not False,
            "temperature": sampling.temp,
            "top_p": sampling.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            "tools": [tool.model_dump() for tool in payload.tools or () if tool.type == "function"],
            "metadata": payload.metadata if isinstance(payload.metadata, dict) else {},
        }

    def format_response(self) -> ResponseObject:
        (choice,) = self.plan.choices
        self._placed += self._logprobs[0].format(choice.chunks)
        for part in (parts := choice.parts):
            self._name = secrets.token_hex(12)
            self._rows = self._logprobs_of(part) if isinstance(part, TextPart) else []
            self._end_item(part, _status(choice) if part is parts[-1] else "completed")
        return self._build_final_response(choice)

    def begin(self) -> bytes:
        """Writes response.created and response.in_progress. The stream ends with response.completed or
        response.incomplete."""
        begun = self._build_response(status="in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _format_choice_end(self, choice: ChoiceState) -> bytes:
        before, answer = self._end_block(_status(choice)), self._build_final_response(choice)
        return before + self._event(f"response.{answer.status}", response=answer)

    def format_error(self, problem: Problem) -> bytes:
        """Writes response.failed."""
        error = {"code": problem.code if problem.status == 429 else "server_error", "message": problem.message}
        return self._event("response.failed", response=self._build_response(status="failed", error=error))

    def _build_response(self, **more: Any) -> ResponseObject:
        return ResponseObject(**self._common, output=self._items, **more)

    def _build_final_response(self, choice: ChoiceState) -> ResponseObject:
        plan, times, made = self.plan, choice.result.timings, len(choice.tokens)
        usage = ResponsesUsage(
            input_tokens=plan.prompt_tokens,
            input_tokens_details={"cached_tokens": times.cache_n, "cache_write_tokens": times.prompt_n},
            output_tokens=made,
            output_tokens_details={"reasoning_tokens": self._count_reasoning_tokens()},
            total_tokens=plan.prompt_tokens + made,
        )
        return self._build_response(
            status=_status(choice),
            incomplete_details={"reason": "max_output_tokens"} if choice.finish == "length" else None,
            usage=usage,
            **build_statistics([choice], [*self._notes, *describe_schema_violations(plan, [choice])]),
        )

    def _build_item(self, part: Part, status: str) -> Output:
        """Returns the current item, with a part as its content."""
        match part:
            case TextPart(text=text):
                content = OutputText(text=text, logprobs=self._rows if self._lists_logprobs else None)
                return OutputMessage(id=f"msg_{self._name}", status=status, content=[content])
            case ThinkingPart(text=text):
                sealed = _READABLE + text if self._seals else None
                written = ReasoningText(type="summary_text" if self._summarizes else "reasoning_text", text=text)
                item = OutputReasoning(id=f"rs_{self._name}", status=status, encrypted_content=sealed)
                return item.model_copy(update={self._event_names(part)[0]: [written]})
            case ToolCall(name=name, arguments=arguments, id=own):
                call_id = own or f"call_{self._name}"
                return OutputCall(id=f"fc_{self._name}", call_id=call_id, name=name, arguments=arguments, status=status)

    def _end_item(self, part: Part, status: str) -> Output:
        """Adds the current item to the output. A call is complete: one that was cut off is left out."""
        item = self._build_item(part, "completed" if isinstance(part, ToolCall) else status)
        self._items.append(item)
        return item

    def _logprobs_of(self, words: TextPart) -> list[schemas.ChatTokenLogprob]:
        """Returns the tokens that end in `words` or, completing no character, begin it. Earlier ones are dropped."""
        found = []
        while self._placed and self._placed[0].end <= words.at + len(words.text):
            one = self._placed.popleft()
            found += [one.spelled] if one.end > words.at or one.start == words.at else []
        return found

    def _format_block_start(self, part: Part) -> bytes:
        self._name, self._rows = secrets.token_hex(12), []
        added = "response.output_item.added"
        empty = replace(part, arguments="") if isinstance(part, ToolCall) else replace(part, text="")
        self._id = (item := self._build_item(empty, "in_progress")).id
        if isinstance(part, ToolCall):
            return self._event(added, output_index=self._at, item=item)
        field, kind, _ = self._event_names(part)
        before = self._event(added, output_index=self._at, item={**item.model_dump(), field: []})
        return before + self._item_event(f"{kind}.added", part=getattr(item, field)[0], **{f"{field}_index": 0})

    def _format_block_delta(self, update: PartUpdate) -> bytes:
        self._placed += self._logprobs[0].format(update.chunks)
        part, more = update.part, {}
        if isinstance(part, ToolCall):
            return self._item_event("function_call_arguments.delta", delta=part.arguments)
        if isinstance(part, TextPart):
            self._rows += (rows := self._logprobs_of(part))
            more["logprobs"] = rows
        field, _, kind = self._event_names(part)
        return self._item_event(f"{kind}.delta", delta=part.text, **{f"{field}_index": 0}, **more)

    def _format_block_end(self, part: Part, status: str) -> bytes:
        item = self._end_item(part, status)
        if isinstance(part, ToolCall):
            done = self._item_event("function_call_arguments.done", name=part.name, arguments=part.arguments)
        else:
            field, part_kind, text_kind = self._event_names(part)
            more = {"logprobs": self._rows} if isinstance(part, TextPart) else {}
            done = self._item_event(f"{text_kind}.done", text=part.text, **{f"{field}_index": 0}, **more)
            done += self._item_event(f"{part_kind}.done", part=getattr(item, field)[0], **{f"{field}_index": 0})
        return done + self._event("response.output_item.done", output_index=self._at, item=item)

    def _event_names(self, part: TextPart | ThinkingPart) -> tuple[str, str, str]:
        """Returns the field of an item that has this part's text, and the names of its events as a part and a text."""
        if isinstance(part, ThinkingPart) and self._summarizes:
            return "summary", "reasoning_summary_part", "reasoning_summary_text"
        return "content", "content_part", "output_text" if isinstance(part, TextPart) else "reasoning_text"

    def _item_event(self, kind: str, /, **fields: Any) -> bytes:
        """Returns an event of the current item."""
        return self._event(f"response.{kind}", item_id=self._id, output_index=self._at, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return typed_event(kind, sequence_number=self._number, **fields)


def _status(choice: ChoiceState) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def logprobs(payload: ResponsesRequest) -> int | None:
    """Returns the number of top log-probabilities; None: no log-probabilities at all."""
    return payload.top_logprobs or 0 if _INCLUDE_LOGPROBS in (payload.include or ()) else None


def _select_tools(model: ServedModel, payload: ResponsesRequest) -> Toolbox:
    for place, tool in enumerate(payload.tools or ()):
        if tool.type == "function" and not tool.name:
            raise Problem(f"tools.{place}: the function has no name; expected it next to its type", f"tools.{place}")
    functions = [tool for tool in payload.tools or () if tool.type == "function"]  # a note names the others
    return mapping.select_tools(model, functions, _tool_choice(payload))


def _tool_choice(payload: ResponsesRequest) -> mapping.ToolSelection:
    single = payload.parallel_tool_calls is False
    match payload.tool_choice:
        case None | str() as kind:
            return mapping.ToolSelection(kind or "auto", single=single)
        case FunctionChoice(name=name):
            return mapping.ToolSelection("required", (name,), single=True)
        case AllowedFunctionsChoice(mode=mode, tools=allowed):
            return mapping.ToolSelection(mode, tuple(tool.name for tool in allowed), single)


def to_conversation(model: ServedModel, payload: ResponsesRequest) -> TemplateInput:
    if payload.top_logprobs and logprobs(payload) is None:
        raise Problem(f"top_logprobs: not requested; add {_INCLUDE_LOGPROBS} to include", "top_logprobs")
    box = _select_tools(model, payload)
    messages: list[Message] = []
    if payload.instructions:
        messages.append({"role": "system", "content": payload.instructions})
    if isinstance(payload.input, str):
        messages.append({"role": "user", "content": payload.input})
    else:
        messages += _convert_items(payload.input)
    effort = payload.reasoning.effort if payload.reasoning is not None else None
    keywords = mapping.template_keywords(payload.chat_template_kwargs, reasoning_effort=effort)
    return TemplateInput(messages, box, keywords)


def _convert_items(items: list[Item]) -> list[Message]:
    """Converts input items. Texts, calls and reasoning in a row are separate items, but one assistant message in a
    template."""
    messages: list[Message] = []
    for place, item in enumerate(items):
        where = f"input.{place}"
        match item.type:
            case "message" if item.role is not None:
                text = mapping.join_text(item.content, f"{where}.content")
                turn = {"role": "system" if item.role == "developer" else item.role, "content": text}
            case "function_call":
                call = mapping.past_tool_call(item.name or "", item.arguments or "{}", item.call_id)
                turn = mapping.assistant_message("", [call])
            case "function_call_output":
                turn = mapping.tool_result(mapping.join_text(item.output, f"{where}.output"), item.call_id or "", None)
            case "reasoning":
                thought = mapping.join_text(item.content, f"{where}.content")
                thought = thought or (item.encrypted_content or "").partition(_READABLE)[2]
                turn = mapping.assistant_message("", [], thought or mapping.join_text(item.summary, f"{where}.summary"))
            case "item_reference":
                raise Problem(f"{where}: items are not stored; set the client's store to false to send them", where)
            case "message":
                raise Problem(f"{where}: the message has no role; expected user, assistant, system or developer", where)
            case other:
                raise Problem(f"{where}: items of type {other[:40]!r} are not supported", where)
        if turn["role"] == "assistant":
            add_turn(messages, turn)
        else:
            messages.append(turn)
    return [m for m in messages if m["role"] != "assistant" or m["content"] or m.get("tool_calls")]


router = APIRouter(route_class=JsonRoute)


@router.post("/responses", response_model=None, responses=response_docs(ResponseObject, streams=True))
async def respond(payload: ResponsesRequest, request: Request, context: ContextDependency) -> BaseModel | Response:
    """Generates a response to an input."""
    source, most = to_conversation(context.model, payload), payload.max_output_tokens
    form = mapping.parse_output_format((payload.text or {}).get("format"), "text.format", may_be_loose=True)
    plan = await asyncio.to_thread(
        plan_answer, context.model, payload, source, form, payload.stop, most, logprobs(payload)
    )
    return await context.respond(request, ResponseFormatter(plan, payload), payload.stream)


@router.post("/responses/input_tokens", response_model=None, responses=response_docs(InputTokens))
async def count(payload: ResponsesRequest, context: ContextDependency) -> InputTokens:
    """Counts the tokens of an input."""
    return InputTokens(input_tokens=await context.count_tokens(to_conversation(context.model, payload)))
