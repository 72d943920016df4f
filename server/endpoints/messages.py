"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients and coding agents ask.

`MessageEvents`: an answer in Anthropic's shapes: whole, or as the events of a stream, block by block.

`stop_that_ended`: which stop sequence ended a text: the orchestrator says that one did, and the tokens tell which.

Anthropic's messages as a conversation, its tools and its manner.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.orchestrator.front.text import Detokenizer
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.sampling import SamplingParams
from outrider.server.answers import sse
from outrider.server.answers.part_stream import ChoiceState, KeepAlive, PartStream, PartUpdate, Words, timings
from outrider.server.answers.parts import Part, TextPart, ThinkingPart, splitter
from outrider.server.answers.run import ChoiceJob
from outrider.server.answers.sse import EventStream
from outrider.server.answers.usage import about, messages_usage
from outrider.server.endpoints.described import described, named_events, typed
from outrider.server.mapping import speech
from outrider.server.mapping.form import Form, by_format
from outrider.server.mapping.generation_params import generation_params, stops
from outrider.server.mapping.speech import ANY, MUST, NONE, Toolbox, ToolSelection, function, toolbox
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem, Refused
from outrider.server.server_context import TheServer, as_json
from outrider.server.shapes.messages import (
    AnswerBlock,
    Block,
    Counted,
    MessageAnswer,
    MessagesRequest,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
    Turn,
)

PING = sse.event('{"type":"ping"}', "ping")


@dataclass(frozen=True, slots=True)
class MessageInfo:
    """What is known before the first word. `stopped_by`: the stop sequence that ended a choice."""

    model: str
    seed: int
    prompt_tokens: int
    stopped_by: Callable[[ChoiceState], str | None]
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def message(head: MessageInfo, choice: ChoiceState) -> MessageAnswer:
    """The whole answer."""
    reason, stop = _reason(head, choice)
    return MessageAnswer(
        id=head.id,
        model=head.model,
        content=[_block(part) for part in choice.parts],
        stop_reason=reason,
        stop_sequence=stop,
        usage=messages_usage(head.prompt_tokens, choice),
        timings=timings(choice.timings),
        outrider=about(choice.result, head.seed),
    )


class MessageEvents:
    """A stream's: message_start, blocks, message_delta with the reason and the numbers, message_stop."""

    def __init__(self, head: MessageInfo) -> None:
        self._head = head
        self._at, self._now = -1, ""

    def begin(self) -> bytes:
        head = self._head
        begun = MessageAnswer(id=head.id, model=head.model, content=[], usage=messages_usage(head.prompt_tokens, None))
        return _event("message_start", message=begun.model_dump())

    def of(self, one: Words) -> bytes:
        match one:
            case KeepAlive():
                return PING
            case PartUpdate(part=part):
                return self._turn(part) + _event("content_block_delta", index=self._at, delta=_delta(part))
            case ChoiceState():
                return _ended(self._at, self._now) + self._last(one)

    def end(self) -> bytes:
        return _event("message_stop")

    def failed(self, problem: Problem) -> bytes:
        return sse.event(problem.body(anthropic=True, request_id="").decode(), "error")

    def _turn(self, part: Part) -> bytes:
        """To the block that `part` is of, if that is a new one."""
        if _kind(part) == self._now and not isinstance(part, ToolCall):
            return b""
        before = _ended(self._at, self._now)
        self._at, self._now = self._at + 1, _kind(part)
        return before + _event("content_block_start", index=self._at, content_block=_begun(part).model_dump())

    def _last(self, choice: ChoiceState) -> bytes:
        reason, stop = _reason(self._head, choice)
        return _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": stop},
            usage=messages_usage(self._head.prompt_tokens, choice).model_dump(),
            timings=timings(choice.timings),
            outrider=about(choice.result, self._head.seed).model_dump(),
        )


def _event(name: str, **fields: Any) -> bytes:
    return sse.event(json.dumps({"type": name, **fields}, ensure_ascii=False), name)


def _ended(at: int, kind: str) -> bytes:
    """The end of block `at`, if there is one. A thought's signature is empty: there is nobody who checks it."""
    if not kind:
        return b""
    signed = {"type": "signature_delta", "signature": ""}
    before = _event("content_block_delta", index=at, delta=signed) if kind == ThinkingPart.__name__ else b""
    return before + _event("content_block_stop", index=at)


def _kind(part: Part) -> str:
    return type(part).__name__


def _begun(part: Part) -> AnswerBlock:
    match part:
        case TextPart():
            return TextBlock(text="")
        case ThinkingPart():
            return ThinkingBlock(thinking="")
        case ToolCall():
            return ToolUseBlock(id=_id(part), name=part.name, input={})


