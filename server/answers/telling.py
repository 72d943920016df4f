"""A run's news as parts: what every API tells in its own events. The end of a choice says why, and its numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.orchestrator.client.result import GenerationResult
from outrider.orchestrator.front import totals
from outrider.protocol.messages import Timings
from outrider.server.answers.extras import NO_EXTRAS, Extras, joined
from outrider.server.answers.parts import Part, Said, Splitter, Thought
from outrider.server.answers.run import Ended, Grown, Reading, Run
from outrider.server.model.tool_format import ToolCall

SILENCE_SECONDS = 5.0
"""After so long without news a stream says that it is there."""


@dataclass(frozen=True, slots=True)
class Waited:
    """Nothing to tell but that it goes on; `note` says what is being done."""

    note: str


@dataclass(frozen=True, slots=True)
class Told:
    """A part of choice `index`, and what the tokens have that came with it or since the part before."""

    index: int
    part: Part
    extras: Extras = NO_EXTRAS


@dataclass(slots=True)
class Choice:
    """All that is known of choice `index`. `finish` is eos, stop, length, cancelled or tool; empty: not finished.

    `grown`: what its tokens have beside their text; `untold`: the last of it, which no part came after.
    """

    index: int
    parts: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    grown: list[Extras] = field(default_factory=list)
    untold: Extras = NO_EXTRAS
    finish: str = ""
    result: GenerationResult | None = None

    @property
    def said(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def extras(self) -> Extras:
        return joined(self.grown)

    @property
    def timings(self) -> Timings:
        return self.result.timings if self.result is not None else Timings()

    def take(self, one: Grown | Ended, splitter: Splitter, one_call: bool) -> list[Part]:
        """The parts that the news has for a reader."""
        parts = splitter.feed(one.text) if isinstance(one, Grown) else splitter.finish()
        if one_call:
            first = next((place for place, part in enumerate(parts, 1) if isinstance(part, ToolCall)), len(parts))
            parts = parts[:first]
        for part in parts:
            self._add(part)
        if isinstance(one, Grown):
            self.tokens += one.tokens
            if one.extras is not NO_EXTRAS:
                self.grown.append(one.extras)
                self.untold += one.extras
        else:
            self.result, self.finish = one.result, one.result.finish_reason
        if (one_call or self.finish in ("eos", "stop")) and self.calls:
            self.finish = "tool"
        return parts

    def _add(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, Said) and isinstance(last, Said):
            self.parts[-1] = Said(last.text + part.text, last.at)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            self.parts[-1] = Thought(last.text + part.text)
        else:
            self.parts.append(part)


async def telling(
    run: Run, splitters: Sequence[Splitter], one_call: bool = False
) -> AsyncIterator[Waited | Told | Choice]:
    """Parts as they come, and each choice at its end. `one_call`: a choice ends with its first call of a tool.

    Raises:
        OutriderError: a choice failed.
    """
    choices = [Choice(index) for index in range(len(splitters))]
    while not run.over:
        news = await run.news(SILENCE_SECONDS)
        if not news:
            yield Waited("still here")
        for one in news:
            if isinstance(one, Reading):
                yield Waited(f"prompt {one.done}/{one.total}")
                continue
            choice = choices[one.index]
            if choice.finish:
                if isinstance(one, Ended):
                    choice.result = one.result
                    yield choice
                continue
            for part in choice.take(one, splitters[one.index], one_call):
                yield Told(choice.index, part, choice.untold)
                choice.untold = NO_EXTRAS
            if choice.finish:
                if isinstance(one, Grown):
                    await run.end(choice.index)
                else:
                    yield choice


async def whole(run: Run, splitters: Sequence[Splitter], one_call: bool = False) -> list[Choice]:
    """All choices, finished, in order.

    Raises:
        OutriderError: one failed.
    """
    told = [one async for one in telling(run, splitters, one_call) if isinstance(one, Choice)]
    return sorted(told, key=lambda choice: choice.index)


def sum_of(choices: Sequence[Choice]) -> Timings:
    """The numbers of all choices together."""
    return reduce(totals.add, (choice.timings for choice in choices))


def timings(times: Timings) -> dict[str, Any]:
    """As llama.cpp writes them; each round's turnaround is left out, for there are as many as rounds."""
    found: dict[str, Any] = to_jsonable_python(times, exclude={"turnaround_ms"})  # a sixth of what `asdict` takes
    found["prompt_per_second"] = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
    return found
