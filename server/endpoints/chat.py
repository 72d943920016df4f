"""POST /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
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
    total_timings,
)
from outrider.server.answers.run import NO_EXTRAS, Extras, job, speculated
from outrider.server.answers.sse import EventStream, Stencil
from outrider.server.answers.usage import (
    FINGERPRINT,
    LogprobFormatter,
    SchemaChecker,
    ThoughtCounter,
    about,
    counter,
    no_notes,
    schema_checker,
    speller,
    usage,
)
from outrider.server.endpoints.json_route import JsonRoute, chunk_docs, response_docs
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
from outrider.server.mapping.generation_params import choices, generation_params_of, include_usage_of, room
from outrider.server.mapping.output_format import output_format_of
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem, Refused
from outrider.server.server_context import TheServer, as_json
from outrider.server.shapes.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
    Finish,
    FunctionOut,
    Tool,
    ToolCallDelta,
    ToolCallOut,
    ToolChosen,
    ToolsAllowed,
)
from outrider.server.shapes.chat import Part as PartIn

_FINISH: dict[str, Finish] = {"length": "length", "tool": "tool_calls"}


@dataclass(frozen=True, slots=True)
class ChatInfo:
    """What all chunks of an answer share. `seed` is the request's.

    `thoughts` counts thinking tokens. `speller` is None without log-probabilities. `notes` checks schemas.
    """

    model: str
    seed: int
    prompt_tokens: int
    thoughts: ThoughtCounter
    speller: LogprobFormatter | None = None
    notes: SchemaChecker = no_notes
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def beside(self, extras: Extras) -> dict[str, Any]:
        """Returns a choice's extra fields."""
        rows = self.speller.content(extras.logprobs) if self.speller is not None else None
        return {"logprobs": rows, "speculation": speculated(extras)}

    def common(self) -> dict[str, Any]:
        """Returns the fields that are the same in every chunk and in the full response."""
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": FINGERPRINT}

    def numbers(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """Returns the timings and the `outrider` field of these choices."""
        info = about(choices[0].result, self.seed, self.notes(choices))
        return {"timings": timings(total_timings(choices)), "outrider": info}


def completion(head: ChatInfo, choices: Sequence[ChoiceState]) -> ChatCompletion:
    """Returns the full response."""
    return ChatCompletion(
        **head.common(),
        **head.numbers(choices),
        choices=[_choice(head, choice) for choice in choices],
        usage=usage(head.prompt_tokens, choices, head.thoughts),
    )


class ChatEvents:
    """Writes a stream: each choice starts with its role and ends with its finish reason and timings."""

    def __init__(self, head: ChatInfo, choices: int, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._calls = [0] * choices
        self._ended: list[ChoiceState] = []
        self._stencil = cache(self._written)

    def begin(self) -> bytes:
        first = Delta(role="assistant", content="")
        return b"".join(_chunk(self._head, ChunkChoice(index=n, delta=first)) for n in range(len(self._calls)))

    def of(self, one: StreamItem) -> bytes:
        match one:
            case PartUpdate(index=index, part=TextPart() | ThinkingPart() as part, extras=extras) if (
                extras is NO_EXTRAS
            ):
                return self._stencil(index, isinstance(part, ThinkingPart)).filled(part.text)
            case PartUpdate(index=index, part=part, extras=extras):
                delta = _delta(part, self._calls[index])
                self._calls[index] += isinstance(part, ToolCall)
                return _chunk(self._head, ChunkChoice(index=index, delta=delta, **self._head.beside(extras)))
            case KeepAlive(note=note):
                return sse.comment(note)
            case ChoiceState():
                self._ended.append(one)
                return _end(self._head, one)

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        head, ended = self._head, self._ended
        total = usage(head.prompt_tokens, ended, head.thoughts)
        last = ChatChunk(**head.common(), **head.numbers(ended), choices=[], usage=total)
        return sse.event(last.model_dump_json()) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        return sse.failed(problem)

    def _written(self, index: int, is_thought: bool) -> Stencil:
        kind = ThinkingPart if is_thought else TextPart
        return Stencil(lambda text: _chunk(self._head, ChunkChoice(index=index, delta=_delta(kind(text), 0))))


def call_id(call: ToolCall) -> str:
    """Returns the model's own id, or a new one."""
    return call.id or f"call_{secrets.token_hex(12)}"


def _chunk(head: ChatInfo, choice: ChunkChoice, **more: Any) -> bytes:
    return sse.event(ChatChunk(**head.common(), choices=[choice], **more).model_dump_json())


def _end(head: ChatInfo, choice: ChoiceState) -> bytes:
    last = ChunkChoice(
        index=choice.index,
        delta=Delta(),
        finish_reason=_FINISH.get(choice.finish, "stop"),
        **head.beside(choice.untold),
    )
    return _chunk(head, last, **head.numbers([choice]))


def _delta(part: Part, calls_before: int) -> Delta:
    match part:
        case TextPart(text=text):
            return Delta(content=text)
        case ThinkingPart(text=text):
            return Delta(reasoning_content=text)
        case ToolCall():
            made = FunctionOut(name=part.name, arguments=part.arguments)
            return Delta(tool_calls=[ToolCallDelta(index=calls_before, id=call_id(part), function=made)])


def _choice(head: ChatInfo, choice: ChoiceState) -> ChatChoice:
    calls = [ToolCallOut(id=call_id(c), function=FunctionOut(name=c.name, arguments=c.arguments)) for c in choice.calls]
    message = AnswerMessage(
        content=choice.text if choice.text or not calls else None,
        reasoning_content=choice.thought or None,
        tool_calls=calls or None,
    )
    return ChatChoice(
        index=choice.index,
        message=message,
        finish_reason=_FINISH.get(choice.finish, "stop"),
        **head.beside(choice.extras),
    )


_REFUSED = {
    "audio": "audio output is not supported",
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "web_search_options": "web search is not supported",
}


def refuse(asked: ChatRequest) -> None:
    """Raises Refused for unsupported fields that would change the answer."""
    for name, why in _REFUSED.items():
        if getattr(asked, name) is not None:
            raise Refused(f"{name}: {why}", name)
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise Refused("modalities: only text output is supported; expected ['text'], or leave it out", "modalities")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise Refused(
            "continue_final_message and add_generation_prompt can't be used together", "continue_final_message"
        )
    if asked.continue_final_message:
        check_own_turn(asked.messages)
    if asked.top_logprobs and not asked.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")


def check_own_turn(messages: list[ChatMessage]) -> None:
    """Raises Refused unless the last message is the assistant's."""
    if not messages or messages[-1].role != "assistant":
        raise Refused("continue_final_message: the last message is not the assistant's", "continue_final_message")


def logprobs(asked: ChatRequest) -> int | None:
    """Returns the number of top log-probabilities; None: no log-probabilities at all."""
    return asked.top_logprobs or 0 if asked.logprobs else None


def tools_of(model: ServedModel, asked: ChatRequest) -> Toolbox:
    strict = [tool.function.name for tool in asked.tools or () if tool.function is not None and tool.function.strict]
    return toolbox(model, tools(asked.tools), _tool_choice(asked), strict)


def _tool_choice(asked: ChatRequest) -> ToolSelection:
    one = asked.parallel_tool_calls is False
    match asked.tool_choice:
        case None | str() as kind:
            return ToolSelection(kind or ANY, one=one)
        case ToolChosen(function=function):
            return ToolSelection(MUST, (function.name,), one=True)
        case ToolsAllowed(allowed_tools=allowed):
            return ToolSelection(allowed.mode, tuple(tool.function.name for tool in allowed.tools), one)


def conversation(asked: ChatRequest, box: Toolbox) -> TemplateInput:
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        keywords.setdefault("reasoning_effort", asked.reasoning_effort)
    continue_final = bool(asked.continue_final_message)
    return TemplateInput(
        messages=messages(asked.messages),
        tools=box.tools,
        keywords=keywords,
        answer=asked.add_generation_prompt is not False,
        continue_final=continue_final,
    )


def messages(given: list[ChatMessage]) -> list[dict[str, Any]]:
    """Converts messages for the template. Raises Refused for unsupported content."""
    return [_message(message, f"messages.{place}.content") for place, message in enumerate(given)]


def tools(given: list[Tool] | None) -> list[dict[str, Any]]:
    """Converts tools for the template. Raises Refused for anything but functions."""
    found = []
    for place, tool in enumerate(given or ()):
        if tool.type != "function" or tool.function is None:
            raise Refused(f"tools.{place}: only function tools are supported", f"tools.{place}")
        found.append(function(tool.function.name, tool.function.description, tool.function.parameters))
    return found


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = _content(message.content, where)
    if message.role == "assistant":
        calls = [past_call(c.function.name, c.function.arguments, c.id) for c in message.tool_calls or ()]
        return assistant_message(content, calls, message.reasoning_content or message.reasoning or "")
    if message.role == "tool":
        return tool_result(content, message.tool_call_id or "", message.name)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _content(content: str | list[PartIn] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return text_of(((part.type, part.text) for part in content), ("text",), where)


router = APIRouter(route_class=JsonRoute)


@router.post("/chat/completions", response_model=None, responses=response_docs(ChatCompletion, chunk_docs(ChatChunk)))
async def complete(asked: ChatRequest, request: Request, context: TheServer) -> Response:
    """Generates an answer to a conversation."""
    context.check_model(asked.model)
    refuse(asked)
    box = tools_of(context.model, asked)
    form, wanted = await context.form(output_format_of(asked)), logprobs(asked)
    prompt = await context.prompt(conversation(asked, box))
    grammar = await context.grammar(prompt, form, box)
    params = generation_params_of(
        context.model, asked, room(context.model, len(prompt.tokens), _most(asked)), grammar, wanted
    )
    jobs = [job(context.model.codec, prompt.tokens, params.another(index)) for index in range(choices(asked))]
    splitters = [splitter(context.model, prompt, box, form is not None, grammar is not None) for _ in jobs]
    spell = speller(context.model, params.sampling)
    thoughts = counter(context.model, prompt)
    head = ChatInfo(
        context.model.id, params.sampling.seed or 0, len(prompt.tokens), thoughts, spell, schema_checker(form, box)
    )
    with_usage = include_usage_of(asked)
    if not asked.stream:
        return as_json(completion(head, await context.whole(request, jobs, splitters, box.one)))
    run = await context.streaming(request, jobs)
    return EventStream(PartStream(run, splitters, box.one), ChatEvents(head, len(jobs), with_usage))


def _most(asked: ChatRequest) -> int | None:
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise Refused(f"max_tokens is {older} and max_completion_tokens {newer}; expected one of them", "max_tokens")
    return newer if newer is not None else older
