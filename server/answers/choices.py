"""The choices of an answer: their parameters, and their text, which is split into parts as it grows.

Parts are text, thinking and tool calls, by the model's own tags. Characters that may begin a tag are held back until
that is decided, so a part never changes after it is returned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from outrider.orchestrator.client.dialogue import Chunk, GenerationResult
from outrider.orchestrator.pairing.detokenizer import TextStream, partial_match_length
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import MAX_COUNT, SamplingParams
from outrider.server import mapping
from outrider.server.model.served import ServedModel, TemplateInput, ThinkingMode, TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import InvalidToolCall, SpanTags, ToolCall, ToolFormat
from outrider.server.schemas import UNLIMITED, Generation

UNFINISHED = GenerationResult("", (), "", Timings(), 0, "", 0, "", "")


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer. `at`: the number of characters before it, tags and thinking included."""

    text: str
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """Thinking (reasoning) text."""

    text: str


Part = TextPart | ThinkingPart | ToolCall


class Splitter:
    """Splits a choice's text. Tags that the model does not use, or the request did not enable, are ordinary text.

    Thinking can only begin before the text, unless the format has further marks. White space between a tag and the
    following text is dropped, or only line breaks if the output has a format. A tool call that can't be parsed becomes
    text, unless the text was cut off inside it.

    `thinking_bounds`: where thinking begins and ends by turns, tags included, in characters of the whole text. -1: it
    began before the first token.
    """

    def __init__(
        self, thinking: SpanTags | None = None, tools: ToolFormat | None = None, box: Toolbox | None = None,
        thinking_mode: ThinkingMode = ThinkingMode.OPTIONAL, in_form: bool = False, by_grammar: bool = False,
    ) -> None:  # fmt: skip
        """`thinking_mode` BEGUN: the text begins inside thinking. `in_form`: once text begins, everything is text.
        `by_grammar`: an end tag inside a call that can't be parsed yet belongs to the call."""
        if in_form and thinking_mode is ThinkingMode.NONE:
            thinking = None
        begun = thinking_mode is ThinkingMode.BEGUN
        self._box = box or Toolbox()
        self._thinking, self._tools = thinking, tools if self._box.tools else None
        spans = (thinking, self._tools.tags if self._tools is not None else None)
        self._starts = {tags.start: tags for tags in spans if tags is not None}
        self._marks = tuple(filter(None, (thinking.answer, *thinking.marks))) if thinking is not None else ()
        self._span = thinking if begun else None
        self.thinking_bounds = [-1] if self._span is not None else []
        self._in_form, self._by_grammar = in_form, by_grammar
        self._pending, self._had_call, self._after_mark = "", False, begun
        self._at = self._search_start = 0

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` completes or extends."""
        self._pending += text
        return list(self._split())

    def finish(self, cut: bool = False) -> list[Part]:
        """Returns what was held back. `cut`: the text hit its length limit; an incomplete call is then dropped."""
        held, self._pending = self._pending, ""
        if self._in_call:
            found = self._emit_calls(held, complete=not self._next_tags())
            return [part for part in found if not (cut and isinstance(part, TextPart))]
        calls = (self._tools.tags.start,) if self._tools is not None else ()
        begun = partial_match_length(held, calls) if cut and (self._box.required or self._had_call) else 0
        return self._emit_text(held[: len(held) - begun])

    def _split(self) -> Iterator[Part]:
        while True:
            if self._in_form and self._is_text_next():
                self._starts, self._marks = {}, ()
            marks = self._next_tags()
            found = [(place, mark) for mark in marks if (place := self._pending.find(mark, self._search_start)) >= 0]
            if not found:
                if not self._in_call:
                    shown = len(self._pending) - partial_match_length(self._pending, marks)
                    yield from self._emit_text(self._pending[:shown])
                    self._drop(shown)
                return
            place, mark = min(found)
            before = self._pending[:place]
            if not self._in_call:
                yield from self._emit_text(before)
                if self._span is None and mark in self._marks:
                    self._drop(place + len(mark))
                    self._after_mark = True
                    continue
                if self._span is None and mark not in self._starts:  # it stands in the middle of the text
                    self._drop(place)
                    continue
            elif self._by_grammar and not self._parse_calls(before):
                self._search_start = place + len(mark)
                continue
            else:
                yield from self._emit_calls(before, True)
            self._drop(place + len(mark))
            span, opens = self._span or self._starts[mark], self._span is None
            if span is self._thinking:
                self.thinking_bounds.append(self._at - len(mark) if opens else self._at)
            self._span = span if opens else None
            self._after_mark = not self._in_call

    def _drop(self, count: int) -> None:
        """Drops characters that have been returned."""
        self._pending, self._at, self._search_start = self._pending[count:], self._at + count, 0

    def _is_text_next(self) -> bool:
        """Returns whether the pending text is neither a tag nor the beginning of one."""
        text = self._pending.lstrip("\n")
        if self._span is not None or not text:
            return False
        return not any(text.startswith(mark) or mark.startswith(text) for mark in self._next_tags())

    @property
    def _in_call(self) -> bool:
        return self._span is not None and self._span is not self._thinking

    def _next_tags(self) -> tuple[str, ...]:
        """Returns the tags that may come next."""
        if self._span is None:
            return (*self._starts, *self._marks)
        return (self._span.end,) if self._span.end else ()

    def _emit_text(self, text: str) -> list[Part]:
        whole = len(text)
        if self._after_mark:
            text = text.lstrip("\n" if self._in_form and self._span is None else None)
            self._after_mark = not text
        if not text:
            return []
        if self._span is None and self._thinking is not None and not (self._marks or text.isspace()):
            self._starts.pop(self._thinking.start, None)
        return [ThinkingPart(text) if self._span is not None else TextPart(text, self._at + whole - len(text))]

    def _emit_calls(self, text: str, complete: bool) -> list[Part]:
        """Returns the calls in `text`, or the text itself if it can't be parsed or was cut off."""
        found = self._parse_calls(text) if complete else []
        self._had_call |= bool(found)
        if found or self._tools is None:
            return found
        tags = self._tools.tags
        return [TextPart(tags.start + text + (tags.end if complete else ""), self._at - len(tags.start))]

    def _parse_calls(self, text: str) -> list[Part]:
        try:
            return list(self._tools.calls(text, self._box.tools)) if self._tools is not None else []
        except InvalidToolCall:
            return []


@dataclass(frozen=True, slots=True)
class PartUpdate:
    """A new part of a choice, and the chunks since the previous part that have extras."""

    choice: ChoiceState
    part: Part
    chunks: tuple[Chunk, ...] = ()


@dataclass(slots=True)
class ChoiceState:
    """Choice `index`: its prompt, its parameters, and everything received for it.

    `detokenizer`: if each token is added by itself, for origins, or because the tokens after the first tool call don't
    count. `one_call`: it ends after that call. `ids`: return the tokens' ids.

    `finish` is eos, stop, length, cancelled or tool; once it is set, new text is ignored. `pieces`: its parts as they
    came. `chunks`: those with extras that were requested besides the text; `unsent_chunks`: those since the last part.
    """

    index: int
    prompt: TokenizedPrompt
    sampling: SamplingParams
    splitter: Splitter
    detokenizer: TextStream | None = None
    one_call: bool = False
    ids: bool = False
    pieces: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    unsent_chunks: list[Chunk] = field(default_factory=list)
    finish: str = ""
    result: GenerationResult = UNFINISHED

    @property
    def parts(self) -> list[Part]:
        """The parts, with consecutive text and consecutive thinking joined."""
        return join_parts(self.pieces)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextPart))

    @property
    def thought(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ThinkingPart))

    @property
    def calls(self) -> list[ToolCall]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]

    def add(self, chunk: Chunk) -> list[StreamItem]:
        """Adds a chunk, and returns its parts. Does nothing after the end."""
        before = len(self.pieces)
        for one in self._separate(chunk):
            if self.finish:
                break
            self.tokens += one.token_ids
            if self.ids or one.logprobs is not None or one.origins is not None or one.rounds is not None:
                self.chunks.append(one)
                self.unsent_chunks.append(one)
            self._add(self.splitter.feed(one.text))
            self.finish = "tool" if self.one_call and self.calls else ""
        return self._updates(before)

    def _separate(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yields a chunk for each token if there is a detokenizer, else the chunk."""
        if self.detokenizer is None or not chunk.token_ids:
            yield chunk
            return
        for at, token in enumerate(chunk.token_ids):
            rows, origins = chunk.logprobs and chunk.logprobs[at : at + 1], chunk.origins and chunk.origins[at : at + 1]
            yield Chunk(self.detokenizer.feed((token,)).text, (token,), rows, origins, None if at else chunk.rounds)

    def end(self, result: GenerationResult) -> list[StreamItem]:
        """Adds the result, and returns the last parts and the choice."""
        before = len(self.pieces)
        if not self.finish:
            self._add(self.splitter.finish(cut=result.finish_reason == "length"))
            called = (self.one_call or result.finish_reason in ("eos", "stop")) and bool(self.calls)
            self.finish = "tool" if called else result.finish_reason
        self.result = result
        return [*self._updates(before), self]

    def _add(self, parts: Sequence[Part]) -> None:
        """Adds parts, up to the first call if it ends the choice."""
        calls = [place for place, part in enumerate(parts, start=1) if isinstance(part, ToolCall)]
        self.pieces += parts[: calls[0]] if self.one_call and calls else parts

    def _updates(self, before: int) -> list[StreamItem]:
        """Returns the pieces but the first `before`, joined; the chunks since the last part go with the first one."""
        items: list[StreamItem] = []
        for part in join_parts(self.pieces[before:]):
            items.append(PartUpdate(self, part, tuple(self.unsent_chunks)))
            self.unsent_chunks.clear()
        return items


StreamItem = str | PartUpdate | ChoiceState
"""A note that keeps the connection alive, a new part of a choice, or a choice that has ended."""


def join_parts(parts: Sequence[Part]) -> list[Part]:
    """Joins consecutive text and consecutive thinking."""
    found: list[Part] = []
    for _, group in groupby(parts, type):
        pieces = list(group)
        if isinstance(first := pieces[0], ToolCall):
            found += pieces
        else:
            found.append(replace(first, text="".join(one.text for one in pieces if not isinstance(one, ToolCall))))
    return found


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The choices to generate, and what was requested of them.

    `prompt_tokens`: of all prompts. `is_chat`: the prompt is a conversation, whose tools are `box`. `form`: the output
    format. `speculation`: options of the client's `stream`. `timeout`: in seconds.
    """

    model: ServedModel
    prompt_tokens: int
    choices: list[ChoiceState]
    is_chat: bool = True
    box: Toolbox = field(default_factory=Toolbox)
    form: mapping.OutputFormat | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def plan_answer(
    model: ServedModel,
    payload: Generation,
    source: TemplateInput | Sequence[TokenizedPrompt],
    form: mapping.OutputFormat | None,
    stop: str | Sequence[str] | None,
    max_tokens: int | None,
    logprobs: int | None = None,
    count: int = 1,
) -> AnswerPlan:
    """Plans `count` choices for a conversation, or for each prompt. This may take long; call it in a thread.

    The choices of a prompt differ in the seed. `max_tokens` None or -1: what the context has room for.

    Raises:
        Problem, InvalidRequest, ModelError: a value is out of range, the template rejects the conversation, or the
            format or the tools can't be enforced.
    """
    if is_chat := isinstance(source, TemplateInput):
        prompts, box, thinking = [model.tokenize_conversation(source)], source.box, model.thinking
    else:
        prompts, box, thinking = list(source), Toolbox(), None
    form = mapping.resolve_output_format(model, form)
    grammar = mapping.build_answer_grammar(model, prompts[0], box, form)
    limit = MAX_COUNT if max_tokens in (None, UNLIMITED) else max_tokens
    sampling = mapping.to_sampling_params(model, payload, limit, stop, grammar, logprobs)
    speculation = payload.speculation.model_dump() if payload.speculation is not None else {}
    by_token = box.single or speculation.get("origins")
    choices: list[ChoiceState] = []
    for prompt in prompts:
        room = max(model.context_length - len(prompt.tokens), 1) if limit == MAX_COUNT else limit
        for number in range(count):
            own = replace(sampling, seed=mapping.derive_seed(sampling.seed or 0, number), max_tokens=room)
            splitter = Splitter(thinking, model.tools, box, prompt.thinking_mode, form is not None, grammar is not None)
            ends = model.codec.end_tokens(own)
            detokenizer = TextStream(model.codec.spelling, prompt.tokens, own.stop, ends) if by_token else None
            choices.append(ChoiceState(len(choices), prompt, own, splitter, detokenizer, box.single))
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    return AnswerPlan(model, prompt_tokens, choices, is_chat, box, form, speculation, payload.timeout)
