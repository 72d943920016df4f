"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import sse
from outrider.server.answers.parts import (
    ChoiceState,
    KeepAlive,
    Part,
    PartStream,
    PartUpdate,
    StreamItem,
    TextPart,
    ThinkingPart,
    splitter,
    timings,
)
from outrider.server.answers.run import ChoiceJob
from outrider.server.answers.sse import EventStream
from outrider.server.answers.usage import (
    LogprobFormatter,
    SchemaChecker,
    TextLogprobs,
    ThoughtCounter,
    about,
    counter,
    no_notes,
    responses_usage,
    schema_checker,
    speller,
)
from outrider.server.endpoints.json_route import JsonRoute, event_docs, response_docs
from outrider.server.mapping.conversation import (
    ANY,
    MUST,
    Toolbox,
    ToolSelection,
    assistant_message,
    function,
    past_call,
    text_of,
    tool_result,
    toolbox,
)
from outrider.server.mapping.generation_params import generation_params, room, stops
from outrider.server.mapping.output_format import OutputFormat, parse_output_format
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem, Refused
from outrider.server.server_context import TheServer, as_json
from outrider.server.shapes.base import Object
from outrider.server.shapes.chat import SpelledToken
from outrider.server.shapes.responses import (
    Content,
    FunctionChosen,
    FunctionsAllowed,
    InputTokens,
    Output,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
)
from outrider.server.shapes.responses import Item as ItemIn

_PREFIX = {TextPart: "msg", ThinkingPart: "rs", ToolCall: "fc"}


class OutputItem:
    """An item of the output: a message, reasoning or a call, as it grows. `wording` assigns log-probabilities, if
    requested."""

    def __init__(self, part: Part, status: str, wording: TextLogprobs | None) -> None:
        self.part = part
        self._wording = wording
        self.rows = self._next(part)
        self.status = status
        self.id = f"{_PREFIX[type(part)]}_{secrets.token_hex(12)}"
        self._call_id = part.id or f"call_{secrets.token_hex(12)}" if isinstance(part, ToolCall) else ""

    @property
    def word(self) -> str:
        return "output_text" if isinstance(self.part, TextPart) else "reasoning_text"

    def content(self, text: str) -> dict[str, Any]:
        """Returns the item's only content part, with `text`."""
        return (self._words(text) if isinstance(self.part, TextPart) else ReasoningText(text=text)).model_dump()

    def grow(self, part: Part) -> list[SpelledToken]:
        """Adds a part, and returns its log-probabilities."""
        rows = self._next(part)
        self.rows += rows
        if isinstance(self.part, TextPart) and isinstance(part, TextPart):
            self.part = TextPart(self.part.text + part.text, self.part.at)
        elif isinstance(self.part, ThinkingPart) and isinstance(part, ThinkingPart):
            self.part = ThinkingPart(self.part.text + part.text)
        return rows

    def _next(self, part: Part) -> list[SpelledToken]:
        return self._wording.next(part) if self._wording is not None and isinstance(part, TextPart) else []

    def _words(self, text: str) -> OutputText:
        rows = self.rows if text else []
        return OutputText(text=text, logprobs=rows if self._wording is not None else None)

    def empty(self) -> Output:
        match self.part:
            case TextPart():
                return OutputMessage(id=self.id, status=self.status, content=[])
            case ThinkingPart():
                return OutputReasoning(id=self.id, status=self.status, content=[])
            case ToolCall(name=name):
                return OutputCall(id=self.id, call_id=self._call_id, name=name, arguments="", status=self.status)

    def whole(self) -> Output:
        match self.part:
            case TextPart(text=text):
                return OutputMessage(id=self.id, status=self.status, content=[self._words(text)])
            case ThinkingPart(text=text):
                return OutputReasoning(id=self.id, status=self.status, content=[ReasoningText(text=text)])
            case ToolCall(name=name, arguments=arguments):
                return OutputCall(id=self.id, call_id=self._call_id, name=name, arguments=arguments, status=self.status)


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """What is known before generation, and request fields that the response repeats.

    `thoughts` counts thinking tokens. `speller` is None without log-probabilities.
    """

    model: str
    seed: int
    prompt_tokens: int
    thoughts: ThoughtCounter
    notes: Sequence[str]
    tool_choice: str | Object
    tools: list[Object]
    parallel: bool
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    speller: LogprobFormatter | None = None
    checked: SchemaChecker = no_notes
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def shape(self, output: list[Output], **more: Any) -> ResponseObject:
        return ResponseObject(
            id=self.id,
            created_at=self.created_at,
            model=self.model,
            output=output,
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel,
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=self.tool_choice,
            tools=self.tools,
            **more,
        )


def response(head: ResponseInfo, choice: ChoiceState, items: list[Output] | None = None) -> ResponseObject:
    """Returns the full response. `items` are those that a stream already sent."""
    cut = choice.finish == "length"
    state = "incomplete" if cut else "completed"
    made = items if items is not None else _items(head, choice, state)
    return head.shape(
        made,
        status=state,
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        usage=responses_usage(head.prompt_tokens, choice, head.thoughts),
        timings=timings(choice.timings),
        outrider=about(choice.result, head.seed, [*head.notes, *head.checked([choice])]),
    )


