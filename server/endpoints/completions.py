"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import completion_events
from outrider.server.answers.afterwards import checker
from outrider.server.answers.parts import Splitter
from outrider.server.answers.probabilities import likeliest, speller
from outrider.server.answers.run import job
from outrider.server.answers.sse import EventStream
from outrider.server.answers.telling import Telling
from outrider.server.desk import Desk, TheDesk, as_json
from outrider.server.endpoints.described import chunks, described, typed
from outrider.server.mapping.asked import choices, usage_wanted
from outrider.server.mapping.form import form_of
from outrider.server.mapping.manner import manner_of
from outrider.server.model.served import Prompt
from outrider.server.problems import Refused
from outrider.server.shapes.base import MOST_CHOICES
from outrider.server.shapes.completions import Completion, CompletionRequest

DEFAULT_TOKENS = 16
MAX_TOKEN = 2**31 - 1

router = APIRouter(route_class=typed())


@router.post("/completions", response_model=None, responses=described(Completion, chunks(Completion)))
async def complete(asked: CompletionRequest, request: Request, desk: TheDesk) -> Response:
    """Completes texts; of several prompts the choices follow one another."""
    desk.check_model(asked.model)
    _refuse(asked)
    given = _many(asked.prompt)
    prompts = [await _prompt(desk, one) for one in given]
    each, tried = choices(asked), _tried(asked)
    if len(prompts) * tried > MOST_CHOICES:
        raise Refused(f"{len(prompts)} prompts with {tried} choices each; expected at most {MOST_CHOICES} in all", "n")
    most = asked.max_tokens if asked.max_tokens is not None else DEFAULT_TOKENS
    wanted = asked.logprobs if tried == each else asked.logprobs or 0  # the best is chosen by them
    form = await desk.form(form_of(asked))
    manner = manner_of(desk.model, asked, most, await desk.grammar(Prompt(()), form), wanted)
    manner = replace(manner, ids=bool(asked.return_token_ids))
    jobs = [job(desk.model.codec, prompt.tokens, manner.another(index)) for prompt in prompts for index in range(tried)]
    splitters = [Splitter() for _ in jobs]
    head = completion_events.Head(
        desk.model.id,
        manner.sampling.seed or 0,
        sum(len(prompt.tokens) for prompt in prompts),
        [_text(desk, one) if asked.echo else "" for one in given for _ in range(each)],
        speller(desk.model, manner.sampling) if asked.logprobs is not None else None,
        checker(form),
    )
    with_usage = usage_wanted(asked)
    if not asked.stream:
        told = await desk.whole(request, jobs, splitters)
        return as_json(completion_events.completion(head, likeliest(told, tried, each), told))
    run = await desk.streaming(request, jobs)
    return EventStream(Telling(run, splitters), completion_events.Events(head, with_usage))


def _refuse(asked: CompletionRequest) -> None:
    if asked.echo and asked.logprobs is not None:
        raise Refused("logprobs of the prompt are not supported; leave out echo or logprobs", "logprobs")
    if asked.suffix:
        raise Refused("suffix: fill-in-the-middle is not supported; leave it out", "suffix")


def _tried(asked: CompletionRequest) -> int:
    """How many texts are made of each prompt. Raises Refused."""
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


def _text(desk: Desk, one: str | list[int]) -> str:
    return one if isinstance(one, str) else desk.model.codec.decode(tuple(one))


async def _prompt(desk: Desk, one: str | list[int]) -> Prompt:
    if isinstance(one, str):
        return await desk.plain(one)
    if one and not 0 <= min(one) <= max(one) <= MAX_TOKEN:
        raise Refused(f"prompt: a token id is out of range; expected whole numbers from 0 to {MAX_TOKEN}", "prompt")
    return Prompt(tuple(one))
