"""The items that a response's output is made of: a message, a thought or a call each, as it grows and whole."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.server.answers.parts import Part, Said, Thought
from outrider.server.answers.probabilities import Wording
from outrider.server.model.tool_format import ToolCall
from outrider.server.shapes.chat import SpelledToken
from outrider.server.shapes.responses import (
    Output,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

_PREFIX = {Said: "msg", Thought: "rs", ToolCall: "fc"}


class Item:
    """A part that grows, under its own id, with the log-probabilities of its words, if there is a `wording`."""

    def __init__(self, part: Part, status: str, wording: Wording | None) -> None:
        self.part = part
        self._wording = wording
        self.rows = self._next(part)
        self.status = status
        self.id = f"{_PREFIX[type(part)]}_{secrets.token_hex(12)}"
        self._call_id = part.id or f"call_{secrets.token_hex(12)}" if isinstance(part, ToolCall) else ""

    @property
    def word(self) -> str:
        return "output_text" if isinstance(self.part, Said) else "reasoning_text"

    def content(self, text: str) -> dict[str, Any]:
        """The one part of its content with `text`."""
        return (self._words(text) if isinstance(self.part, Said) else ReasoningText(text=text)).model_dump()

    def grow(self, part: Part) -> list[SpelledToken]:
        """Returns the log-probabilities that came with it."""
        rows = self._next(part)
        self.rows += rows
        if isinstance(self.part, Said) and isinstance(part, Said):
            self.part = Said(self.part.text + part.text, self.part.at)
        elif isinstance(self.part, Thought) and isinstance(part, Thought):
            self.part = Thought(self.part.text + part.text)
        return rows

    def _next(self, part: Part) -> list[SpelledToken]:
        return self._wording.next(part) if self._wording is not None and isinstance(part, Said) else []

    def _words(self, text: str) -> OutputText:
        rows = self.rows if text else []
        return OutputText(text=text, logprobs=rows if self._wording is not None else None)

    def empty(self) -> Output:
        match self.part:
            case Said():
                return OutputMessage(id=self.id, status=self.status, content=[])
            case Thought():
                return OutputReasoning(id=self.id, status=self.status, content=[])
            case ToolCall(name=name):
                return OutputCall(id=self.id, call_id=self._call_id, name=name, arguments="", status=self.status)

    def whole(self) -> Output:
        match self.part:
            case Said(text=text):
                return OutputMessage(id=self.id, status=self.status, content=[self._words(text)])
            case Thought(text=text):
                return OutputReasoning(id=self.id, status=self.status, content=[ReasoningText(text=text)])
            case ToolCall(name=name, arguments=arguments):
                return OutputCall(id=self.id, call_id=self._call_id, name=name, arguments=arguments, status=self.status)
