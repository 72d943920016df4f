"""POST /v1/completions: OpenAI's text completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import sse
from outrider.server.answers.parts import (
    ChoiceState,
    KeepAlive,
    PartStream,
    PartUpdate,
    Splitter,
    StreamItem,
    TextPart,
    timings,
    total_timings,
)
from outrider.server.answers.run import NO_EXTRAS, Extras, job, speculated
from outrider.server.answers.sse import EventStream, Stencil
from outrider.server.answers.usage import (
    FINGERPRINT,
    CompletionLogprobWriter,
    LogprobFormatter,
    SchemaChecker,
    about,
    likeliest,
    no_notes,
    schema_checker,
    speller,
    usage,
)
from outrider.server.endpoints.json_route import JsonRoute, chunk_docs, response_docs
from outrider.server.mapping.generation_params import choices, generation_params_of, include_usage_of
from outrider.server.mapping.output_format import output_format_of
from outrider.server.model.served import TokenizedPrompt
from outrider.server.problems import Problem, Refused
from outrider.server.server_context import ServerContext, TheServer, as_json
from outrider.server.shapes.base import MAX_CHOICES
from outrider.server.shapes.chat import Completion, CompletionChoice, CompletionRequest


@dataclass(frozen=True, slots=True)
class CompletionInfo:
    """What all events of an answer share. `echoes`: the text that each choice begins with.

    `speller` is None without log-probabilities. `notes` checks schemas.
    """

    model: str
    seed: int
    prompt_tokens: int
    echoes: Sequence[str]
    speller: LogprobFormatter | None = None
    notes: SchemaChecker = no_notes
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def shape(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, system_fingerprint=FINGERPRINT, choices=choices, **more
        )


def completion(head: CompletionInfo, choices: Sequence[ChoiceState], made: Sequence[ChoiceState]) -> Completion:
    """Returns the full response. Usage and timings include all choices that were `made`."""
    texts = [
        CompletionChoice(
            index=choice.index,
            text=head.echoes[choice.index] + choice.text,
            finish_reason=_finish(choice),
            **_beside(CompletionLogprobWriter(head.speller) if head.speller is not None else None, choice.extras),
        )
        for choice in choices
    ]
    numbers = {
        "timings": timings(total_timings(made)),
        "outrider": about(choices[0].result, head.seed, head.notes(choices)),
    }
    return head.shape(texts, **numbers, usage=usage(head.prompt_tokens, made))


class CompletionEvents:
    """Writes a stream. A choice's last event has its finish reason and timings."""

    def __init__(self, head: CompletionInfo, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._ended: list[ChoiceState] = []
        self._listings = [
            CompletionLogprobWriter(head.speller) if head.speller is not None else None for _ in head.echoes
        ]
        self._stencil = cache(lambda index: Stencil(lambda text: self._event(index, text)))

    def begin(self) -> bytes:
        return b"".join(self._event(index, echo) for index, echo in enumerate(self._head.echoes) if echo)

    def of(self, one: StreamItem) -> bytes:
        match one:
            case PartUpdate(index=index, part=TextPart(text=text), extras=extras):
                if extras is NO_EXTRAS:
                    return self._stencil(index).filled(text)
                return self._event(index, text, **_beside(self._listings[index], extras))
            case KeepAlive(note=note):
                return sse.comment(note)
            case ChoiceState():
                self._ended.append(one)
                rest = _beside(self._listings[one.index], one.untold)
                last = CompletionChoice(index=one.index, text="", finish_reason=_finish(one), **rest)
                return _event(self._head.shape([last], **_numbers(self._head, [one])))
        return b""

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        total = usage(self._head.prompt_tokens, self._ended)
        return _event(self._head.shape([], **_numbers(self._head, self._ended), usage=total)) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        return sse.failed(problem)

    def _event(self, index: int, text: str, **beside: Any) -> bytes:
        return _event(self._head.shape([CompletionChoice(index=index, text=text, **beside)]))


def _numbers(head: CompletionInfo, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    return {
        "timings": timings(total_timings(choices)),
        "outrider": about(choices[0].result, head.seed, head.notes(choices)),
    }


def _beside(listing: CompletionLogprobWriter | None, extras: Extras) -> dict[str, Any]:
    """Returns a choice's extra fields."""
    rows = listing.next(extras.logprobs) if listing is not None else None
    return {"logprobs": rows, "token_ids": list(extras.ids) or None, "speculation": speculated(extras)}


def _finish(choice: ChoiceState) -> Any:
    return "length" if choice.finish == "length" else "stop"


def _event(shape: Completion) -> bytes:
    return sse.event(shape.model_dump_json())


DEFAULT_TOKENS = 16
MAX_TOKEN = 2**31 - 1

router = APIRouter(route_class=JsonRoute)


@router.post("/completions", response_model=None, responses=response_docs(Completion, chunk_docs(Completion)))
async def complete(asked: CompletionRequest, request: Request, context: TheServer) -> Response:
    """Completes texts. Choices of several prompts follow one another."""
    context.check_model(asked.model)
    _refuse(asked)
    given = _many(asked.prompt)
    prompts = [await _prompt(context, one) for one in given]
    each, tried = choices(asked), _tried(asked)
    if len(prompts) * tried > MAX_CHOICES:
        raise Refused(f"{len(prompts)} prompts with {tried} choices each; expected at most {MAX_CHOICES} in all", "n")
    most = asked.max_tokens if asked.max_tokens is not None else DEFAULT_TOKENS
    wanted = asked.logprobs if tried == each else asked.logprobs or 0  # best_of ranks by them
    form = await context.form(output_format_of(asked))
    params = generation_params_of(context.model, asked, most, await context.grammar(TokenizedPrompt(()), form), wanted)
    params = replace(params, ids=bool(asked.return_token_ids))
    jobs = [
        job(context.model.codec, prompt.tokens, params.another(index)) for prompt in prompts for index in range(tried)
    ]
    splitters = [Splitter() for _ in jobs]
    head = CompletionInfo(
        context.model.id,
        params.sampling.seed or 0,
        sum(len(prompt.tokens) for prompt in prompts),
        [_text(context, one) if asked.echo else "" for one in given for _ in range(each)],
        speller(context.model, params.sampling) if asked.logprobs is not None else None,
        schema_checker(form),
    )
    with_usage = include_usage_of(asked)
    if not asked.stream:
        made = await context.whole(request, jobs, splitters)
        return as_json(completion(head, likeliest(made, tried, each), made))
    run = await context.streaming(request, jobs)
    return EventStream(PartStream(run, splitters), CompletionEvents(head, with_usage))


def _refuse(asked: CompletionRequest) -> None:
    if asked.echo and asked.logprobs is not None:
        raise Refused("logprobs of the prompt are not supported; leave out echo or logprobs", "logprobs")
    if asked.suffix:
        raise Refused("suffix: fill-in-the-middle is not supported; leave it out", "suffix")


def _tried(asked: CompletionRequest) -> int:
    """Returns the number of choices generated per prompt. Raises Refused."""
    each = choices(asked)
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


def _text(context: ServerContext, one: str | list[int]) -> str:
    return one if isinstance(one, str) else context.model.codec.decode(tuple(one))


async def _prompt(context: ServerContext, one: str | list[int]) -> TokenizedPrompt:
    if isinstance(one, str):
        return await context.plain(one)
    if one and not 0 <= min(one) <= max(one) <= MAX_TOKEN:
        raise Refused(f"prompt: a token id is out of range; expected whole numbers from 0 to {MAX_TOKEN}", "prompt")
    return TokenizedPrompt(tuple(one))
