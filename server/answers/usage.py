"""What responses contain beside text: usage, log-probabilities, reproduction info, and notes on schema violations."""

from __future__ import annotations

import codecs
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from outrider.orchestrator.client.dialogue import Chunk, TokenLogprob
from outrider.orchestrator.pairing.tokenizer import Spelling, TextCodec
from outrider.protocol.messages import RoundRecord
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import NEVER
from outrider.server.answers.parts import ChoiceState, TextPart
from outrider.server.mapping.generation_params import OutputFormat
from outrider.server.model.served import ServedModel, Thoughts, TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import SpanTags
from outrider.server.schemas import (
    CachedTokens,
    ChatLogprobs,
    Drafting,
    LikelyToken,
    Outrider,
    ReasoningTokens,
    Round,
    Speculated,
    SpelledToken,
    TokenOrigin,
    Usage,
    Work,
)


def about(choice: ChoiceState, notes: Sequence[str] = ()) -> Outrider:
    """Returns the `outrider` field of an answer that begins with this choice."""
    result = choice.result
    return Outrider(seed=result.seed, mode=result.mode, notes=[*notes, *result.notes])


def speculated(choice: ChoiceState, chunks: Sequence[Chunk]) -> Speculated | None:
    """Returns the `speculation` field of chat and text completions for the choice's next chunks; None if empty."""
    origins, rounds = [], [_round(record) for chunk in chunks for record in chunk.rounds or ()]
    if choice.words is not None:
        for chunk in chunks:
            for token, origin in zip(chunk.token_ids, chunk.origins or (), strict=True):
                origins.append(TokenOrigin(text=choice.words.feed((token,)).text, origin=origin.name.lower()))
    return Speculated(origins=origins or None, rounds=rounds or None) if origins or rounds else None


def _round(record: RoundRecord) -> Round:
    given = {name: getattr(record, name) for name in ("round", "lookup", "source", "drafted", "accepted", "tokens")}
    drafting = [
        Drafting.of(one.work, drafter=one.drafter, round=one.round, depth=one.depth, branches=one.branches)
        for one in record.drafting
    ]
    decided = Work.of(record.decided) if record.decided is not None else None
    return Round(**given, verify=Work.of(record.verify), decided=decided, drafting=drafting)


ThoughtCounter = Callable[[ChoiceState], int]


def counter(model: ServedModel, prompt: TokenizedPrompt) -> ThoughtCounter:
    """Returns a function that counts an answer's thinking tokens."""
    spelling, tags, begun = model.codec.spelling, model.thinking, prompt.thoughts is Thoughts.BEGUN
    return lambda choice: thought_tokens(spelling, tags, begun, choice.tokens) if tags and choice.thought else 0


def thought_tokens(spelling: Spelling, tags: SpanTags, begun: bool, tokens: list[int]) -> int:
    """Counts the tokens of thinking, tags included, by the bytes that each token stands for."""
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


def usage(prompt_tokens: int, choices: Sequence[ChoiceState], thoughts: ThoughtCounter | None = None) -> Usage:
    """Returns OpenAI's usage. A prompt shared by several choices counts once."""
    made = sum(len(choice.tokens) for choice in choices)
    held = max((choice.result.timings.cache_n for choice in choices), default=0)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=made,
        total_tokens=prompt_tokens + made,
        prompt_tokens_details=CachedTokens(cached_tokens=held),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=sum(map(thoughts, choices))) if thoughts else None,
    )


def logprobs_of(chunks: Sequence[Chunk]) -> list[TokenLogprob]:
    return [row for chunk in chunks for row in chunk.logprobs or ()]


LEAST = -9999.0
"""OpenAI's value for an impossible token."""


