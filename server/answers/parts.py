"""What a text consists of: words for the reader, thoughts, calls of tools. Found by the model's own marks as it grows.

What may be the beginning of a mark is held back until it is known, so nothing given out ever changes. Knows text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from outrider.server.mapping.toolbox import Toolbox
from outrider.server.model.served import Prompt, ServedModel
from outrider.server.model.thinking import Tags
from outrider.server.model.tool_format import NoCall, ToolCall, ToolFormat


@dataclass(frozen=True, slots=True)
class Said:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words of the model's to itself."""

    text: str


Part = Said | Thought | ToolCall


class State(Enum):
    SAYING = 1
    THINKING = 2
    CALLING = 3


class Splitter:
    """One text's. Marks that the model does not use, or that nobody asked for, are words like any other.

    White space between a mark and what follows it belongs to neither. A call that can't be read is given out as the
    words it is.
    """

    def __init__(
        self, thinking: Tags | None = None, tools: ToolFormat | None = None, box: Toolbox | None = None,
        state: State = State.SAYING,
    ) -> None:  # fmt: skip
        self._thinking, self._tools = thinking, tools
        self._box = box or Toolbox()
        self._state = state
        self._held = ""
        self._after_mark = state is State.THINKING

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes, or goes on with."""
        self._held += text
        return list(self._parts())

    def finish(self) -> list[Part]:
        """What was held back, now that no more will come."""
        held, self._held = self._held, ""
        if self._state is State.CALLING:
            return list(self._called(held, complete=self._end() == ""))
        return self._shown(held)

    def _parts(self) -> Iterator[Part]:
        while True:
            marks = self._marks()
            place, mark = _first(self._held, marks)
            if mark is None:
                if self._state is not State.CALLING:
                    kept = _begun(self._held, marks)
                    shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
                    yield from self._shown(shown)
                return
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            yield from self._called(before, True) if self._state is State.CALLING else self._shown(before)
            self._turn(mark)

    def _turn(self, mark: str) -> None:
        if self._state is not State.SAYING:
            self._state = State.SAYING
        elif self._thinking is not None and mark == self._thinking.start:
            self._state = State.THINKING
        else:
            self._state = State.CALLING
        self._after_mark = self._state is not State.CALLING

    def _marks(self) -> tuple[str, ...]:
        if self._state is State.SAYING:
            tools = (self._tools.tags.start,) if self._tools is not None and self._box.tools else ()
            return ((self._thinking.start,) if self._thinking is not None else ()) + tools
        return (end,) if (end := self._end()) else ()

    def _end(self) -> str:
        tags = (
            self._thinking if self._state is State.THINKING else self._tools.tags if self._tools is not None else None
        )
        return tags.end if tags is not None else ""

    def _shown(self, text: str) -> list[Part]:
        if self._after_mark:
            text = text.lstrip()
            self._after_mark = not text
        if not text:
            return []
        return [Thought(text) if self._state is State.THINKING else Said(text)]

    def _called(self, text: str, complete: bool) -> Iterator[Part]:
        if self._tools is None:
            return
        try:
            if not complete:
                raise NoCall("it was cut off")
            yield from self._tools.calls(text, self._box.tools)
        except NoCall:
            tags = self._tools.tags
            yield Said(tags.start + text + (tags.end if complete else ""))


def splitter(model: ServedModel, prompt: Prompt, box: Toolbox, in_form: bool = False) -> Splitter:
    """For an answer to `prompt`, which may begin it inside a thought or a call. One in a form is words alone."""
    if in_form:
        return Splitter()
    state = State.CALLING if prompt.calls else State.THINKING if prompt.thinks else State.SAYING
    return Splitter(model.thinking, model.tools, box, state)


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str | None]:
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(places) if places else (-1, None)


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that begins a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
