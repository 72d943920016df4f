"""POST /v1/completions: OpenAI's text completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from outrider.orchestrator.client.dialogue import MAX_TOKEN, Chunk
from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.answers.choices import AnswerPlan, ChoiceState, Part, TextPart, plan_answer
from outrider.server.answers.formatter import CompletionFormatter
from outrider.server.answers.usage import PlacedToken, logprob_formatters, logprobs_of, speculated
from outrider.server.endpoints.json_route import JsonRoute, chunk_docs, response_docs
from outrider.server.mapping import include_usage_of, output_format_of
from outrider.server.model.served import ServedModel, TokenizedPrompt
from outrider.server.problems import Refused
from outrider.server.schemas import (
    MAX_CHOICES,
    MAX_TOKENS,
    ApiResponse,
    CompletionBase,
    Sampling,
    Speculated,
    SpelledToken,
    absent,
    bounded,
    unsupported,
)
from outrider.server.server_context import TheServer

Tokens = Annotated[list[int], bounded(MAX_TOKENS, least=1)]


class CompletionRequest(Sampling):
    """A completion of texts or token ids. No chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], bounded(MAX_CHOICES, least=1)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, unsupported("fill-in-the-middle is not supported; leave it out")] = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="vLLM's: return token ids")


class CompletionLogprobs(ApiResponse):
    """For each token: text, log-probability, the likeliest at its position by text, and its text's offset."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ApiResponse):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = absent()
    speculation: Speculated | None = absent()


class Completion(CompletionBase):
    """The full response, and each event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


def completion_logprobs(placed: Sequence[PlacedToken]) -> CompletionLogprobs | None:
    """Formats the next tokens; None without any."""
    if not placed:
        return None
    spelled = [one.spelled for one in placed]
    return CompletionLogprobs(
        tokens=[one.token for one in spelled],
        token_logprobs=[one.logprob for one in spelled],
        top_logprobs=list(map(_top, spelled)),
        text_offset=[one.start for one in placed],
    )


def _top(spelled: SpelledToken) -> dict[str, float]:
    """Top tokens by text. Of tokens with equal text the likeliest is kept; the chosen token is always included."""
    found = {spelled.token: spelled.logprob}
    for one in spelled.top_logprobs:
        found.setdefault(one.token, one.logprob)
    return found


def likeliest(choices: Sequence[ChoiceState], tried: int, kept: int) -> list[ChoiceState]:
    """Of every `tried` choices keeps the `kept` with the highest mean log-probability, best first, and renumbers
    them."""
    if tried == kept:
        return list(choices)

    def mean(choice: ChoiceState) -> float:
        rows = logprobs_of(choice.chunks)
        return sum(row.logprob for row in rows) / max(len(rows), 1)

    best: list[ChoiceState] = []
    for start in range(0, len(choices), tried):
        best += sorted(choices[start : start + tried], key=mean, reverse=True)[:kept]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


class TextCompletionFormatter(CompletionFormatter):
    """Formats text completions. `echoes`: the text that each choice begins with."""

    prefix = "cmpl"
    response = Completion
    chunk = Completion

    def __init__(self, plan: AnswerPlan, asked: CompletionRequest, echoes: Sequence[str]) -> None:
        super().__init__(plan, include_usage_of(asked))
        self._echoes = echoes
        self._tried, self._each = _tried(asked), asked.n or 1
        self._logprobs = logprob_formatters(plan) if asked.logprobs is not None else None

    def begin(self) -> bytes:
        begun = zip(self.plan.choices, map(TextPart, self._echoes), strict=True)
        return b"".join(self._event([self._chunk_choice(choice, echo)]) for choice, echo in begun if echo.text)

    def _kept(self) -> list[ChoiceState]:
        return likeliest(self.plan.choices, self._tried, self._each)

    def _choice(self, choice: ChoiceState) -> CompletionChoice:
        text = TextPart(self._echoes[choice.index] + choice.text)
        return self._chunk_choice(choice, text, choice.chunks, choice.finish)

    def _chunk_choice(
        self, choice: ChoiceState, part: Part | None, chunks: Sequence[Chunk] = (), finish: str | None = None
    ) -> CompletionChoice:
        placed = self._logprobs[choice.index].next(chunks) if self._logprobs is not None else []
        return CompletionChoice(
            index=choice.index,
            text=part.text if isinstance(part, TextPart) else "",
            logprobs=completion_logprobs(placed),
            finish_reason=None if finish is None else "length" if finish == "length" else "stop",
            token_ids=[token for chunk in chunks for token in chunk.token_ids] or None if choice.ids else None,
            speculation=speculated(choice, chunks),
        )


DEFAULT_TOKENS = 16

router = APIRouter(route_class=JsonRoute)


@router.post("/completions", response_model=None, responses=response_docs(Completion, chunk_docs(Completion)))
async def complete(asked: CompletionRequest, request: Request, context: TheServer) -> Response:
    """Completes texts. Choices of several prompts follow one another."""
    if asked.echo and asked.logprobs is not None:
        raise Refused("logprobs of the prompt are not supported; leave out echo or logprobs", "logprobs")
    formatter = await asyncio.to_thread(_formatter, context.model, asked)
    return await context.respond(request, formatter, asked.stream)


def _formatter(model: ServedModel, asked: CompletionRequest) -> TextCompletionFormatter:
    """Plans the choices of all prompts. An echo is the text that a kept one begins with."""
    given, each, tried = _many(asked.prompt), asked.n or 1, _tried(asked)
    prompts = [_tokens(model, one) for one in given]
    if len(prompts) * tried > MAX_CHOICES:
        raise Refused(f"{len(prompts)} prompts with {tried} choices each; expected at most {MAX_CHOICES} in all", "n")
    most = asked.max_tokens if asked.max_tokens is not None else DEFAULT_TOKENS
    wanted = asked.logprobs if tried == each else asked.logprobs or 0  # best_of ranks by them
    plan = plan_answer(model, asked, prompts, output_format_of(asked), asked.stop, most, wanted, tried)
    for choice in plan.choices:
        choice.ids = bool(asked.return_token_ids)
    texts = [one if isinstance(one, str) else model.codec.decode(tuple(one)) for one in given] if asked.echo else []
    echoes = [text for text in texts or [""] * len(given) for _ in range(each)]
    return TextCompletionFormatter(plan, asked, echoes)


def _tried(asked: CompletionRequest) -> int:
    """Returns the number of choices generated per prompt. Raises Refused."""
    each = asked.n or 1
    if asked.best_of is None or asked.best_of == each:
        return each
    if asked.best_of < each:
        raise Refused(f"best_of is {asked.best_of}, less than n ({each}); expected at least n", "best_of")
    if asked.stream:
        raise Refused("best_of can't be streamed; leave out best_of or stream", "best_of")
    return asked.best_of


def _many(prompt: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    tokens = [one for one in prompt if isinstance(one, int)]
    if tokens:
        return [tokens]
    return [one for one in prompt if not isinstance(one, int)]


def _tokens(model: ServedModel, prompt: str | list[int]) -> TokenizedPrompt:
    if isinstance(prompt, str):
        return model.plain(prompt)
    if prompt and not 0 <= min(prompt) <= max(prompt) <= MAX_TOKEN:
        raise Refused(f"prompt: a token id is out of range; expected whole numbers from 0 to {MAX_TOKEN}", "prompt")
    return TokenizedPrompt(tuple(prompt))
