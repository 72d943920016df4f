"""A chat's answer in OpenAI's shapes: whole, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from outrider.server.answers import sse
from outrider.server.answers.afterwards import Notes, no_notes
from outrider.server.answers.extras import NO_EXTRAS, Extras, speculated
from outrider.server.answers.naming import FINGERPRINT, about
from outrider.server.answers.parts import Part, Said, Thought
from outrider.server.answers.probabilities import Speller
from outrider.server.answers.stencil import Stencil
from outrider.server.answers.telling import Choice, Told, Waited, Words, sum_of, timings
from outrider.server.answers.thoughts import Count
from outrider.server.answers.usage import usage
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem
from outrider.server.shapes.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Finish,
    FunctionOut,
    ToolCallDelta,
    ToolCallOut,
)

_FINISH: dict[str, Finish] = {"length": "length", "tool": "tool_calls"}


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer have in common. `seed` is the request's, `prompt_tokens` its prompt's.

    `thoughts` counts a choice's; `speller`: for log-probabilities, if they are wanted. `notes`: of choices.
    """

    model: str
    seed: int
    prompt_tokens: int
    thoughts: Count
    speller: Speller | None = None
    notes: Notes = no_notes
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def beside(self, extras: Extras) -> dict[str, Any]:
        """What a choice has beside its text."""
        rows = self.speller.content(extras.logprobs) if self.speller is not None else None
        return {"logprobs": rows, "speculation": speculated(extras)}


def completion(head: Head, choices: Sequence[Choice]) -> ChatCompletion:
    """The whole answer."""
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=FINGERPRINT,
        choices=[_choice(head, choice) for choice in choices],
        usage=usage(head.prompt_tokens, choices, head.thoughts),
        timings=timings(sum_of(choices)),
        outrider=about(choices[0].result, head.seed, head.notes(choices)),
    )


class Events:
    """A stream's: each choice begins with its role and ends with its reason and its timings."""

    def __init__(self, head: Head, choices: int, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._calls = [0] * choices
        self._ended: list[Choice] = []
        self._stencil = cache(self._written)

    def begin(self) -> bytes:
        first = Delta(role="assistant", content="")
        return b"".join(_chunk(self._head, ChunkChoice(index=n, delta=first)) for n in range(len(self._calls)))

    def of(self, one: Words) -> bytes:
        match one:
            case Told(index=index, part=Said() | Thought() as part, extras=extras) if extras is NO_EXTRAS:
                return self._stencil(index, isinstance(part, Thought)).filled(part.text)
            case Told(index=index, part=part, extras=extras):
                delta = _delta(part, self._calls[index])
                self._calls[index] += isinstance(part, ToolCall)
                return _chunk(self._head, ChunkChoice(index=index, delta=delta, **self._head.beside(extras)))
            case Waited(note=note):
                return sse.comment(note)
            case Choice():
                self._ended.append(one)
                return _end(self._head, one)

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        head, ended = self._head, self._ended
        last = ChatChunk(
            id=head.id, created=head.created, model=head.model, system_fingerprint=FINGERPRINT, choices=[],
            usage=usage(head.prompt_tokens, ended, head.thoughts), timings=timings(sum_of(ended)),
            outrider=about(ended[0].result, head.seed, head.notes(ended)),
        )  # fmt: skip
        return sse.event(last.model_dump_json()) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        return sse.failed(problem)

    def _written(self, index: int, is_thought: bool) -> Stencil:
        kind = Thought if is_thought else Said
        return Stencil(lambda text: _chunk(self._head, ChunkChoice(index=index, delta=_delta(kind(text), 0))))


def call_id(call: ToolCall) -> str:
    """The model's own, or a fresh one."""
    return call.id or f"call_{secrets.token_hex(12)}"


def _chunk(head: Head, choice: ChunkChoice) -> bytes:
    chunk = ChatChunk(
        id=head.id, created=head.created, model=head.model, system_fingerprint=FINGERPRINT, choices=[choice]
    )
    return sse.event(chunk.model_dump_json())


def _end(head: Head, choice: Choice) -> bytes:
    last = ChunkChoice(
        index=choice.index,
        delta=Delta(),
        finish_reason=_FINISH.get(choice.finish, "stop"),
        **head.beside(choice.untold),
    )
    chunk = ChatChunk(
        id=head.id, created=head.created, model=head.model, system_fingerprint=FINGERPRINT, choices=[last],
        timings=timings(choice.timings), outrider=about(choice.result, head.seed, head.notes([choice])),
    )  # fmt: skip
    return sse.event(chunk.model_dump_json())


def _delta(part: Part, calls_before: int) -> Delta:
    match part:
        case Said(text=text):
            return Delta(content=text)
        case Thought(text=text):
            return Delta(reasoning_content=text)
        case ToolCall():
            made = FunctionOut(name=part.name, arguments=part.arguments)
            return Delta(tool_calls=[ToolCallDelta(index=calls_before, id=call_id(part), function=made)])


def _choice(head: Head, choice: Choice) -> ChatChoice:
    calls = [ToolCallOut(id=call_id(c), function=FunctionOut(name=c.name, arguments=c.arguments)) for c in choice.calls]
    message = AnswerMessage(
        content=choice.said if choice.said or not calls else None,
        reasoning_content=choice.thought or None,
        tool_calls=calls or None,
    )
    return ChatChoice(
        index=choice.index,
        message=message,
        finish_reason=_FINISH.get(choice.finish, "stop"),
        **head.beside(choice.extras),
    )
