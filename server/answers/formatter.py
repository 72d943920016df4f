"""Formats answers for an API, whole or as events: text, usage, log-probabilities, statistics, violated schemas."""

from __future__ import annotations

import codecs
import json
import secrets
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, zip_longest
from operator import add
from typing import Any

from msgspec import Struct, structs, to_builtins
from pydantic import BaseModel
from pydantic_core import to_json

from outrider import __version__
from outrider.orchestrator.client.dialogue import Chunk, TokenLogprob
from outrider.orchestrator.pairing.detokenizer import Spelling, TextStream
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Span
from outrider.server import schemas
from outrider.server.answers.choices import AnswerPlan, ChoiceState, Part, PartUpdate, StreamItem
from outrider.server.model.tool_format import ToolCall
from outrider.server.problems import Problem

FINGERPRINT = f"outrider-{__version__}"
DONE = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0
"""OpenAI's value for an impossible token."""
_MAX_REASON_CHARS, _MAX_BACKTRACKS = 300, 10_000


def event(data: bytes, name: str | None = None) -> bytes:
    """Returns one server-sent event. `data` is JSON without line breaks."""
    named = f"event: {name}\n".encode() if name is not None else b""
    return b"%bdata: %b\n\n" % (named, data)


def typed_event(kind: str, /, **fields: Any) -> bytes:
    """Returns an event whose name is also its `type`. Fields may be Pydantic models."""
    return event(to_json({"type": kind, **fields}), kind)


