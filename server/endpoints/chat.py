"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import chat_events
from outrider.server.answers.afterwards import checker
from outrider.server.answers.parts import splitter
from outrider.server.answers.probabilities import speller
from outrider.server.answers.run import job
from outrider.server.answers.sse import EventStream
from outrider.server.answers.telling import Telling
from outrider.server.answers.thoughts import counter
from outrider.server.desk import TheDesk, as_json
from outrider.server.endpoints.described import chunks, described, typed
from outrider.server.mapping import chat
from outrider.server.mapping.asked import choices, usage_wanted
from outrider.server.mapping.form import form_of
from outrider.server.mapping.manner import manner_of, room
from outrider.server.problems import Refused
from outrider.server.shapes.chat import ChatChunk, ChatCompletion, ChatRequest

router = APIRouter(route_class=typed())


@router.post("/chat/completions", response_model=None, responses=described(ChatCompletion, chunks(ChatChunk)))
async def complete(asked: ChatRequest, request: Request, desk: TheDesk) -> Response:
    """Answers a conversation."""
    desk.check_model(asked.model)
    chat.refuse(asked)
    box = chat.box(desk.model, asked)
    form, wanted = await desk.form(form_of(asked)), chat.logprobs(asked)
    prompt = await desk.prompt(chat.conversation(asked, box))
    grammar = await desk.grammar(prompt, form, box)
    manner = manner_of(desk.model, asked, room(desk.model, len(prompt.tokens), _most(asked)), grammar, wanted)
    jobs = [job(desk.model.codec, prompt.tokens, manner.another(index)) for index in range(choices(asked))]
    splitters = [splitter(desk.model, prompt, box, form is not None, grammar is not None) for _ in jobs]
    spell = speller(desk.model, manner.sampling)
    thoughts = counter(desk.model, prompt)
    head = chat_events.Head(
        desk.model.id, manner.sampling.seed or 0, len(prompt.tokens), thoughts, spell, checker(form, box)
    )
    with_usage = usage_wanted(asked)
    if not asked.stream:
        return as_json(chat_events.completion(head, await desk.whole(request, jobs, splitters, box.one)))
    run = await desk.streaming(request, jobs)
    return EventStream(Telling(run, splitters, box.one), chat_events.Events(head, len(jobs), with_usage))


def _most(asked: ChatRequest) -> int | None:
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise Refused(f"max_tokens is {older} and max_completion_tokens {newer}; expected one of them", "max_tokens")
    return newer if newer is not None else older