def _delta(part: Part) -> dict[str, str]:
    match part:
        case TextPart(text=text):
            return {"type": "text_delta", "text": text}
        case ThinkingPart(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCall(arguments=arguments):
            return {"type": "input_json_delta", "partial_json": arguments}


def _block(part: Part) -> AnswerBlock:
    match part:
        case TextPart(text=text):
            return TextBlock(text=text)
        case ThinkingPart(text=text):
            return ThinkingBlock(thinking=text)
        case ToolCall():
            return ToolUseBlock(id=_id(part), name=part.name, input=_object(part.arguments))


def _id(call: ToolCall) -> str:
    return call.id or f"toolu_{secrets.token_hex(12)}"


def _object(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _reason(head: MessageInfo, choice: ChoiceState) -> tuple[StopReason, str | None]:
    if choice.finish == "tool":
        return "tool_use", None
    if choice.finish == "length":
        return "max_tokens", None
    stop = head.stopped_by(choice) if choice.finish == "stop" else None
    return ("stop_sequence", stop) if stop is not None else ("end_turn", None)


def stop_that_ended(
    codec: TextCodec, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams
) -> str | None:
    """The stop string that begins first in the text of `tokens`; None when there is none."""
    detokenizer = Detokenizer(codec, prompt)
    ends = frozenset() if sampling.ignore_eos else codec.eos
    text = "".join(detokenizer.feed(token) for token in tokens if token not in ends) + detokenizer.finish()
    found = [(place, stop) for stop in sampling.stop if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


_LABEL = "x-anthropic-billing-header:"
_CHOICES = {"auto": ANY, "any": MUST, "none": NONE}


def refuse(asked: Counted) -> None:
    """Raises Refused for what would change the answer and can't be done."""
    if asked.mcp_servers:
        raise Refused("mcp_servers: this server does not call MCP servers; expected client tools", "mcp_servers")
    if asked.thread is not None:
        raise Refused(
            "thread: conversations are not stored; send all messages, without thread",
            "thread",
            details="thread_unsupported_request",
        )
    if asked.compaction is not None:
        raise Refused("compaction: conversations are not shortened; leave it out", "compaction")


def form_of(asked: Counted) -> Form | None:
    """What `output_config.format`, or `output_format` as it was called before, asks for. Raises Refused."""
    if asked.output_format is not None:
        return by_format(asked.output_format, "output_format")
    given = (asked.output_config or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise Refused("output_config.format: expected an object", "output_config")
    return by_format(given, "output_config.format")


def tools_of(model: ServedModel, asked: Counted) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, "custom"):
            raise Refused(
                f"tools.{place}: {tool.type[:40]} runs only on Anthropic's servers; expected client tools", "tools"
            )
        given.append(function(tool.name, tool.description, tool.input_schema))
    strict = [tool.name for tool in asked.tools or () if tool.strict]
    return toolbox(model, given, _choice(asked), strict)


def _choice(asked: Counted) -> ToolSelection:
    choice = asked.tool_choice
    if choice is None:
        return ToolSelection()
    one = bool(choice.disable_parallel_tool_use)
    if choice.type != "tool":
        return ToolSelection(_CHOICES[choice.type], one=one)
    if choice.name is None:
        raise Refused("tool_choice: type tool needs the tool's name", "tool_choice")
    return ToolSelection(MUST, (choice.name,), one=True)


def conversation(asked: Counted, box: Toolbox) -> TemplateInput:
    """An assistant's turn at the end is continued, as Anthropic does."""
    said: list[dict[str, Any]] = []
    if system := _system(asked.system or ""):
        said.append({"role": "system", "content": system})
    for place, turn in enumerate(asked.messages):
        said += _turn(turn, f"messages.{place}.content")
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        keywords.setdefault("enable_thinking", asked.thinking.type != "disabled")
    last = said[-1]
    go_on = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
    return TemplateInput(said, box.tools, keywords, go_on=go_on)


def _turn(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """The messages that one turn is: each result of a tool is one of its own, before what the user says."""
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    results = [block for block in blocks if block.type == "tool_result"]
    calls = [block for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    rest = [b for b in blocks if b.type not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    for block in results:
        yield speech.result(_text(block.content or "", where), block.tool_use_id or "", None)
    text = speech.text_of(((block.type, block.text) for block in rest), ("text",), where)
    if turn.role == "assistant":
        made = [speech.call(block.name or "", block.input or {}, block.id) for block in calls]
        yield speech.assistant(text, made, "".join(thoughts))
    elif rest or not results:
        yield {"role": turn.role, "content": text}


def _system(given: str | list[Block]) -> str:
    """Without the line by which Claude Code labels each request: with it no two prompts would begin alike."""
    if isinstance(given, str):
        return given
    return _text([block for block in given if not (block.text or "").startswith(_LABEL)], "system")


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return speech.text_of(((block.type, block.text) for block in content), ("text",), where)


router = APIRouter(route_class=typed())


@router.post("/messages", response_model=None, responses=described(MessageAnswer, named_events(), anthropic=True))
async def answer(asked: MessagesRequest, request: Request, context: TheServer) -> Response:
    """Answers a conversation."""
    context.check_model(asked.model)
    refuse(asked)
    box = tools_of(context.model, asked)
    form = form_of(asked)
    prompt = await context.prompt(conversation(asked, box))
    grammar = await context.grammar(prompt, form, box)
    how = generation_params(
        context.model,
        asked.speculation,
        asked.timeout,
        max_tokens=asked.max_tokens,
        temp=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        grammar=grammar,
        stop=stops(asked.stop_sequences),
    )

    def stopped_by(choice: ChoiceState) -> str | None:
        return stop_that_ended(context.model.codec, prompt.tokens, choice.tokens, how.sampling)

    head = MessageInfo(context.model.id, how.sampling.seed or 0, len(prompt.tokens), stopped_by)
    jobs = [ChoiceJob(prompt.tokens, how)]
    splitters = [splitter(context.model, prompt, box, form is not None, grammar is not None)]
    if not asked.stream:
        (choice,) = await context.whole(request, jobs, splitters, box.one)
        return as_json(message(head, choice))
    run = await context.streaming(request, jobs)
    return EventStream(PartStream(run, splitters, box.one), MessageEvents(head))


@router.post("/messages/count_tokens", response_model=None, responses=described(TokenCount, anthropic=True))
async def count(asked: Counted, context: TheServer) -> Response:
    """The tokens that a conversation is."""
    context.check_model(asked.model)
    refuse(asked)
    prompt = await context.prompt(conversation(asked, tools_of(context.model, asked)))
    return as_json(TokenCount(input_tokens=len(prompt.tokens)))
