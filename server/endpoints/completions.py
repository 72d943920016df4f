"""POST /v1/completions: OpenAI's text completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from outrider.orchestrator.client.dialogue import MAX_TOKEN_ID, Chunk
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import MAX_LOGPROBS
from outrider.server import schemas
from outrider.server.answers.choices import AnswerPlan, ChoiceState, Part, TextPart, plan_answer
from outrider.server.answers.formatter import CompletionFormatter, PlacedToken, collect_logprobs, report_speculation
from outrider.server.endpoints.json_route import JsonRoute, response_docs
from outrider.server.mapping import get_output_format
from outrider.server.model.served import ServedModel, TokenizedPrompt
from outrider.server.problems import Problem
from outrider.server.server_context import ContextDependency

Tokens = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], schemas.bounded(schemas.MAX_TOKENS, least=1)]
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(schemas.Sampling):
    """A completion of texts or token ids. No chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], schemas.bounded(schemas.MAX_CHOICES, least=1)]
    best_of: Annotated[int, Field(ge=1, le=schemas.MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, schemas.unsupported("fill-in-the-middle is not supported; leave it out")] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="vLLM's: return token ids")


class CompletionLogprobs(schemas.ApiResponse):
    """For each token: its text, log-probability, likeliest alternatives by text, and text offset.

    An echoed prompt's first token has null for a log-probability and for alternatives.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(schemas.ApiResponse):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = schemas.omit_if_none()
    speculation: schemas.SpeculationReport | None = schemas.omit_if_none()


class Completion(schemas.CompletionBase):
    """The full response, and each event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


def format_logprobs(placed: Sequence[PlacedToken], echoes: bool = False) -> CompletionLogprobs | None:
    """Formats the next tokens; returns None if there are none. `echoes`: the first one begins the prompt."""
    if not placed:
        return None
    spelled = [one.spelled for one in placed]
    found = CompletionLogprobs(
        tokens=[one.token for one in spelled],
        token_logprobs=[one.logprob for one in spelled],
        top_logprobs=list(map(_top_by_text, spelled)),
        text_offset=[one.start for one in placed],
    )
    if echoes:
        found.token_logprobs[0] = found.top_logprobs[0] = None
    return found


def _top_by_text(spelled: schemas.ChatTokenLogprob) -> dict[str, float]:
    """Returns the top tokens by text, of equal texts the likeliest. The chosen token is always included."""
    found = {spelled.token: spelled.logprob}
    for one in spelled.top_logprobs:
        found.setdefault(one.token, one.logprob)
    return found


def select_best(choices: Sequence[ChoiceState], tried: int, kept: int) -> list[ChoiceState]:
    """Returns, of every `tried` choices, the `kept` with the highest mean log-probability, best first, renumbered."""
    if tried == kept:
        return list(choices)

    def mean(choice: ChoiceState) -> float:
        rows = collect_logprobs(choice.chunks)
        return sum(row.logprob for row in rows) / max(len(rows), 1)

    prompts = (sorted(choices[at : at + tried], key=mean, reverse=True) for at in range(0, len(choices), tried))
    best = [choice for ranked in prompts for choice in ranked[:kept]]
    return [replace(choice, index=index) for index, choice in enumerate(best)]