class LogprobFormatter:
    """Formats log-probabilities for OpenAI's APIs. Tokens in `ends` (end of text) are omitted."""

    def __init__(self, codec: TextCodec, ends: frozenset[int]) -> None:
        self._codec, self._ends = codec, ends

    def content(self, rows: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        """Formats for chat completions; None without tokens."""
        spelled = self.spelled(rows)
        return ChatLogprobs(content=spelled) if spelled else None

    def spelled(self, rows: Sequence[TokenLogprob]) -> list[SpelledToken]:
        """Decodes each token; incomplete characters become U+FFFD."""
        found = []
        for row in (row for row in rows if row.token not in self._ends):
            top = [self._likely(token, value) for token, value in row.top if value > NEVER]
            found.append(SpelledToken(**self._likely(row.token, row.logprob).model_dump(), top_logprobs=top))
        return found

    def _likely(self, token: int, value: float) -> LikelyToken:
        spelled = self._codec.spelling.of(token)
        return LikelyToken(token=spelled.decode(errors="replace"), logprob=max(value, LEAST), bytes=list(spelled))


class TextLogprobs:
    """Assigns log-probabilities to the text parts that a reader sees."""

    def __init__(self, speller: LogprobFormatter) -> None:
        self._speller = speller
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._rows: list[tuple[int, SpelledToken]] = []
        self._length = self._returned = 0

    def take(self, rows: Sequence[TokenLogprob]) -> None:
        """Adds the next tokens."""
        for one in self._speller.spelled(rows):
            self._length += len(self._characters.decode(bytes(one.bytes)))
            self._rows.append((self._length, one))

    def next(self, words: TextPart) -> list[SpelledToken]:
        """Returns the tokens that end in `words` and were not returned before."""
        found = []
        while self._returned < len(self._rows) and self._rows[self._returned][0] <= words.at + len(words.text):
            end, row = self._rows[self._returned]
            found += [row] if end > words.at else []
            self._returned += 1
        return found


def speller(model: ServedModel, sampling: SamplingParams) -> LogprobFormatter | None:
    """Returns None if no log-probabilities are requested."""
    if sampling.logprobs is None:
        return None
    return LogprobFormatter(model.codec, frozenset() if sampling.ignore_eos else model.codec.eos)


SchemaChecker = Callable[[Sequence[ChoiceState]], list[str]]
_LONGEST = 300


def schema_checker(form: OutputFormat | None, box: Toolbox | None = None) -> SchemaChecker:
    """Returns a function that checks answers and non-strict tool calls against what the grammar did not enforce of
    their schemas, such as uniqueItems. Violations become notes."""
    loose = form if form is not None and form.loose else None
    tools = [tool["function"] for tool in box.tools if tool["function"]["name"] not in box.strict] if box else []
    schemas = {tool["name"]: tool["parameters"] for tool in tools}

    def notes(choices: Sequence[ChoiceState]) -> list[str]:
        found = []
        if loose is not None:
            try:
                validator = _validator(json.loads(loose.grammar.text))
                for choice in (choice for choice in choices if choice.finish != "length" and not choice.calls):
                    if (why := _fault(validator, choice.text)) is not None:
                        found.append(
                            f"{loose.param}: choice {choice.index} does not satisfy its schema: {why[:_LONGEST]}; no"
                            " grammar holds this part of it, and strict would have refused it"
                        )
            except ValueError as error:
                found.append(f"{loose.param}: the schema can't be checked afterwards ({str(error)[:_LONGEST]})")
        for call in (call for choice in choices for call in choice.calls if call.name in schemas):
            try:
                why = _fault(_validator(schemas[call.name]), call.arguments)
            except ValueError as error:
                why = f"the schema can't be checked ({error})"
            if why is not None:
                found.append(
                    f"tools: the arguments of a call of {call.name} do not satisfy its schema: {why[:_LONGEST]}"
                )
        return found

    return notes


def _validator(schema: Any) -> Any:
    """Compiles a validator with linear-time patterns and without remote references. Raises ValueError."""
    import jsonschema_rs  # deferred: few schemas need it

    return jsonschema_rs.validator_for(schema, retriever=_no_retrieval, pattern_options=jsonschema_rs.RegexOptions())


def _fault(validator: Any, text: str) -> str | None:
    """Returns how the JSON `text` violates the validator's schema; None if it does not."""
    try:
        return next((str(error.message) for error in validator.iter_errors(json.loads(text))), None)
    except ValueError as error:
        return str(error)


def _no_retrieval(_uri: str) -> Any:
    raise ValueError("no schema is fetched from elsewhere")