class AnswerFormatter(ABC):
    """Formats the answer of one request for an API, whole or as events. Methods may write several events, or none."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.plan, codec = plan, plan.model.codec
        self._logprobs = [LogprobFormatter(codec, codec.end_tokens(choice.sampling)) for choice in plan.choices]

    @abstractmethod
    def format_response(self) -> BaseModel:
        """Returns the full response, once all choices have ended."""

    @abstractmethod
    def begin(self) -> bytes:
        """Writes the start of a stream."""

    def format_item(self, one: StreamItem) -> bytes:
        """Writes one item of a stream."""
        match one:
            case str():
                return self._keep_alive(one)
            case PartUpdate():
                return self._format_part(one)
            case ChoiceState():
                return self._format_choice_end(one)

    def end(self) -> bytes:
        """Writes what follows the last choice."""
        return b""

    @abstractmethod
    def format_error(self, problem: Problem) -> bytes:
        """Writes an error."""

    def _keep_alive(self, note: str) -> bytes:
        """Writes a comment, which keeps the connection alive and which clients ignore."""
        return f": {note}\n\n".encode()

    @abstractmethod
    def _format_part(self, update: PartUpdate) -> bytes: ...

    @abstractmethod
    def _format_choice_end(self, choice: ChoiceState) -> bytes: ...

    def _count_reasoning_tokens(self) -> int:
        """Counts the thinking tokens of all choices."""
        spelling = self.plan.model.codec.spelling
        return sum(count_thinking_tokens(spelling, choice) for choice in self.plan.choices if choice.thought)


class BlockFormatter(AnswerFormatter):
    """Formats an answer of one choice as a sequence of blocks: consecutive text, consecutive thinking, or a call.

    `_at` is the number of the current block, and `_kind` its kind; None before the first block.
    """

    def __init__(self, plan: AnswerPlan) -> None:
        super().__init__(plan)
        self._at = -1
        self._kind: type[Part] | None = None

    def _format_part(self, update: PartUpdate) -> bytes:
        part, before = update.part, b""
        if type(part) is not self._kind or isinstance(part, ToolCall):
            before = self._end_block()
            self._at, self._kind = self._at + 1, type(part)
            before += self._format_block_start(part)
        return before + self._format_block_delta(update)

    def _end_block(self, status: str = "completed") -> bytes:
        """Ends the current block, if there is one."""
        (choice,) = self.plan.choices
        return self._format_block_end(choice.parts[self._at], status) if self._kind is not None else b""

    @abstractmethod
    def _format_block_start(self, part: Part) -> bytes:
        """Begins the block of `part`, without its content."""

    @abstractmethod
    def _format_block_delta(self, update: PartUpdate) -> bytes:
        """Adds content to the block."""

    @abstractmethod
    def _format_block_end(self, part: Part, status: str) -> bytes:
        """Ends the block, whose whole content is `part`."""


class CompletionFormatter(AnswerFormatter):
    """Formats chat or text completions. In a stream each choice ends with its finish reason and timings.

    `prefix` starts the answer's id. `response` is the class of the full response, `chunk` that of a streamed event.
    """

    prefix: str
    response: type[BaseModel]
    chunk: type[BaseModel]

    def __init__(self, plan: AnswerPlan, payload: schemas.Sampling) -> None:
        """Raises Problem for stream_options without a stream."""
        super().__init__(plan)
        if payload.stream_options is not None and not payload.stream:
            raise Problem("stream_options needs stream: true", "stream_options")
        self._include_usage = payload.stream_options is not None and payload.stream_options.include_usage
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": plan.created,
            "model": plan.model.id,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def _format_choice(self, choice: ChoiceState) -> BaseModel:
        """Returns a choice of the full response."""

    @abstractmethod
    def _format_chunk_choice(
        self, choice: ChoiceState, part: Part | None, chunks: Sequence[Chunk] = (), finish: str | None = None
    ) -> BaseModel:
        """Returns a choice of an event. `part` None: the choice ends, by the reason `finish`."""

    def format_response(self) -> BaseModel:
        """Returns the full response. Usage and timings include all choices, even those that are not returned."""
        kept = self._returned_choices()
        numbers = build_statistics(self.plan.choices, describe_schema_violations(self.plan, kept), kept[0])
        choices = list(map(self._format_choice, kept))
        return self.response(**self._common, choices=choices, usage=self._build_usage(), **numbers)

    def _format_part(self, update: PartUpdate) -> bytes:
        return self._event([self._format_chunk_choice(update.choice, update.part, update.chunks)])

    def _format_choice_end(self, choice: ChoiceState) -> bytes:
        return self._event([self._format_chunk_choice(choice, None, choice.unsent_chunks, choice.finish)], [choice])

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._event([], self.plan.choices, usage=self._build_usage()) + DONE

    def format_error(self, problem: Problem) -> bytes:
        return event(problem.body(anthropic=False))

    def _returned_choices(self) -> list[ChoiceState]:
        """Returns the choices of the full response."""
        return self.plan.choices

    def _build_usage(self) -> schemas.Usage:
        """Returns the usage of all choices. A prompt shared by several choices counts once."""
        plan, num_generated = self.plan, sum(len(choice.tokens) for choice in self.plan.choices)
        cached = max((choice.result.timings.cache_n for choice in plan.choices), default=0)
        return schemas.Usage(
            prompt_tokens=plan.prompt_tokens,
            completion_tokens=num_generated,
            total_tokens=plan.prompt_tokens + num_generated,
            prompt_tokens_details={"cached_tokens": cached},
            completion_tokens_details={"reasoning_tokens": self._count_reasoning_tokens()} if plan.is_chat else None,
        )

    def _event(self, choices: list[BaseModel], ended: Sequence[ChoiceState] = (), **more: Any) -> bytes:
        """Returns an event. `ended`: the choices whose timings it reports."""
        if ended:
            more |= build_statistics(ended, describe_schema_violations(self.plan, ended))
        return event(to_json(self.chunk(**self._common, choices=choices, **more)))


def build_statistics(
    choices: Sequence[ChoiceState], notes: Sequence[str] = (), first: ChoiceState | None = None
) -> dict[str, Any]:
    """Returns `timings`, the sum of all choices, and `outrider`, of `first` or the first."""
    times, result = reduce(add, (choice.result.timings for choice in choices)), (first or choices[0]).result
    found = structs.asdict(times)
    found["prompt_per_second"] = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
    about = schemas.Outrider(seed=result.seed, mode=result.mode, notes=[*notes, *result.notes])
    return {"timings": to_builtins(found), "outrider": about}


def report_speculation(chunks: Sequence[Chunk]) -> schemas.SpeculationReport | None:
    """Returns the `speculation` field for a choice's chunks; None if empty. A chunk with an origin has one token."""
    origins = [schemas.TokenOrigin(text=one.text, origin=one.origins[0].label) for one in chunks if one.origins]
    rounds = [_to_fields(record) for chunk in chunks for record in chunk.rounds or ()]
    return schemas.SpeculationReport(origins=origins or None, rounds=rounds or None) if origins or rounds else None


