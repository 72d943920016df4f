"""Formats answers for an API, whole or as a stream of events; `CompletionFormatter` for chat and text completions."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from pydantic import BaseModel

from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.answers import sse
from outrider.server.answers.parts import (
    NO_EXTRAS,
    ChoiceState,
    Extras,
    KeepAlive,
    Part,
    PartUpdate,
    StreamItem,
    TextPart,
    ThinkingPart,
    timings,
    total_timings,
)
from outrider.server.answers.sse import EventWriter, Stencil
from outrider.server.answers.usage import LogprobFormatter, SchemaChecker, ThoughtCounter, about, no_notes, usage
from outrider.server.problems import Problem

FINGERPRINT = f"outrider-{PACKAGE_VERSION}"


@dataclass(frozen=True, slots=True)
class AnswerInfo:
    """What is known before generation. `seed` is the request's.

    `thoughts` counts thinking tokens; None: they are not reported. `speller` is None without log-probabilities. `notes`
    checks schemas.
    """

    model: str
    seed: int
    prompt_tokens: int
    thoughts: ThoughtCounter | None = None
    speller: LogprobFormatter | None = None
    notes: SchemaChecker = no_notes
    created: int = field(default_factory=lambda: int(time.time()))


class AnswerFormatter(EventWriter, Protocol):
    """Formats the answer of one request."""

    def whole(self, choices: list[ChoiceState]) -> BaseModel:
        """Returns the full response."""


class CompletionFormatter(ABC):
    """Formats chat or text completions. In a stream each choice ends with its finish reason and timings.

    `prefix` begins the answer's id. `response` is the full response's shape, `chunk` a streamed event's.
    """

    prefix: str
    response: type[BaseModel]
    chunk: type[BaseModel]

    def __init__(self, info: AnswerInfo, include_usage: bool) -> None:
        self.info = info
        self._include_usage = include_usage
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": info.created,
            "model": info.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._ended: list[ChoiceState] = []
        self._stencil = cache(self._stencil_of)

    @abstractmethod
    def begin(self) -> bytes:
        """The events at the start."""

    @abstractmethod
    def _choice(self, choice: ChoiceState) -> BaseModel:
        """Returns a choice of the full response."""

    @abstractmethod
    def _chunk_choice(self, index: int, part: Part | None, extras: Extras, finish: str | None = None) -> BaseModel:
        """Returns a choice of an event. `part` None: the choice ends, by the reason `finish`."""

    def whole(self, choices: list[ChoiceState]) -> BaseModel:
        """Returns the full response. Usage and timings include all choices, also those that are not kept."""
        kept = self._kept(choices)
        total = usage(self.info.prompt_tokens, choices, self.info.thoughts)
        numbers = {"timings": timings(total_timings(choices)), "outrider": self._about(kept)}
        return self.response(**self._common, **numbers, usage=total, choices=list(map(self._choice, kept)))

    def of(self, one: StreamItem) -> bytes:
        match one:
            case PartUpdate(index=index, part=TextPart() | ThinkingPart() as part, extras=extras) if (
                extras is NO_EXTRAS
            ):
                return self._stencil(index, isinstance(part, ThinkingPart)).filled(part.text)
            case PartUpdate(index=index, part=part, extras=extras):
                return self._event([self._chunk_choice(index, part, extras)])
            case KeepAlive(note=note):
                return sse.comment(note)
            case ChoiceState(index=index, untold=extras, finish=finish):
                self._ended.append(one)
                return self._event([self._chunk_choice(index, None, extras, finish)], [one])

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        total = usage(self.info.prompt_tokens, self._ended, self.info.thoughts)
        return self._event([], self._ended, usage=total) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        return sse.event(problem.body(anthropic=False, request_id="").decode())

    def _kept(self, choices: list[ChoiceState]) -> list[ChoiceState]:
        return choices

    def _about(self, choices: Sequence[ChoiceState]) -> BaseModel:
        return about(choices[0].result, self.info.seed, self.info.notes(choices))

    def _event(self, choices: list[BaseModel], ended: Sequence[ChoiceState] = (), **more: Any) -> bytes:
        """Returns an event. `ended`: the choices whose timings it reports."""
        if ended:
            more |= {"timings": timings(total_timings(ended)), "outrider": self._about(ended)}
        return sse.event(self.chunk(**self._common, choices=choices, **more).model_dump_json())

    def _stencil_of(self, index: int, is_thought: bool) -> Stencil:
        kind = ThinkingPart if is_thought else TextPart
        return Stencil(lambda text: self._event([self._chunk_choice(index, kind(text), NO_EXTRAS)]))
