"""An answer in Anthropic's shapes: whole, or as the events of a stream, block by block."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.server.answers import sse
from outrider.server.answers.naming import about
from outrider.server.answers.parts import Part, Said, Thought
from outrider.server.answers.telling import Choice, Told, Waited, Words, timings
from outrider.server.answers.usage import messages_usage
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem
from outrider.server.shapes.messages import (
    AnswerBlock,
    MessageAnswer,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

PING = sse.event('{"type":"ping"}', "ping")


@dataclass(frozen=True, slots=True)
class Head:
    """What is known before the first word. `stopped_by`: the stop sequence that ended a choice."""

    model: str
    seed: int
    prompt_tokens: int
    stopped_by: Callable[[Choice], str | None]
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def message(head: Head, choice: Choice) -> MessageAnswer:
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


class Events:
    """A stream's: message_start, blocks, message_delta with the reason and the numbers, message_stop."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._at, self._now = -1, ""

    def begin(self) -> bytes:
        head = self._head
        begun = MessageAnswer(id=head.id, model=head.model, content=[], usage=messages_usage(head.prompt_tokens, None))
        return _event("message_start", message=begun.model_dump())

    def of(self, one: Words) -> bytes:
        match one:
            case Waited():
                return PING
            case Told(part=part):
                return self._turn(part) + _event("content_block_delta", index=self._at, delta=_delta(part))
            case Choice():
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

    def _last(self, choice: Choice) -> bytes:
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
    before = _event("content_block_delta", index=at, delta=signed) if kind == Thought.__name__ else b""
    return before + _event("content_block_stop", index=at)


def _kind(part: Part) -> str:
    return type(part).__name__


def _begun(part: Part) -> AnswerBlock:
    match part:
        case Said():
            return TextBlock(text="")
        case Thought():
            return ThinkingBlock(thinking="")
        case ToolCall():
            return ToolUseBlock(id=_id(part), name=part.name, input={})


def _delta(part: Part) -> dict[str, str]:
    match part:
        case Said(text=text):
            return {"type": "text_delta", "text": text}
        case Thought(text=text):
            return {"type": "thinking_delta", "thinking": text}
        case ToolCall(arguments=arguments):
            return {"type": "input_json_delta", "partial_json": arguments}


def _block(part: Part) -> AnswerBlock:
    match part:
        case Said(text=text):
            return TextBlock(text=text)
        case Thought(text=text):
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


def _reason(head: Head, choice: Choice) -> tuple[StopReason, str | None]:
    if choice.finish == "tool":
        return "tool_use", None
    if choice.finish == "length":
        return "max_tokens", None
    stop = head.stopped_by(choice) if choice.finish == "stop" else None
    return ("stop_sequence", stop) if stop is not None else ("end_turn", None)
