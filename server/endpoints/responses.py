"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses.

Nothing is stored, so each request has the whole conversation.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from outrider.orchestrator.client.dialogue import Chunk
from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.answers.choices import (
    AnswerPlan,
    ChoiceState,
    Part,
    PartUpdate,
    TextPart,
    ThinkingPart,
    plan_answer,
)
from outrider.server.answers.formatter import BlockFormatter, typed_event
from outrider.server.answers.usage import (
    PlacedToken,
    logprob_formatters,
    reasoning_tokens,
    schema_notes,
    statistics,
)
from outrider.server.endpoints.json_route import JsonRoute, event_docs, response_docs
from outrider.server.mapping import (
    ToolSelection,
    assistant_message,
    function,
    parse_output_format,
    past_call,
    text_of,
    tool_result,
    toolbox,
)
from outrider.server.model.served import ServedModel, TemplateInput, Toolbox
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem, Refused
from outrider.server.schemas import (
    MAX_TOOLS,
    ApiResponse,
    CachedTokens,
    Content,
    LooseShape,
    MaxTokens,
    Object,
    OpenAIGeneration,
    Outrider,
    ReasoningTokens,
    SpelledToken,
    Timings,
    absent,
    bounded,
    unsupported,
)
from outrider.server.server_context import TheServer, as_json


