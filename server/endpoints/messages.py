"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages."""

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
from outrider.server.answers.usage import about, messages_usage
from outrider.server.endpoints.json_route import JsonRoute, event_docs, response_docs
from outrider.server.mapping.conversation import (
    ANY,
    MUST,
    NONE,
    Toolbox,
    ToolSelection,
    assistant_message,
    function,
    past_call,
    text_of,
    tool_result,
    toolbox,
)
from outrider.server.mapping.generation_params import generation_params, stops
from outrider.server.mapping.output_format import OutputFormat, parse_output_format
from outrider.server.model.served import ServedModel, TemplateInput
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem, Refused
from outrider.server.server_context import TheServer, as_json
from outrider.server.shapes.messages import (
    AnswerBlock,
    Block,
    CountTokensRequest,
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
    """What is known before generation. `stopped_by` returns the stop sequence that ended a choice."""

    model: str
    seed: int
    prompt_tokens: int
    stopped_by: Callable[[ChoiceState], str | None]
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def message(head: MessageInfo, choice: ChoiceState) -> MessageAnswer:
    """Returns the full response."""
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
    """Writes a stream: message_start, content blocks, message_delta with the stop reason and usage, message_stop."""

    def __init__(self, head: MessageInfo) -> None:
        self._head = head
        self._at, self._now = -1, ""

    def begin(self) -> bytes:
        head = self._head
        begun = MessageAnswer(id=head.id, model=head.model, content=[], usage=messages_usage(head.prompt_tokens, None))
        return _event("message_start", message=begun.model_dump())

    def of(self, one: StreamItem) -> bytes:
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
        """Ends the current block and starts the block of `part`, if that is a new one."""
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
    """Returns the events that end block `at`, if there is one. The signature of thinking is empty: nothing verifies
    it."""
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
    """Returns the stop string that occurs first in the text of `tokens`, or None."""
    detokenizer = Detokenizer(codec, prompt)
    ends = frozenset() if sampling.ignore_eos else codec.eos
    text = "".join(detokenizer.feed(token) for token in tokens if token not in ends) + detokenizer.finish()
    found = [(place, stop) for stop in sampling.stop if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


_LABEL = "x-anthropic-billing-header:"
_CHOICES = {"auto": ANY, "any": MUST, "none": NONE}


def refuse(asked: CountTokensRequest) -> None:
    """Raises Refused for unsupported fields that would change the answer."""
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


def output_format_of(asked: CountTokensRequest) -> OutputFormat | None:
    """Returns the format of `output_config.format`, or of the older `output_format`. Raises Refused."""
    if asked.output_format is not None:
        return parse_output_format(asked.output_format, "output_format")
    given = (asked.output_config or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise Refused("output_config.format: expected an object", "output_config")
    return parse_output_format(given, "output_config.format")


def tools_of(model: ServedModel, asked: CountTokensRequest) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, "custom"):
            raise Refused(
                f"tools.{place}: {tool.type[:40]} runs only on Anthropic's servers; expected client tools", "tools"
            )
        given.append(function(tool.name, tool.description, tool.input_schema))
    strict = [tool.name for tool in asked.tools or () if tool.strict]
    return toolbox(model, given, _choice(asked), strict)


def _choice(asked: CountTokensRequest) -> ToolSelection:
    choice = asked.tool_choice
    if choice is None:
        return ToolSelection()
    one = bool(choice.disable_parallel_tool_use)
    if choice.type != "tool":
        return ToolSelection(_CHOICES[choice.type], one=one)
    if choice.name is None:
        raise Refused("tool_choice: type tool needs the tool's name", "tool_choice")
    return ToolSelection(MUST, (choice.name,), one=True)


def conversation(asked: CountTokensRequest, box: Toolbox) -> TemplateInput:
    """Converts to a template's input. A final assistant turn is continued, as in Anthropic's API."""
    messages: list[dict[str, Any]] = []
    if system := _system(asked.system or ""):
        messages.append({"role": "system", "content": system})
    for place, turn in enumerate(asked.messages):
        messages += _turn(turn, f"messages.{place}.content")
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        keywords.setdefault("enable_thinking", asked.thinking.type != "disabled")
    last = messages[-1]
    continue_final = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
    return TemplateInput(messages, box.tools, keywords, continue_final=continue_final)


def _turn(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """Converts one turn to messages. Tool results are messages of their own, before the user's text."""
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    results = [block for block in blocks if block.type == "tool_result"]
    calls = [block for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    rest = [b for b in blocks if b.type not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    for block in results:
        yield tool_result(_text(block.content or "", where), block.tool_use_id or "", None)
    text = text_of(((block.type, block.text) for block in rest), ("text",), where)
    if turn.role == "assistant":
        made = [past_call(block.name or "", block.input or {}, block.id) for block in calls]
        yield assistant_message(text, made, "".join(thoughts))
    elif rest or not results:
        yield {"role": turn.role, "content": text}


def _system(given: str | list[Block]) -> str:
    """Returns the system prompt without Claude Code's label, which differs for each request and would defeat the prompt
    cache."""
    if isinstance(given, str):
        return given
    return _text([block for block in given if not (block.text or "").startswith(_LABEL)], "system")


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return text_of(((block.type, block.text) for block in content), ("text",), where)


router = APIRouter(route_class=JsonRoute)


@router.post("/messages", response_model=None, responses=response_docs(MessageAnswer, event_docs(), anthropic=True))
async def answer(asked: MessagesRequest, request: Request, context: TheServer) -> Response:
    """Generates an answer to a conversation."""
    context.check_model(asked.model)
    refuse(asked)
    box = tools_of(context.model, asked)
    form = output_format_of(asked)
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


@router.post("/messages/count_tokens", response_model=None, responses=response_docs(TokenCount, anthropic=True))
async def count(asked: CountTokensRequest, context: TheServer) -> Response:
    """Counts the tokens of a conversation."""
    context.check_model(asked.model)
    refuse(asked)
    prompt = await context.prompt(conversation(asked, tools_of(context.model, asked)))
    return as_json(TokenCount(input_tokens=len(prompt.tokens)))
