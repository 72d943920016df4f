"""Committed tokens to text for a reader: whole characters only, and nothing of a stop string.

One `TextStream` for each request. Tokens are taken one by one, so that the text is the same however they were
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
    """What a reader may see now, the tokens it took, and whether a stop string ended the text here."""

    text: str
    tokens: tuple[int, ...]
    stopped: bool = False


class TextStream:
    """One request's tokens as text. A character that `prompt` leaves unfinished is its own; `ends` have no text."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str], ends: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(codec, prompt)
        self._stops = StopFinder(stop)
        self._ends = ends
        self._skipped = 0

    def resume(self, tokens: Sequence[int], characters: int) -> TextDelta:
        """Reads what a reader has received before; the result is what `feed` gave then.

        `characters` more than these tokens complete are the end of a text that had ended; they are not given again.
        """
        piece = self.feed(tokens)
        self._skipped = max(characters - len(piece.text), 0)
        return piece

    def feed(self, tokens: Sequence[int]) -> TextDelta:
        """The text that `tokens` complete. Tokens after the one that completed a stop string are dropped."""
        shown = ""
        for count, token in enumerate(tokens, start=1):
            if token not in self._ends:
                shown += self._stops.feed(self._detokenizer.feed(token))
            if self._stops.found:
                return TextDelta(self._new(shown), tuple(tokens[:count]), stopped=True)
        return TextDelta(self._new(shown), tuple(tokens))

    def finish(self) -> TextDelta:
        """What was held back, now that no more will come."""
        shown = self._stops.feed(self._detokenizer.finish())
        return TextDelta(self._new(shown + self._stops.finish()), (), self._stops.found)

    def _new(self, text: str) -> str:
        """What of it the reader has not received."""
        new = text[self._skipped :]
        self._skipped -= len(text) - len(new)
        return new


class Detokenizer:
    """Tokens to text, holding back a character whose bytes have not all come.

    Bytes that can't become a character are U+FFFD once that is certain; so nothing given out ever changes.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int]) -> None:
        self._spelling = codec.spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-LONGEST_CHARACTER:]:
            self.feed(token)  # the prompt may end inside a character, which is then the output's

    def feed(self, token: int) -> str:
        """The text that `token` completes, often none."""
        return self._characters.decode(self._spelling.of(token))

    def finish(self) -> str:
        """The bytes of a character that never came to its end, as U+FFFD."""
        return self._characters.decode(b"", final=True)


class StopFinder:
    """Passes text on, holding back what may be the beginning of a stop string; `found` once one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What may be shown; nothing from the first stop string on."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(self._held) - self._begun()
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        return "" if self.found else self._held

    def _begun(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