def _items(head: ResponseInfo, choice: ChoiceState, state: str) -> list[Output]:
    wording = TextLogprobs(head.speller) if head.speller is not None else None
    if wording is not None:
        wording.take(choice.extras.logprobs)
    return [OutputItem(part, state, wording).whole() for part in choice.parts]


class ResponseEvents:
    """Writes a stream with numbered events."""

    def __init__(self, head: ResponseInfo) -> None:
        self._head = head
        self._wording = TextLogprobs(head.speller) if head.speller is not None else None
        self._number = -1
        self._items: list[Output] = []
        self._item: OutputItem | None = None

    def begin(self) -> bytes:
        """Writes response.created and response.in_progress. The stream ends with response.completed or
        response.incomplete."""
        begun = self._head.shape([], status="in_progress").model_dump()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def of(self, one: StreamItem) -> bytes:
        match one:
            case KeepAlive(note=note):
                return sse.comment(note)
            case PartUpdate(part=part, extras=extras):
                if self._wording is not None:
                    self._wording.take(extras.logprobs)
                return b"".join(self._grown(part))
            case ChoiceState():
                before = b"".join(self._closed("incomplete" if one.finish == "length" else "completed"))
                answer = response(self._head, one, self._items)
                return before + self._event(f"response.{answer.status}", response=answer.model_dump())

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        """Writes response.failed."""
        error = {"code": problem.code or "server_error", "message": problem.message}
        answer = self._head.shape(self._items, status="failed", error=error)
        return self._event("response.failed", response=answer.model_dump())

    def _grown(self, part: Part) -> Iterator[bytes]:
        if self._item is None or type(self._item.part) is not type(part) or isinstance(part, ToolCall):
            yield from self._closed("completed")
            self._item = OutputItem(part, "in_progress", self._wording)
            rows = self._item.rows
            yield from self._begun(self._item)
        else:
            rows = self._item.grow(part)
        yield self._delta(self._item, part, rows)

    def _begun(self, item: OutputItem) -> Iterator[bytes]:
        at = len(self._items)
        yield self._event("response.output_item.added", output_index=at, item=item.empty().model_dump())
        if not isinstance(item.part, ToolCall):
            yield self._event(
                "response.content_part.added", item_id=item.id, output_index=at, content_index=0, part=item.content("")
            )

    def _delta(self, item: OutputItem, part: Part, rows: list[SpelledToken]) -> bytes:
        at: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items)}
        if isinstance(part, ToolCall):
            return self._event("response.function_call_arguments.delta", **at, delta=part.arguments)
        more = {"logprobs": _plain(rows)} if isinstance(part, TextPart) else {}
        return self._event(f"response.{item.word}.delta", **at, content_index=0, delta=part.text, **more)

    def _closed(self, state: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        item.status = state
        at: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items)}
        if isinstance(item.part, ToolCall):
            yield self._event(
                "response.function_call_arguments.done", **at, name=item.part.name, arguments=item.part.arguments
            )
        else:
            more = {"logprobs": _plain(item.rows)} if isinstance(item.part, TextPart) else {}
            yield self._event(f"response.{item.word}.done", **at, content_index=0, text=item.part.text, **more)
            yield self._event("response.content_part.done", **at, content_index=0, part=item.content(item.part.text))
        whole = item.whole()
        yield self._event("response.output_item.done", output_index=len(self._items), item=whole.model_dump())
        self._items.append(whole)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        body = {"type": kind, "sequence_number": self._number, **fields}
        return sse.event(json.dumps(body, ensure_ascii=False), kind)


def _plain(rows: Sequence[SpelledToken]) -> list[Object]:
    return [row.model_dump() for row in rows]


_LOGPROBS = "message.output_text.logprobs"
_READABLE = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_REFUSED = {
    "previous_response_id": "responses are not stored; send the whole input",
    "conversation": "conversations are not stored; send the whole input",
    "prompt": "prompts are not stored; send instructions and input",
    "max_tool_calls": "tools are called by the client",
}


def refuse(asked: ResponsesRequest) -> None:
    """Raises Refused for unsupported fields that would change the answer."""
    if asked.top_logprobs and logprobs(asked) is None:
        raise Refused(f"top_logprobs: none are wanted; expected {_LOGPROBS} in include", "top_logprobs")
    for name, why in _REFUSED.items():
        if getattr(asked, name) is not None:
            raise Refused(f"{name}: {why}", name)
    if asked.background:
        raise Refused("background: responses can't run in the background; leave it out", "background")


def logprobs(asked: ResponsesRequest) -> int | None:
    """Returns the number of top log-probabilities; None: no log-probabilities at all."""
    return asked.top_logprobs or 0 if _LOGPROBS in (asked.include or ()) else None