class Item(LooseShape):
    """A message, a function call, its output, or earlier reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


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


class ResponsesRequest(OpenAIGeneration):
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
    include: Annotated[list[str], bounded(MAX_TOOLS)] | None = Field(
        None, description="message.output_text.logprobs; other values are ignored"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    previous_response_id: Annotated[str | None, unsupported("responses are not stored; send the whole input")] = None
    conversation: Annotated[Any, unsupported("conversations are not stored; send the whole input")] = None
    background: Annotated[bool | None, unsupported("responses can't run in the background; leave it out")] = None
    prompt: Annotated[Any, unsupported("prompts are not stored; send instructions and input")] = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="inputs are never truncated: one that is too long is rejected, with auto too"
    )
    max_tool_calls: Annotated[int | None, unsupported("tools are called by the client")] = None
    # Ignored as well.
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


class ResponseFormatter(BlockFormatter):
    """Formats a response, and its stream of numbered events. `asked` has the fields that the response repeats.

    The output's items are messages, reasoning and calls. The last one is `in_progress` while it grows.
    """

    def __init__(self, plan: AnswerPlan, asked: ResponsesRequest) -> None:
        super().__init__(plan)
        # Coding agents also offer tools that run at OpenAI.
        others = sorted({tool.type[:40] for tool in asked.tools or () if tool.type != "function"})
        self._notes = [f"tools: {', '.join(others)} ignored; only function tools are supported"] if others else []
        formatters = logprob_formatters(plan)
        self._logprobs = formatters[0] if formatters is not None else None
        self._placed: deque[PlacedToken] = deque()
        self._number = -1
        self._items: list[Output] = []
        choice, sampling = asked.tool_choice, plan.choices[0].sampling
        self._common: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "created_at": plan.created,
            "model": plan.model.id,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": sampling.temp,
            "top_p": sampling.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
        }

    def whole(self) -> ResponseObject:
        (choice,) = self.plan.choices
        self._take_logprobs(choice.chunks)
        for part in choice.parts:
            self._items.append(_item(part, self._logprobs is not None))
            self._grow(part)
            self._items[-1].status = _status(choice)
        return self._whole(choice)

    def begin(self) -> bytes:
        """Writes response.created and response.in_progress. The stream ends with response.completed or
        response.incomplete."""
        begun = self._shape(status="in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _ended(self, choice: ChoiceState) -> bytes:
        before, answer = self._close(_status(choice)), self._whole(choice)
        return before + self._event(f"response.{answer.status}", response=answer)

    def failed(self, problem: Problem) -> bytes:
        """Writes response.failed."""
        self._items = [item for item in self._items if item.status != "in_progress"]
        error = {"code": problem.code or "server_error", "message": problem.message}
        return self._event("response.failed", response=self._shape(status="failed", error=error))

    def _shape(self, **more: Any) -> ResponseObject:
        return ResponseObject(**self._common, output=self._items, **more)

    def _whole(self, choice: ChoiceState) -> ResponseObject:
        plan, times, made = self.plan, choice.result.timings, len(choice.tokens)
        usage = ResponsesUsage(
            input_tokens=plan.prompt_tokens,
            input_tokens_details=WrittenTokens(cached_tokens=times.cache_n, cache_write_tokens=times.prompt_n),
            output_tokens=made,
            output_tokens_details=reasoning_tokens(plan),
            total_tokens=plan.prompt_tokens + made,
        )
        return self._shape(
            status=_status(choice),
            incomplete_details={"reason": "max_output_tokens"} if choice.finish == "length" else None,
            usage=usage,
            **statistics([choice], [*self._notes, *schema_notes(plan, [choice])]),
        )

    def _take_logprobs(self, chunks: Sequence[Chunk]) -> None:
        if self._logprobs is not None:
            self._placed += self._logprobs.next(chunks)

    def _grow(self, part: Part) -> list[SpelledToken]:
        """Adds a part to the last item, and returns its log-probabilities."""
        rows: list[SpelledToken] = []
        match self._items[-1], part:
            case OutputMessage(content=[content]), TextPart(text=text):
                content.text += text
                if content.logprobs is not None:
                    content.logprobs += (rows := self._logprobs_of(part))
            case OutputReasoning(content=[content]), ThinkingPart(text=text):
                content.text += text
            case OutputCall() as call, ToolCall(arguments=arguments):
                call.arguments = arguments
        return rows

    def _logprobs_of(self, words: TextPart) -> list[SpelledToken]:
        """Returns the tokens that end in `words`. Those before are tags and thinking."""
        found = []
        while self._placed and self._placed[0].end <= words.at + len(words.text):
            one = self._placed.popleft()
            found += [one.spelled] if one.end > words.at else []
        return found

    def _open(self, part: Part) -> bytes:
        self._items.append(item := _item(part, self._logprobs is not None))
        added = "response.output_item.added"
        if isinstance(item, OutputCall):
            return self._event(added, output_index=self._at, item=item)
        before = self._event(added, output_index=self._at, item={**item.model_dump(), "content": []})
        return before + self._of_item("content_part.added", content_index=0, part=item.content[0])

    def _delta(self, update: PartUpdate) -> bytes:
        self._take_logprobs(update.chunks)
        rows = self._grow(update.part)
        match update.part:
            case TextPart(text=text):
                return self._of_item("output_text.delta", content_index=0, delta=text, logprobs=rows)
            case ThinkingPart(text=text):
                return self._of_item("reasoning_text.delta", content_index=0, delta=text)
            case ToolCall(arguments=arguments):
                return self._of_item("function_call_arguments.delta", delta=arguments)

    def _closed(self, status: str) -> bytes:
        item = self._items[-1]
        item.status = status
        if isinstance(item, OutputCall):
            done = self._of_item("function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            (content,) = item.content
            more = {"logprobs": content.logprobs or []} if isinstance(content, OutputText) else {}
            done = self._of_item(f"{content.type}.done", content_index=0, text=content.text, **more)
            done += self._of_item("content_part.done", content_index=0, part=content)
        return done + self._event("response.output_item.done", output_index=self._at, item=item)

    def _of_item(self, kind: str, /, **fields: Any) -> bytes:
        """Returns an event of the item that grows."""
        return self._event(f"response.{kind}", item_id=self._items[-1].id, output_index=self._at, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return typed_event(kind, sequence_number=self._number, **fields)


def _status(choice: ChoiceState) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _item(part: Part, with_logprobs: bool) -> Output:
    """Returns the item that a part begins, without content."""
    name, state = secrets.token_hex(12), "in_progress"
    match part:
        case TextPart():
            content = OutputText(text="", logprobs=[] if with_logprobs else None)
            return OutputMessage(id=f"msg_{name}", status=state, content=[content])
        case ThinkingPart():
            return OutputReasoning(id=f"rs_{name}", status=state, content=[ReasoningText(text="")])
        case ToolCall():
            call_id = part.id or f"call_{secrets.token_hex(12)}"
            return OutputCall(id=f"fc_{name}", call_id=call_id, name=part.name, arguments="", status=state)


_LOGPROBS = "message.output_text.logprobs"
_READABLE = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def logprobs(asked: ResponsesRequest) -> int | None:
    """Returns the number of top log-probabilities; None: no log-probabilities at all."""
    return asked.top_logprobs or 0 if _LOGPROBS in (asked.include or ()) else None


def _toolbox(model: ServedModel, asked: ResponsesRequest) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            continue  # ignored, with a note
        if not tool.name:
            raise Refused(f"tools.{place}: the function has no name", f"tools.{place}")
        given.append(function(tool.name, tool.description, tool.parameters))
    strict = [tool.name for tool in asked.tools or () if tool.strict and tool.name]
    return toolbox(model, given, _tool_choice(asked), strict)


def _tool_choice(asked: ResponsesRequest) -> ToolSelection:
    one = asked.parallel_tool_calls is False
    match asked.tool_choice:
        case None | str() as kind:
            return ToolSelection(kind or "auto", one=one)
        case FunctionChosen(name=name):
            return ToolSelection("required", (name,), one=True)
        case FunctionsAllowed(mode=mode, tools=allowed):
            return ToolSelection(mode, tuple(tool.name for tool in allowed), one)


def conversation(model: ServedModel, asked: ResponsesRequest) -> TemplateInput:
    if asked.top_logprobs and logprobs(asked) is None:
        raise Refused(f"top_logprobs: none are wanted; expected {_LOGPROBS} in include", "top_logprobs")
    box = _toolbox(model, asked)
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += _items_in(asked.input)
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        keywords.setdefault("reasoning_effort", asked.reasoning.effort)
    return TemplateInput(messages, box, keywords)


def _items_in(items: list[Item]) -> list[dict[str, Any]]:
    """Converts input items. Calls and reasoning are separate items, but belong to one assistant message in a
    template."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"input.{place}"
        match item.type:
            case "message" if item.role is not None:
                text, last = text_of(item.content, f"{where}.content", _READABLE), messages[-1] if messages else {}
                if item.role == last.get("role") == "assistant" and not last["content"]:
                    last["content"] = text  # follows its reasoning
                else:
                    messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append(assistant_message("", []))
                call = past_call(item.name or "", item.arguments or "{}", item.call_id)
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = text_of(item.output, f"{where}.output", _READABLE)
                messages.append(tool_result(result, item.call_id or "", None))
            case "reasoning":
                thought = text_of(item.content, f"{where}.content", _READABLE)
                messages.append(assistant_message("", [], thought))
            case other:
                raise Refused(f"{where}: an item of type {other[:40]!r} can't be read here", where)
    return [m for m in messages if m["role"] != "assistant" or m["content"] or m.get("tool_calls")]


router = APIRouter(route_class=JsonRoute)


@router.post("/responses", response_model=None, responses=response_docs(ResponseObject, event_docs()))
async def respond(asked: ResponsesRequest, request: Request, context: TheServer) -> Response:
    """Generates a response to an input."""
    talk, most = conversation(context.model, asked), asked.max_output_tokens
    form = parse_output_format((asked.text or {}).get("format"), "text.format", may_be_loose=True)
    plan = await asyncio.to_thread(plan_answer, context.model, asked, talk, form, asked.stop, most, logprobs(asked))
    return await context.respond(request, ResponseFormatter(plan, asked), asked.stream)


@router.post("/responses/input_tokens", response_model=None, responses=response_docs(InputTokens))
async def count(asked: ResponsesRequest, context: TheServer) -> Response:
    """Counts the tokens of an input."""
    return as_json(InputTokens(input_tokens=await context.count_tokens(conversation(context.model, asked))))
