"""What responses contain besides text: usage, log-probabilities and reproduction info."""

from __future__ import annotations

import codecs
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, zip_longest
from operator import add
from typing import Any

from msgspec import structs, to_builtins

from outrider.orchestrator.client.dialogue import Chunk, TokenLogprob
from outrider.orchestrator.pairing.detokenizer import Spelling, TextStream
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import RoundRecord, Span
from outrider.server import schemas
from outrider.server.answers.choices import AnswerPlan, ChoiceState

MIN_LOGPROB = -9999.0
"""OpenAI's value for an impossible token."""


def build_statistics(
    choices: Sequence[ChoiceState], notes: Sequence[str] = (), first: ChoiceState | None = None
) -> dict[str, Any]:
    """Returns `timings`, the sum of all choices without one value per hit, and `outrider`, of `first` or the first."""
    times, result = reduce(add, (choice.result.timings for choice in choices)), (first or choices[0]).result
    found = structs.asdict(times)
    del found["turnaround_ms"]
    found["prompt_per_second"] = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
    about = schemas.Outrider(seed=result.seed, mode=result.mode, notes=[*notes, *result.notes])
    return {"timings": to_builtins(found), "outrider": about}


def report_speculation(chunks: Sequence[Chunk]) -> schemas.SpeculationReport | None:
    """Returns the `speculation` field for a choice's chunks; None if empty. A chunk with an origin has one token."""
    origins = [schemas.TokenOrigin(text=one.text, origin=one.origins[0].name.lower()) for one in chunks if one.origins]
    rounds = [_to_round(record) for chunk in chunks for record in chunk.rounds or ()]
    return schemas.SpeculationReport(origins=origins or None, rounds=rounds or None) if origins or rounds else None


def _to_round(record: RoundRecord) -> dict[str, Any]:
    """Returns the record with its spans in milliseconds."""
    drafting = [
        {
            "drafter": one.drafter,
            "round": one.round,
            "depth": one.depth,
            "branches": one.branches,
            **_to_times(one.work),
        }
        for one in record.drafting
    ]
    decided = _to_times(record.decided) if record.decided is not None else None
    return {**structs.asdict(record), "verify": _to_times(record.verify), "decided": decided, "drafting": drafting}


def _to_times(span: Span) -> dict[str, float]:
    return {"start_ms": span.started_ns / MILLISECOND_NS, "ms": span.milliseconds}


def count_reasoning_tokens(plan: AnswerPlan) -> int:
    """Counts the thinking tokens of all choices."""
    spelling = plan.model.codec.spelling
    return sum(count_thinking_tokens(spelling, choice) for choice in plan.choices if choice.thought)


def count_thinking_tokens(spelling: Spelling, choice: ChoiceState) -> int:
    """Counts the tokens of a choice's thinking, tags included, by the text that each token completes."""
    stream = TextStream(spelling, choice.prompt.tokens, (), frozenset())
    ends = list(accumulate(len(stream.feed([token]).text) for token in choice.tokens))
    bounds = choice.splitter.thinking_bounds
    spans = zip_longest(bounds[::2], bounds[1::2], fillvalue=sys.maxsize)
    return sum(min(bisect_left(ends, end) + 1, len(ends)) - bisect_right(ends, start) for start, end in spans)


def build_usage(plan: AnswerPlan) -> schemas.Usage:
    """Returns the usage of all choices in OpenAI's format. A prompt shared by several choices counts once."""
    num_generated = sum(len(choice.tokens) for choice in plan.choices)
    cached = max((choice.result.timings.cache_n for choice in plan.choices), default=0)
    return schemas.Usage(
        prompt_tokens=plan.prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=plan.prompt_tokens + num_generated,
        prompt_tokens_details={"cached_tokens": cached},
        completion_tokens_details={"reasoning_tokens": count_reasoning_tokens(plan)} if plan.is_chat else None,
    )


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token with its log-probability, and where its text starts and ends, in characters of the generated text."""

    start: int
    end: int
    spelled: schemas.ChatTokenLogprob


class LogprobFormatter:
    """Formats a choice's log-probabilities for OpenAI's APIs; generated tokens in `ends` (end of text) are omitted."""

    def __init__(self, codec: TextCodec, ends: frozenset[int]) -> None:
        self._codec, self._ends = codec, ends
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def format(self, chunks: Sequence[Chunk]) -> list[PlacedToken]:
        """Formats the tokens of the next chunks. In a token's own text, incomplete characters become U+FFFD."""
        return self._place([row for row in collect_logprobs(chunks) if row.token not in self._ends])

    def format_prompt(self, text: str, tokens: Sequence[int], rows: Sequence[TokenLogprob]) -> list[PlacedToken]:
        """Formats the tokens of a prompt, before those of chunks; `rows` are those of all but the first token.

        Their places end with `text`; what the tokenizer adds before it, such as a begin token, starts where it does.
        """
        spelled = b"".join(map(self._codec.spelling.of, tokens))
        self._length = len(text) - len(spelled.decode(errors="replace"))
        return self._place([TokenLogprob(tokens[0], 0.0), *rows])

    def _place(self, rows: Sequence[TokenLogprob]) -> list[PlacedToken]:
        found = []
        for row in rows:
            top = [self._format_token(token, value) for token, value in row.top]
            spelled = schemas.ChatTokenLogprob(
                **self._format_token(row.token, row.logprob).model_dump(), top_logprobs=top
            )
            start = self._length
            self._length += len(self._characters.decode(bytes(spelled.bytes)))
            found.append(PlacedToken(max(start, 0), self._length, spelled))
        return found

    def _format_token(self, token: int, value: float) -> schemas.TopLogprob:
        spelled = self._codec.spelling.of(token)
        return schemas.TopLogprob(
            token=spelled.decode(errors="replace"), logprob=max(value, MIN_LOGPROB), bytes=list(spelled)
        )


def collect_logprobs(chunks: Sequence[Chunk]) -> list[TokenLogprob]:
    return [row for chunk in chunks for row in chunk.logprobs or ()]


def create_logprob_formatters(plan: AnswerPlan) -> list[LogprobFormatter]:
    """Returns a formatter for each choice."""
    codec = plan.model.codec
    return [LogprobFormatter(codec, codec.end_tokens(choice.sampling)) for choice in plan.choices]
