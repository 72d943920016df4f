"""What answers report beside their text: tokens counted, thoughts among them, log-probabilities, and what made them.

`usage`: tokens counted, in each API's own terms.

`about`: how answers name what made them: the server's fingerprint, and what gives a text again.

`counter`: how many of an answer's tokens were thoughts, their marks among them: by the bytes that each token stands
for.

`Speller`: log-probabilities as OpenAI's two older APIs write them: each token with its text and its bytes. The end
token has no text, and is left out; so the texts put together are the answer, thoughts and marks included.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from outrider.orchestrator.client.dialogue import GenerationResult, TokenLogprob
from outrider.orchestrator.pairing.tokenizer import Spelling, TextCodec
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import NEVER
from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.answers.part_stream import ChoiceState
from outrider.server.answers.parts import TextPart
from outrider.server.model.served import ServedModel, Thoughts, TokenizedPrompt
from outrider.server.model.tool_format import SpanTags
from outrider.server.shapes.base import CachedTokens, Outrider, ReasoningTokens, Usage
from outrider.server.shapes.chat import ChatLogprobs, CompletionLogprobs, LikelyToken, SpelledToken
from outrider.server.shapes.messages import MessagesUsage
from outrider.server.shapes.responses import ResponsesUsage, WrittenTokens

FINGERPRINT = f"outrider-{PACKAGE_VERSION}"


def about(result: GenerationResult | None, seed: int, notes: Sequence[str] = ()) -> Outrider:
    """`seed` is told where there is no result, as of a choice that was ended at its first call; `notes` come first."""
    if result is None:
        return Outrider(seed=seed, mode="", notes=list(notes))
    return Outrider(seed=result.seed, mode=result.mode, notes=[*notes, *result.notes])


Count = Callable[[ChoiceState], int]


def counter(model: ServedModel, prompt: TokenizedPrompt) -> Count:
    """For answers to `prompt`, which may have begun a thought."""
    begun = prompt.thoughts is Thoughts.BEGUN

    def count(choice: ChoiceState) -> int:
        if model.thinking is None or not choice.thought:
            return 0
        return thought_tokens(model.codec.spelling, model.thinking, begun, choice.tokens)

    return count


def thought_tokens(spelling: Spelling, tags: SpanTags, begun: bool, tokens: list[int]) -> int:
    """Those from a thought's first mark to its last; a text cut off within it has nothing else."""
    pieces = [spelling.of(token) for token in tokens]
    text, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    first, last = tags.start.encode(), tags.end.encode()
    start = 0 if begun else text.find(first)
    count = 0
    while start >= 0:
        found = text.find(last, start) if last else -1
        end = found + len(last) if found >= 0 else len(text)
        count += min(bisect_left(ends, end) + 1, len(ends)) - bisect_right(ends, start)
        start = text.find(first, end)
    return count


def usage(prompt_tokens: int, choices: Sequence[ChoiceState], thoughts: Count | None = None) -> Usage:
    """OpenAI's; a prompt that several choices share counts once. `thoughts` are counted where there may be any."""
    made = sum(len(choice.tokens) for choice in choices)
    held = max((choice.timings.cache_n for choice in choices), default=0)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=made,
        total_tokens=prompt_tokens + made,
        prompt_tokens_details=CachedTokens(cached_tokens=held),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=sum(map(thoughts, choices))) if thoughts else None,
    )


def responses_usage(prompt_tokens: int, choice: ChoiceState, thoughts: Count) -> ResponsesUsage:
    """That of the responses API."""
    made = len(choice.tokens)
    return ResponsesUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=WrittenTokens(
            cached_tokens=choice.timings.cache_n, cache_write_tokens=choice.timings.prompt_n
        ),
        output_tokens=made,
        output_tokens_details=ReasoningTokens(reasoning_tokens=thoughts(choice)),
        total_tokens=prompt_tokens + made,
    )


def messages_usage(prompt_tokens: int, choice: ChoiceState | None) -> MessagesUsage:
    """Anthropic's; None: nothing has been made yet."""
    held = choice.timings.cache_n if choice is not None else 0
    return MessagesUsage(
        input_tokens=prompt_tokens - held,
        output_tokens=len(choice.tokens) if choice is not None else 0,
        cache_read_input_tokens=held,
    )


LEAST = -9999.0
"""What OpenAI writes for a token that can't be."""


class Speller:
    """One model's tokens in words; those in `ends` are not told."""

    def __init__(self, codec: TextCodec, ends: frozenset[int]) -> None:
        self._codec, self._ends = codec, ends

    def content(self, rows: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        """As chats have them; None for no tokens."""
        told = self.visible(rows)
        return ChatLogprobs(content=[self.spelled(row) for row in told]) if told else None

    def visible(self, rows: Sequence[TokenLogprob]) -> list[TokenLogprob]:
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
        for row in self._speller.visible(rows):
            self._length += len(self._characters.decode(self._speller.bytes_of(row.token)))
            self._rows.append((self._length, self._speller.spelled(row)))

    def next(self, words: TextPart) -> list[SpelledToken]:
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
        told = self._speller.visible(rows)
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


def likeliest(choices: Sequence[ChoiceState], tried: int, kept: int) -> list[ChoiceState]:
    """Of each `tried` choices the `kept` ones whose tokens are likeliest in the mean, the best first; renumbered."""
    if tried == kept:
        return list(choices)
    best: list[ChoiceState] = []
    for start in range(0, len(choices), tried):
        best += sorted(choices[start : start + tried], key=_mean, reverse=True)[:kept]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


def _mean(choice: ChoiceState) -> float:
    rows = choice.extras.logprobs
    return sum(row.logprob for row in rows) / max(len(rows), 1)
