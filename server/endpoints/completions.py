"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import chat_events, completion_events
from outrider.server.answers.guarded import guarded
from outrider.server.answers.parts import Splitter
from outrider.server.answers.run import Job
from outrider.server.answers.sse import EventStream
from outrider.server.answers.telling import telling
from outrider.server.desk import Desk, TheDesk, as_json
from outrider.server.endpoints.described import described, typed
from outrider.server.mapping import awaited
from outrider.server.mapping.asked import choices, usage_wanted
from outrider.server.mapping.manner import manner_of
from outrider.server.model.served import Prompt
from outrider.server.problems import Refused
from outrider.server.shapes.base import MOST_CHOICES
from outrider.server.shapes.completions import Completion, CompletionRequest

DEFAULT_TOKENS = 16
MAX_TOKEN = 2**31 - 1

router = APIRouter(route_class=typed())


@router.post("/v1/completions", response_model=None, responses=described(Completion, Completion))
async def complete(asked: CompletionRequest, request: Request, desk: TheDesk) -> Response:
    """Completes texts; of several prompts the choices follow one another."""
    desk.check_model(asked.model)
    _refuse(asked)
    given = _many(asked.prompt)
    prompts = [await _prompt(desk, one) for one in given]
    each = choices(asked)
    if len(prompts) * each > MOST_CHOICES:
        raise Refused(f"{len(prompts)} prompts with {each} choices each; expected at most {MOST_CHOICES} in all", "n")
    manner = manner_of(desk.model, asked, asked.max_tokens if asked.max_tokens is not None else DEFAULT_TOKENS)
    jobs = [Job(prompt.tokens, manner.another(index)) for prompt in prompts for index in range(each)]
    splitters = [Splitter() for _ in jobs]
    head = completion_events.Head(
        desk.model.id,
        manner.sampling.seed or 0,
        sum(len(prompt.tokens) for prompt in prompts),
        [_text(desk, one) if asked.echo else "" for one in given for _ in range(each)],
    )
    with_usage = usage_wanted(asked)
    if not asked.stream:
        return as_json(completion_events.completion(head, await desk.whole(request, jobs, splitters)))
    run = await desk.streaming(request, jobs)
    events = completion_events.chunks(head, telling(run, splitters), with_usage)
    return EventStream(guarded(events, chat_events.failed), run.close)


def _refuse(asked: CompletionRequest) -> None:
    awaited.refuse_probabilities(asked.logprobs, None)
    awaited.refuse_best_of(asked.best_of, asked.n)
    awaited.refuse_grammar(asked.response_format, asked.grammar)
    if asked.suffix:
        raise Refused("suffix: no text is filled in before another here; leave it out", "suffix")


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
    if any(not 0 <= token <= MAX_TOKEN for token in one):
        raise Refused(f"prompt: a token id is out of range; expected whole numbers from 0 to {MAX_TOKEN}", "prompt")
    return Prompt(tuple(one))
