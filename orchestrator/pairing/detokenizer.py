"""Converts one request's committed tokens to text: whole characters only, and nothing of a stop string.

Tokens are handled one by one, so that the text does not depend on how they were committed. A decoder of the tokenizers
library can't do that: it needs the whole text, because it turns a run of byte tokens into U+FFFD while one character in
it is incomplete, and drops a space at the beginning. `Spelling` has the bytes of each token inside a text instead.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_CHARACTER_BYTES = 4  # bytes, so tokens at most


class Spelling:
    """The bytes of one tokenizer's tokens: byte-level tokens are spelled in the alphabet of bytes, byte-fallback tokens
    as <0x41>; any other token has the text that decoding adds for it after another token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = decoder_kinds(tokenizer)
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        tokens = range(tokenizer.get_vocab_size())
        self._context_token = next((token for token in tokens if self._decode(token).strip()), 0)
        self._context_length = len(self._decode(self._context_token))

    def of(self, token: int) -> bytes:
        """Returns the bytes that `token` adds to a text, which may begin or end inside a character; none if unknown."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._alphabet is not None:
            known = all(letter in self._alphabet for letter in name)
            return bytes(self._alphabet[letter] for letter in name) if known else name.encode()
        byte = _BYTE.fullmatch(name) if self._has_byte_tokens else None
        if byte:
            return bytes.fromhex(byte[1])
        return self._decode(self._context_token, token)[self._context_length :].encode()

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the steps of the tokenizer's decoder by their names in tokenizer.json."""
    if tokenizer.decoder is None:
        return frozenset()
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(step["type"] for step in described.get("decoders", [described]))


def _byte_alphabet() -> dict[str, int]:
    """Maps each letter to its byte: printable bytes are their own letters, the others have letters from U+0100 on."""
    letters = sorted(ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    rest = sorted(set(range(256)) - set(own.values()))
    return own | dict(zip(letters[len(own) :], rest, strict=True))


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text for the reader, its tokens, and whether a stop string ended the text here."""

    text: str
    tokens: tuple[int, ...]
    stopped: bool = False


class TextStream:
    """The text of one request. It completes a character that `prompt` leaves unfinished; `ends` have no text.

    A character is held back until all its bytes have come. Bytes that can't become a character are U+FFFD once that is
    certain; so text once returned never changes.
    """

    def __init__(self, spelling: Spelling, prompt: Sequence[int], stop: Sequence[str], ends: frozenset[int]) -> None:
        self._spelling = spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-MAX_CHARACTER_BYTES:]:
            self._decode(token)  # the prompt may end inside a character, which is then the output's
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
                shown += self._stops.feed(self._decode(token))
            if self._stops.found:
                return TextDelta(self._drop_received(shown), tuple(tokens[:count]), stopped=True)
        return TextDelta(self._drop_received(shown), tuple(tokens))

    def finish(self) -> TextDelta:
        """Returns the text held back, after the last token."""
        shown = self._stops.feed(self._characters.decode(b"", final=True))
        return TextDelta(self._drop_received(shown + self._stops.finish()), (), self._stops.found)

    def _decode(self, token: int) -> str:
        return self._characters.decode(self._spelling.of(token))

    def _drop_received(self, text: str) -> str:
        """Returns the part that the reader has not received."""
        new = text[self._skipped :]
        self._skipped -= len(text) - len(new)
        return new


class StopFinder:
    """Passes text on, except what may begin a stop string; `found` is True when one is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Returns the text that may be shown; nothing from the first stop string on."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._pending += text
        starts = [start for stop in self._stops if (start := self._pending.find(stop)) >= 0]
        self.found = bool(starts)
        end = min(starts) if starts else len(self._pending) - partial_match_length(self._pending, self._stops)
        shown, self._pending = self._pending[:end], self._pending[end:]
        return shown

    def finish(self) -> str:
        """Returns the text held back for a stop string that never came."""
        return "" if self.found else self._pending


def partial_match_length(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that begins a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