def _to_fields(value: object) -> Any:
    """Returns a round's record as JSON has it: spans in milliseconds, those of a drafter's work beside its fields."""
    match value:
        case Span():
            return {"start_ms": value.started_ns / MILLISECOND_NS, "ms": value.milliseconds}
        case Struct():
            fields = {name: _to_fields(one) for name, one in structs.asdict(value).items()}
            return {**fields.pop("work", {}), **fields}
        case tuple():
            return [_to_fields(one) for one in value]
    return value


def count_thinking_tokens(spelling: Spelling, choice: ChoiceState) -> int:
    """Counts the tokens of a choice's thinking, tags included, by the text that each token completes."""
    stream = TextStream(spelling, choice.prompt.tokens, (), frozenset())
    ends = list(accumulate(len(stream.feed([token]).text) for token in choice.tokens))
    bounds = choice.splitter.thinking_bounds
    spans = zip_longest(bounds[::2], bounds[1::2], fillvalue=sys.maxsize)
    return sum(min(bisect_left(ends, end) + 1, len(ends)) - bisect_right(ends, start) for start, end in spans)


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


def describe_schema_violations(plan: AnswerPlan, choices: Sequence[ChoiceState]) -> list[str]:
    """Checks answers and non-strict tool calls against the parts of their schemas that the grammar did not enforce,
    such as uniqueItems, and describes each violation."""
    found = []
    if plan.form is not None and plan.form.checked is not None:
        schema = json.loads(plan.form.checked)
        for choice in (choice for choice in choices if choice.finish != "length" and not choice.calls):
            if (why := _find_violation(schema, choice.text)) is not None:
                found.append(
                    f"{plan.form.param}: choice {choice.index} does not satisfy its schema: {why}; the grammar can't"
                    " enforce this part of it, and with strict the request is refused"
                )
    functions = (tool["function"] for tool in plan.box.tools)
    by_name = {one["name"]: one["parameters"] for one in functions if one["name"] not in plan.box.strict}
    for call in (call for choice in choices for call in choice.calls if call.name in by_name):
        if (why := _find_violation(by_name[call.name], call.arguments)) is not None:
            found.append(f"tools: the arguments of a call of {call.name} do not satisfy its schema: {why}")
    return found


def _find_violation(schema: Any, text: str) -> str | None:
    """Returns how the JSON `text` violates the schema, or why that can't be checked; None if it does not.

    Patterns take limited time, and remote references are not fetched.
    """
    import jsonschema_rs  # deferred: few schemas need it

    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_MAX_BACKTRACKS)  # with look-around
    try:
        validator = jsonschema_rs.validator_for(schema, retriever=_refuse_retrieval, pattern_options=patterns)
        return next((str(error.message)[:_MAX_REASON_CHARS] for error in validator.iter_errors(json.loads(text))), None)
    except json.JSONDecodeError as error:
        return str(error)
    except ValueError as error:
        return f"the schema can't be checked ({error})"[:_MAX_REASON_CHARS]


def _refuse_retrieval(_uri: str) -> Any:
    raise ValueError("remote references in schemas are not supported")
