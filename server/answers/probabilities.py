"""Log-probabilities as OpenAI's two older APIs write them: each token with its text and its bytes.

The end token has no text, and is left out; so the texts put together are the answer, thoughts and marks included.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace

from outrider.orchestrator.client.result import TokenLogprob
from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.logprobs import NEVER
from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.parts import Said
from outrider.server.answers.telling import Choice
from outrider.server.model.served import ServedModel
from outrider.server.shapes.chat import ChatLogprobs, LikelyToken, SpelledToken
from outrider.server.shapes.completions import CompletionLogprobs

LEAST = -9999.0
"""What OpenAI writes for a token that can't be."""


class Speller:
    """One model's tokens in words; those in `ends` are not told."""

    def __init__(self, codec: TextCodec, ends: frozenset[int]) -> None:
        self._codec, self._ends = codec, ends

    def content(self, rows: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        """As chats have them; None for no tokens."""
        told = self.told(rows)
        return ChatLogprobs(content=[self.spelled(row) for row in told]) if told else None

    def told(self, rows: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        return [row for row in rows if row.token not in self._ends]

    def bytes_of(self, token: int) -> bytes:
        return self._codec.spelling.of(token)

    def text(self, token: int) -> str:
        """What is not a whole character is U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def spelled(self, row: TokenLogprob) -> SpelledToken:
        top = [self._likely(token, value) for token, value in row.top if value > NEVER]
        return SpelledToken(**self._likely(row.token, row.logprob).model_dump(), top_logprobs=top)

    def _likely(self, token: int, value: float) -> LikelyToken:
        return LikelyToken(token=self.text(token), logprob=max(value, LEAST), bytes=list(self.bytes_of(token)))


class Wording:
    """The tokens of the words that a reader is told: of what the model writes those that a stretch of it is made of."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._rows: list[tuple[int, SpelledToken]] = []
        self._length = self._told = 0

    def take(self, rows: Sequence[TokenLogprob]) -> None:
        """The next that were written."""
        for row in self._speller.told(rows):
            self._length += len(self._characters.decode(self._speller.bytes_of(row.token)))
            self._rows.append((self._length, self._speller.spelled(row)))

    def next(self, words: Said) -> list[SpelledToken]:
        """The tokens that `words` end, or go on with, and that no words before them had."""
        found = []
        while self._told < len(self._rows) and self._rows[self._told][0] <= words.at + len(words.text):
            end, row = self._rows[self._told]
            found += [row] if end > words.at else []
            self._told += 1
        return found


class Listing:
    """One completion's tokens side by side, as far as they have come."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, rows: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """Those of `rows`, which follow what was told before; None for no tokens."""
        told = self._speller.told(rows)
        if not told:
            return None
        return CompletionLogprobs(
            tokens=[self._speller.text(row.token) for row in told],
            token_logprobs=[max(row.logprob, LEAST) for row in told],
            top_logprobs=[self._top(row) for row in told],
            text_offset=[self._offset(row.token) for row in told],
        )

    def _offset(self, token: int) -> int:
        before = self._length
        self._length += len(self._characters.decode(self._speller.bytes_of(token)))
        return before

    def _top(self, row: TokenLogprob) -> dict[str, float]:
        """By text; of tokens that read alike the likeliest. The token itself is always there."""
        found = {self._speller.text(row.token): max(row.logprob, LEAST)}
        for token, value in row.top:
            if value > NEVER:
                found.setdefault(self._speller.text(token), value)
        return found


def speller(model: ServedModel, sampling: SamplingParams) -> Speller | None:
    """None when no log-probabilities are wanted."""
    if sampling.logprobs is None:
        return None
    return Speller(model.codec, frozenset() if sampling.ignore_eos else model.codec.eos)


def likeliest(choices: Sequence[Choice], tried: int, kept: int) -> list[Choice]:
    """Of each `tried` choices the `kept` ones whose tokens are likeliest in the mean, the best first; renumbered."""
    if tried == kept:
        return list(choices)
    best: list[Choice] = []
    for start in range(0, len(choices), tried):
        best += sorted(choices[start : start + tried], key=_mean, reverse=True)[:kept]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


def _mean(choice: Choice) -> float:
    rows = choice.extras.logprobs
    return sum(row.logprob for row in rows) / max(len(rows), 1)
