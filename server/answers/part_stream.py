"""A run's news as parts: what every API tells in its own events. The end of a choice says why, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.protocol.messages import Timings
from outrider.server.answers.parts import Part, Splitter, TextPart, ThinkingPart
from outrider.server.answers.run import (
    NO_EXTRAS,
    AtOnce,
    ChoiceEnded,
    ChoicePrefill,
    ChoiceText,
    Extras,
    News,
    RequestRun,
    joined,
)
from outrider.server.model.tool_format import ToolCall

SILENCE_SECONDS = 5.0
"""After so long without news a stream says that it is there."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Nothing to tell but that it goes on; `note` says what is being done."""

    note: str


@dataclass(frozen=True, slots=True)
class PartUpdate:
    """A part of choice `index`, and what the tokens have that came with it or since the part before."""

    index: int
    part: Part
    extras: Extras = NO_EXTRAS


@dataclass(slots=True)
class ChoiceState:
    """All that is known of choice `index`. `finish` is eos, stop, length, cancelled or tool; empty: not finished.

    `pieces`: its parts as they came; `grown`: what its tokens have beside their text; `untold`: the last of it, which
    no part came after.
    """

    index: int
    pieces: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    grown: list[Extras] = field(default_factory=list)
    untold: Extras = NO_EXTRAS
    finish: str = ""
    result: GenerationResult | None = None

    @property
    def parts(self) -> list[Part]:
        """Words that follow on words, and thoughts on thoughts, are one part."""
        found: list[Part] = []
        for piece in self.pieces:
            last = found[-1] if found else None
            if isinstance(piece, TextPart) and isinstance(last, TextPart):
                found[-1] = TextPart(last.text + piece.text, last.at)
            elif isinstance(piece, ThinkingPart) and isinstance(last, ThinkingPart):
                found[-1] = ThinkingPart(last.text + piece.text)
            else:
                found.append(piece)
        return found

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextPart))

    @property
    def thought(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ThinkingPart))

    @property
    def calls(self) -> list[ToolCall]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]

    @property
    def extras(self) -> Extras:
        return joined(self.grown)

    @property
    def timings(self) -> Timings:
        return self.result.timings if self.result is not None else Timings()

    def take(self, one: ChoiceText | ChoiceEnded, splitter: Splitter, one_call: bool) -> list[Part]:
        """The parts that the news has for a reader."""
        if isinstance(one, ChoiceText):
            parts = splitter.feed(one.text)
        else:
            parts = splitter.finish(cut=one.result.finish_reason == "length")
        if one_call:
            first = next((place for place, part in enumerate(parts, 1) if isinstance(part, ToolCall)), len(parts))
            parts = parts[:first]
        self.pieces += parts
        if isinstance(one, ChoiceText):
            self.tokens += one.tokens
            if one.extras is not NO_EXTRAS:
                self.grown.append(one.extras)
                self.untold += one.extras
        else:
            self.result, self.finish = one.result, one.result.finish_reason
        if (one_call or self.finish in ("eos", "stop")) and self.calls:
            self.finish = "tool"
        return parts


Words = KeepAlive | PartUpdate | ChoiceState


class PartStream:
    """Parts as they come, and each choice at its end. `one_call`: a choice ends with its first call of a tool."""

    def __init__(self, run: RequestRun, splitters: Sequence[Splitter], one_call: bool = False) -> None:
        self._run = run
        self._splitters = splitters
        self._one_call = one_call
        self._choices = [ChoiceState(index) for index in range(len(splitters))]

    @property
    def over(self) -> bool:
        """Whether all has been told."""
        return self._run.over

    async def next(self, at_once: AtOnce | None = None) -> list[Words]:
        """What there is to tell, but for what `at_once` took.

        Raises:
            OutriderError: a choice failed.
        """
        news = await self._run.news(SILENCE_SECONDS, at_once)
        found: list[Words] = [] if news else [KeepAlive("still here")]
        for one in news:
            found += self._of(one)
            if isinstance(one, ChoiceText) and self._choices[one.index].finish:
                await self._run.end(one.index)
        return found

    def text(self, news: News | Exception) -> Iterator[Words] | None:
        """What more text has for a reader; None: it is something else, or may end its choice."""
        return self._of(news) if isinstance(news, ChoiceText) and not self._one_call else None

    def _of(self, one: News) -> Iterator[Words]:
        if isinstance(one, ChoicePrefill):
            yield KeepAlive(f"prompt {one.done}/{one.total}")
            return
        choice = self._choices[one.index]
        if not choice.finish:
            for part in choice.take(one, self._splitters[one.index], self._one_call):
                yield PartUpdate(choice.index, part, choice.untold)
                choice.untold = NO_EXTRAS
        elif isinstance(one, ChoiceEnded):
            choice.result = one.result
        if isinstance(one, ChoiceEnded):
            yield choice

    async def close(self) -> None:
        """Cancels what is not finished."""
        await self._run.close()


async def whole(run: RequestRun, splitters: Sequence[Splitter], one_call: bool = False) -> list[ChoiceState]:
    """All choices, finished, in order.

    Raises:
        OutriderError: one failed.
    """
    parts = PartStream(run, splitters, one_call)
    told: list[Words] = []
    while not parts.over:
        told += await parts.next()
    return sorted((one for one in told if isinstance(one, ChoiceState)), key=lambda choice: choice.index)


def sum_of(choices: Sequence[ChoiceState]) -> Timings:
    """The numbers of all choices together."""
    return reduce(add, (choice.timings for choice in choices))


def timings(times: Timings) -> dict[str, Any]:
    """As llama.cpp writes them; each round's turnaround is left out, for there are as many as rounds."""
    found: dict[str, Any] = to_jsonable_python(times, exclude={"turnaround_ms"})  # a sixth of what `asdict` takes
    found["prompt_per_second"] = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
    return found
