"""Formats answers for an API, whole or as a stream of server-sent events."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from outrider import __version__
from outrider.orchestrator.client.dialogue import Chunk
from outrider.server.answers.choices import AnswerPlan, ChoiceState, KeepAlive, Part, PartUpdate, StreamItem
from outrider.server.answers.usage import build_statistics, build_usage, create_logprob_formatters
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem
from outrider.server.schemas import Sampling

FINGERPRINT = f"outrider-{__version__}"
DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str | None = None) -> bytes:
    """Returns one server-sent event. `data` is JSON without line breaks."""
    named = f"event: {name}\n".encode() if name is not None else b""
    return b"%bdata: %b\n\n" % (named, data)


def typed_event(kind: str, /, **fields: Any) -> bytes:
    """Returns an event whose name is also its `type`. Fields may be Pydantic models."""
    return event(to_json({"type": kind, **fields}), kind)


class AnswerFormatter(ABC):
    """Formats the answer of one request for an API, whole or as events. Methods may write several events, or none."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.plan = plan

    @abstractmethod
    def format_response(self) -> BaseModel:
        """Returns the full response, once all choices have ended."""

    @abstractmethod
    def begin(self) -> bytes:
        """Writes the start of a stream."""

    def format_item(self, one: StreamItem) -> bytes:
        """Writes one item of a stream."""
        match one:
            case KeepAlive(note=note):
                return self._keep_alive(note)
            case PartUpdate():
                return self._format_part(one)
            case ChoiceState():
                return self._format_choice_end(one)

    def end(self) -> bytes:
        """Writes what follows the last choice."""
        return b""

    @abstractmethod
    def format_error(self, problem: Problem) -> bytes:
        """Writes an error."""

    def _keep_alive(self, note: str) -> bytes:
        """Writes a comment, which keeps the connection alive and which clients ignore."""
        return f": {note}\n\n".encode()

    @abstractmethod
    def _format_part(self, update: PartUpdate) -> bytes: ...

    @abstractmethod
    def _format_choice_end(self, choice: ChoiceState) -> bytes: ...


class BlockFormatter(AnswerFormatter):
    """Formats an answer of one choice as a sequence of blocks: consecutive text, consecutive thinking, or a call.

    `_at` is the number of the current block, and `_kind` its kind; None before the first block.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        super().__init__(plan)
        self._at = -1
        self._kind: type[Part] | None = None

    def _format_part(self, update: PartUpdate) -> bytes:
        part, before = update.part, b""
        if type(part) is not self._kind or isinstance(part, ToolCall):
            before = self._end_block()
            self._at, self._kind = self._at + 1, type(part)
            before += self._format_block_start(part)
        return before + self._format_block_delta(update)

    def _end_block(self, status: str = "completed") -> bytes:
        """Ends the current block, if there is one."""
        (choice,) = self.plan.choices
        return self._format_block_end(choice.parts[self._at], status) if self._kind is not None else b""

    @abstractmethod
    def _format_block_start(self, part: Part) -> bytes:
        """Begins the block of `part`, without its content."""

    @abstractmethod
    def _format_block_delta(self, update: PartUpdate) -> bytes:
        """Adds content to the block."""

    @abstractmethod
    def _format_block_end(self, part: Part, status: str) -> bytes:
        """Ends the block, whose whole content is `part`."""


class CompletionFormatter(AnswerFormatter):
    """Formats chat or text completions. In a stream each choice ends with its finish reason and timings.

    `prefix` starts the answer's id. `response` is the class of the full response, `chunk` that of a streamed event.
    """

    prefix: str
    response: type[BaseModel]
    chunk: type[BaseModel]

    def __init__(self, plan: AnswerPlan, payload: Sampling) -> None:
        """Raises Problem for stream_options without a stream."""
        super().__init__(plan)
        if payload.stream_options is not None and not payload.stream:
            raise Problem("stream_options needs stream: true", "stream_options")
        self._include_usage = payload.stream_options is not None and payload.stream_options.include_usage
        self._logprobs = create_logprob_formatters(plan)
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": plan.created,
            "model": plan.model.id,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def _format_choice(self, choice: ChoiceState) -> BaseModel:
        """Returns a choice of the full response."""

    @abstractmethod
    def _format_chunk_choice(
        self, choice: ChoiceState, part: Part | None, chunks: Sequence[Chunk] = (), finish: str | None = None
    ) -> BaseModel:
        """Returns a choice of an event. `part` None: the choice ends, by the reason `finish`."""

    def format_response(self) -> BaseModel:
        """Returns the full response. Usage and timings include all choices, even those that are not returned."""
        kept = self._returned_choices()
        numbers = build_statistics(self.plan.choices, self.plan.notes, kept[0])
        choices = list(map(self._format_choice, kept))
        return self.response(**self._common, choices=choices, usage=build_usage(self.plan), **numbers)

    def _format_part(self, update: PartUpdate) -> bytes:
        return self._event([self._format_chunk_choice(update.choice, update.part, update.chunks)])

    def _format_choice_end(self, choice: ChoiceState) -> bytes:
        return self._event([self._format_chunk_choice(choice, None, choice.unsent_chunks, choice.finish)], [choice])

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._event([], self.plan.choices, usage=build_usage(self.plan)) + DONE

    def format_error(self, problem: Problem) -> bytes:
        return event(problem.body(anthropic=False))

    def _returned_choices(self) -> list[ChoiceState]:
        """Returns the choices of the full response."""
        return self.plan.choices

    def _event(self, choices: list[BaseModel], ended: Sequence[ChoiceState] = (), **more: Any) -> bytes:
        """Returns an event. `ended`: the choices whose timings it reports."""
        if ended:
            more |= build_statistics(ended, self.plan.notes)
        return event(to_json(self.chunk(**self._common, choices=choices, **more)))