def output_format_of(asked: ResponsesRequest) -> OutputFormat | None:
    """Returns the format of `text.format`. Raises Refused."""
    given = (asked.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise Refused("text.format: expected an object", "text")
    return parse_output_format(given, "text.format", may_be_loose=True)


def tools_of(model: ServedModel, asked: ResponsesRequest) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            continue  # ignored; `notes` mentions it
        if not tool.name:
            raise Refused(f"tools.{place}: the function has no name", f"tools.{place}")
        given.append(function(tool.name, tool.description, tool.parameters))
    strict = [tool.name for tool in asked.tools or () if tool.strict and tool.name]
    return toolbox(model, given, _tool_choice(asked), strict)


def _tool_choice(asked: ResponsesRequest) -> ToolSelection:
    one = asked.parallel_tool_calls is False
    match asked.tool_choice:
        case None | str() as kind:
            return ToolSelection(kind or ANY, one=one)
        case FunctionChosen(name=name):
            return ToolSelection(MUST, (name,), one=True)
        case FunctionsAllowed(mode=mode, tools=allowed):
            return ToolSelection(mode, tuple(tool.name for tool in allowed), one)


def notes(asked: ResponsesRequest) -> list[str]:
    """Notes ignored tools: coding agents also offer tools that run at OpenAI."""
    others = sorted({tool.type[:40] for tool in asked.tools or () if tool.type != "function"})
    return [f"tools: {', '.join(others)} ignored; only function tools are supported"] if others else []


def conversation(asked: ResponsesRequest, box: Toolbox) -> TemplateInput:
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
    return TemplateInput(messages, box.tools, keywords)


def _items_in(items: list[ItemIn]) -> list[dict[str, Any]]:
    """Converts input items. Calls and reasoning are separate items, but belong to one assistant message in a
    template."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"input.{place}"
        match item.type:
            case "message" if item.role is not None:
                _add_message(messages, item.role, _text(item.content, f"{where}.content"))
            case "function_call":
                _last_assistant_message(messages).setdefault("tool_calls", []).append(
                    past_call(item.name or "", item.arguments or "{}", item.call_id)
                )
            case "function_call_output":
                messages.append(tool_result(_text(item.output, f"{where}.output"), item.call_id or "", None))
            case "reasoning":
                thought = _text(item.content, f"{where}.content")
                messages.append(assistant_message("", [], thought))
            case other:
                raise Refused(f"{where}: an item of type {other[:40]!r} can't be read here", where)
    return [message for message in messages if not _is_empty(message)]


def _add_message(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if role == "assistant" and messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages[-1]["content"] = text  # follows its reasoning
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": text})


def _last_assistant_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last message if it is the assistant's, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append(assistant_message("", []))
    return messages[-1]


def _is_empty(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not any(message.get(k) for k in ("content", "tool_calls"))


def _text(content: str | list[Content] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return text_of(((part.type, part.text) for part in content), _READABLE, where)


router = APIRouter(route_class=JsonRoute)


@router.post("/responses", response_model=None, responses=response_docs(ResponseObject, event_docs()))
async def respond(asked: ResponsesRequest, request: Request, context: TheServer) -> Response:
    """Generates a response to an input."""
    context.check_model(asked.model)
    refuse(asked)
    box = tools_of(context.model, asked)
    form = await context.form(output_format_of(asked))
    prompt = await context.prompt(conversation(asked, box))
    grammar = await context.grammar(prompt, form, box)
    how = generation_params(
        context.model,
        asked.speculation,
        asked.timeout,
        max_tokens=room(context.model, len(prompt.tokens), asked.max_output_tokens),
        temp=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop=stops(asked.stop),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        ignore_eos=asked.ignore_eos,
        grammar=grammar,
        logprobs=logprobs(asked),
    )
    head = ResponseInfo(
        model=context.model.id,
        seed=how.sampling.seed or 0,
        prompt_tokens=len(prompt.tokens),
        thoughts=counter(context.model, prompt),
        notes=notes(asked),
        tool_choice=_choice(asked),
        tools=[tool.model_dump() for tool in asked.tools or ()],
        parallel=asked.parallel_tool_calls is not False,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        temperature=how.sampling.temp,
        top_p=how.sampling.top_p,
        speller=speller(context.model, how.sampling),
        checked=schema_checker(form, box),
    )
    jobs = [ChoiceJob(prompt.tokens, how)]
    splitters = [splitter(context.model, prompt, box, form is not None, grammar is not None)]
    if not asked.stream:
        (choice,) = await context.whole(request, jobs, splitters, box.one)
        return as_json(response(head, choice))
    run = await context.streaming(request, jobs)
    return EventStream(PartStream(run, splitters, box.one), ResponseEvents(head))


@router.post("/responses/input_tokens", response_model=None, responses=response_docs(InputTokens))
async def count(asked: ResponsesRequest, context: TheServer) -> Response:
    """Counts the tokens of an input."""
    context.check_model(asked.model)
    refuse(asked)
    prompt = await context.prompt(conversation(asked, tools_of(context.model, asked)))
    return as_json(InputTokens(input_tokens=len(prompt.tokens)))


def _choice(asked: ResponsesRequest) -> str | dict[str, Any]:
    choice = asked.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()