class TextCompletionFormatter(CompletionFormatter):
    """Formats text completions. `echoes`: the text that each choice begins with."""

    prefix = "cmpl"
    response = Completion
    chunk = Completion

    def __init__(self, plan: AnswerPlan, payload: CompletionRequest, echoes: Sequence[str]) -> None:
        super().__init__(plan, payload)
        self._echoes = echoes
        self._candidates, self._each = _count_candidates(payload), payload.n or 1
        self._lists_logprobs = payload.logprobs is not None

    def begin(self) -> bytes:
        begun = zip(self.plan.choices, map(TextPart, self._echoes), strict=True)
        return b"".join(self._event([self._format_chunk_choice(choice, echo)]) for choice, echo in begun if echo.text)

    def _returned_choices(self) -> list[ChoiceState]:
        return select_best(self.plan.choices, self._candidates, self._each)

    def _format_choice(self, choice: ChoiceState) -> CompletionChoice:
        text = TextPart(self._echoes[choice.index] + choice.text)
        return self._format_chunk_choice(choice, text, choice.chunks, choice.finish, self._place_prompt(choice))

    def _place_prompt(self, choice: ChoiceState) -> list[PlacedToken]:
        """Returns the tokens of an echoed prompt, if their log-probabilities are requested."""
        if choice.sampling.prompt_logprobs is None:
            return []
        rows = choice.result.prompt_logprobs
        if rows is None:
            raise WorkerError("the logprobs of the prompt were lost, because the target failed; send the request again")
        return self._logprobs[choice.index].format_prompt(self._echoes[choice.index], choice.prompt.tokens, rows)

    def _format_chunk_choice(
        self,
        choice: ChoiceState,
        part: Part | None,
        chunks: Sequence[Chunk] = (),
        finish: str | None = None,
        prompt: Sequence[PlacedToken] = (),
    ) -> CompletionChoice:
        placed = self._logprobs[choice.index].format(chunks) if self._lists_logprobs else []
        return CompletionChoice(
            index=choice.index,
            text=part.text if isinstance(part, TextPart) else "",
            logprobs=format_logprobs([*prompt, *placed], bool(prompt)),
            finish_reason=None if finish is None else "length" if finish == "length" else "stop",
            token_ids=[token for chunk in chunks for token in chunk.token_ids] or None if choice.ids else None,
            speculation=report_speculation(chunks),
        )


router = APIRouter(route_class=JsonRoute)


@router.post("/completions", response_model=None, responses=response_docs(Completion, Completion))
async def complete(payload: CompletionRequest, request: Request, context: ContextDependency) -> BaseModel | Response:
    """Completes texts. Choices of several prompts follow one another."""
    if payload.echo and payload.logprobs is not None and payload.stream:
        raise Problem("logprobs of an echoed prompt can't be streamed; leave out echo, logprobs or stream", "stream")
    formatter = await asyncio.to_thread(_create_formatter, context.model, payload)
    return await context.respond(request, formatter, payload.stream)


def _create_formatter(model: ServedModel, payload: CompletionRequest) -> TextCompletionFormatter:
    """Plans the choices of all prompts. An echo is the prompt's text, which a returned choice begins with."""
    whole, each, tried = payload.prompt, payload.n or 1, _count_candidates(payload)
    is_one = isinstance(whole, str) or isinstance(whole[0], int)
    given = cast("list[str | list[int]]", [whole] if is_one else whole)
    prompts = [model.tokenize_text(one) if isinstance(one, str) else TokenizedPrompt(tuple(one)) for one in given]
    if len(prompts) * tried > schemas.MAX_CHOICES:
        raise Problem(
            f"{len(prompts)} prompts with {tried} choices each; expected at most {schemas.MAX_CHOICES} in all", "n"
        )
    most = payload.max_tokens if payload.max_tokens is not None else DEFAULT_MAX_TOKENS
    if not (most or payload.echo):
        raise Problem("max_tokens is 0; expected at least 1, or echo, which returns the prompt", "max_tokens")
    wanted = payload.logprobs if tried == each else payload.logprobs or 0  # best_of ranks by them
    plan = plan_answer(model, payload, prompts, get_output_format(payload), payload.stop, most or 1, wanted, tried)
    for choice in plan.choices:
        choice.ids = bool(payload.return_token_ids)
        choice.finish = "" if most else "length"  # what is generated after a prompt is ignored
        if payload.echo:
            choice.sampling = choice.sampling.changed(prompt_logprobs=payload.logprobs)
    texts = [one if isinstance(one, str) else model.codec.decode(tuple(one)) for one in given] if payload.echo else []
    echoes = [text for text in texts or [""] * len(given) for _ in range(each)]
    return TextCompletionFormatter(plan, payload, echoes)


def _count_candidates(payload: CompletionRequest) -> int:
    """Returns the number of choices generated per prompt. Raises Problem."""
    each = payload.n or 1
    if payload.best_of is None or payload.best_of == each:
        return each
    if payload.best_of < each:
        raise Problem(f"best_of is {payload.best_of}, less than n ({each}); expected at least n", "best_of")
    if payload.stream:
        raise Problem("best_of can't be streamed; leave out best_of or stream", "best_of")
    return payload.best_of
