"""What a text consists of: words for the reader, thoughts, calls of tools. Found by the model's own marks as it grows.

What may be the beginning of a mark is held back until it is known, so nothing given out ever changes. Knows text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from outrider.server.mapping.speech import Toolbox
from outrider.server.model.served import ServedModel, Thoughts, TokenizedPrompt
from outrider.server.model.tool_format import NoCall, SpanTags, ToolCall, ToolFormat


@dataclass(frozen=True, slots=True)
class TextPart:
    """Words for the reader; `at`: how many characters the model wrote before them, marks and thoughts included."""

    text: str
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """Words of the model's to itself."""

    text: str


Part = TextPart | ThinkingPart | ToolCall


class SplitterState(Enum):
    SAYING = 1
    THINKING = 2
    CALLING = 3
    SAYING_ALL = 4


class Splitter:
    """One text's. Marks that the model does not use, or that nobody asked for, are words like any other.

    White space between a mark and what follows it belongs to neither, line breaks where the words are in a form. A call
    that can't be read is given out as the words it is, unless the text was cut off in it.
    """

    def __init__(
        self, thinking: SpanTags | None = None, tools: ToolFormat | None = None, box: Toolbox | None = None,
        state: SplitterState = SplitterState.SAYING, in_form: bool = False, by_grammar: bool = False,
    ) -> None:  # fmt: skip
        """`in_form`: where words begin, all is words. `by_grammar`: an end mark in a call that can't be read yet is a
        part of it."""
        self._thinking, self._tools = thinking, tools
        self._box = box or Toolbox()
        self._state = state
        self._in_form, self._by_grammar = in_form, by_grammar
        self._held = ""
        self._told_call = False
        self._at = self._looked = 0
        self._after_mark = state is SplitterState.THINKING
        if state is SplitterState.SAYING and not self._marks():
            self._state = SplitterState.SAYING_ALL

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes, or goes on with."""
        if self._state is SplitterState.SAYING_ALL and text and not (self._held or self._after_mark):
            at, self._at = self._at, self._at + len(text)
            return [TextPart(text, at)]
        self._held += text
        return list(self._parts())

    def finish(self, cut: bool = False) -> list[Part]:
        """What was held back, now that no more will come. `cut`: the text was not at its end; a call then is none."""
        held, self._held = self._held, ""
        if self._state is SplitterState.CALLING:
            found = self._called(held, complete=self._end() == "")
            return [part for part in found if not (cut and isinstance(part, TextPart))]
        begun = _begun(held, self._tool_marks()) if cut and (self._box.must or self._told_call) else 0
        return self._shown(held[: len(held) - begun])

    def _parts(self) -> Iterator[Part]:
        while True:
            if self._in_form and self._words_begin():
                self._state = SplitterState.SAYING_ALL
            marks = self._marks()
            place, mark = _first(self._held, marks, self._looked)
            if mark is None:
                if self._state is not SplitterState.CALLING:
                    shown = len(self._held) - _begun(self._held, marks)
                    yield from self._shown(self._held[:shown])
                    self._forget(shown)
                return
            before = self._held[:place]
            if self._state is not SplitterState.CALLING:
                yield from self._shown(before)
            elif self._by_grammar and not self._calls(before):
                self._looked = place + len(mark)
                continue
            else:
                yield from self._called(before, True)
            self._forget(place + len(mark))
            self._turn(mark)

    def _forget(self, count: int) -> None:
        """The first characters of what is held have been told."""
        self._held, self._at, self._looked = self._held[count:], self._at + count, 0

    def _words_begin(self) -> bool:
        """Whether what is written is neither a mark nor the beginning of one."""
        text = self._held.lstrip("\n")
        if self._state is not SplitterState.SAYING or not text:
            return False
        return not any(text.startswith(mark) or mark.startswith(text) for mark in self._marks())

    def _turn(self, mark: str) -> None:
        if self._state is not SplitterState.SAYING:
            self._state = SplitterState.SAYING
        elif self._thinking is not None and mark == self._thinking.start:
            self._state = SplitterState.THINKING
        else:
            self._state = SplitterState.CALLING
        self._after_mark = self._state is not SplitterState.CALLING

    def _marks(self) -> tuple[str, ...]:
        if self._state is SplitterState.SAYING_ALL:
            return ()
        if self._state is SplitterState.SAYING:
            return ((self._thinking.start,) if self._thinking is not None else ()) + self._tool_marks()
        return (end,) if (end := self._end()) else ()

    def _tool_marks(self) -> tuple[str, ...]:
        return (self._tools.tags.start,) if self._tools is not None and self._box.tools else ()

    def _end(self) -> str:
        tags = (
            self._thinking
            if self._state is SplitterState.THINKING
            else self._tools.tags
            if self._tools is not None
            else None
        )
        return tags.end if tags is not None else ""

    def _shown(self, text: str) -> list[Part]:
        whole = len(text)
        if self._after_mark:
            text = text.lstrip("\n" if self._state is SplitterState.SAYING_ALL else None)
            self._after_mark = not text
        if not text:
            return []
        return [
            ThinkingPart(text)
            if self._state is SplitterState.THINKING
            else TextPart(text, self._at + whole - len(text))
        ]

    def _called(self, text: str, complete: bool) -> list[Part]:
        """The calls that `text` is, or the words that it is when it can't be read, or was cut off."""
        found = self._calls(text) if complete else []
        self._told_call |= bool(found)
        if found or self._tools is None:
            return found
        tags = self._tools.tags
        return [TextPart(tags.start + text + (tags.end if complete else ""), self._at - len(tags.start))]

    def _calls(self, text: str) -> list[Part]:
        try:
            return list(self._tools.calls(text, self._box.tools)) if self._tools is not None else []
        except NoCall:
            return []


def splitter(model: ServedModel, prompt: TokenizedPrompt, box: Toolbox, in_form: bool, by_grammar: bool) -> Splitter:
    """For an answer to `prompt`, which may begin inside a thought."""
    state = SplitterState.THINKING if prompt.thoughts is Thoughts.BEGUN else SplitterState.SAYING
    thinking = None if in_form and prompt.thoughts is Thoughts.NONE else model.thinking
    return Splitter(thinking, model.tools, box, state, in_form, by_grammar)


def _first(text: str, marks: tuple[str, ...], start: int) -> tuple[int, str | None]:
    places = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    return min(places) if places else (-1, None)


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that begins a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
