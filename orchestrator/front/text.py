"""Converts committed tokens to text: whole characters only, and nothing of a stop string.

Each request has one `TextStream`. It handles tokens one by one, so that the text does not depend on how they were
committed. Knows one request's tokens; knows nothing of sockets and rounds.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.orchestrator.pairing.tokenizer import TextCodec

LONGEST_CHARACTER = 4  # bytes, so tokens at most


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text for the reader, its tokens, and whether a stop string ended the text here."""

    text: str
    tokens: tuple[int, ...]
    stopped: bool = False


class TextStream:
    """The text of one request. It completes a character that `prompt` leaves unfinished; `ends` have no text."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str], ends: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(codec, prompt)
        self._stops = StopFinder(stop)
        self._ends = ends
        self._skipped = 0

    def resume(self, tokens: Sequence[int], characters: int) -> TextDelta:
        """Feeds the tokens that the reader has received before, and returns what `feed` returned then.

        If the reader has more `characters` than these tokens complete, the text had ended; they are not returned again.
        """
        delta = self.feed(tokens)
        self._skipped = max(characters - len(delta.text), 0)
        return delta

    def feed(self, tokens: Sequence[int]) -> TextDelta:
        """Returns the text that `tokens` complete. Tokens after the one that completes a stop string are dropped."""
        shown = ""
        for count, token in enumerate(tokens, start=1):
            if token not in self._ends:
                shown += self._stops.feed(self._detokenizer.feed(token))
            if self._stops.found:
                return TextDelta(self._new(shown), tuple(tokens[:count]), stopped=True)
        return TextDelta(self._new(shown), tuple(tokens))

    def finish(self) -> TextDelta:
        """Returns the text held back, after the last token."""
        shown = self._stops.feed(self._detokenizer.finish())
        return TextDelta(self._new(shown + self._stops.finish()), (), self._stops.found)

    def _new(self, text: str) -> str:
        """Returns the part that the reader has not received."""
        new = text[self._skipped :]
        self._skipped -= len(text) - len(new)
        return new


class Detokenizer:
    """Converts tokens to text, holding back a character until all its bytes have come.

    Bytes that can't become a character are U+FFFD once that is certain; so text once returned never changes.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int]) -> None:
        self._spelling = codec.spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-LONGEST_CHARACTER:]:
            self.feed(token)  # the prompt may end inside a character, which is then the output's

    def feed(self, token: int) -> str:
        """Returns the text that `token` completes, which may be empty."""
        return self._characters.decode(self._spelling.of(token))

    def finish(self) -> str:
        """Returns the bytes of an incomplete character as U+FFFD."""
        return self._characters.decode(b"", final=True)


class StopFinder:
    """Passes text on, except what may begin a stop string; `found` is True when one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Returns the text that may be shown; nothing from the first stop string on."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        self.found = bool(starts)
        end = min(starts) if starts else len(self._held) - self._partial_length()
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        """Returns the text held back for a stop string that never came."""
        return "" if self.found else self._held

    def _partial_length(self) -> int:
        """Returns the length of the longest suffix of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
