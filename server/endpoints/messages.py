"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients and coding agents ask."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import message_events
from outrider.server.answers.parts import splitter
from outrider.server.answers.run import Job
from outrider.server.answers.sse import EventStream
from outrider.server.answers.stopping import stop_that_ended
from outrider.server.answers.telling import Choice, Telling
from outrider.server.desk import TheDesk, as_json
from outrider.server.endpoints.described import described, named_events, typed
from outrider.server.mapping import messages
from outrider.server.mapping.manner import manner, stops
from outrider.server.shapes.messages import Counted, MessageAnswer, MessagesRequest, TokenCount

router = APIRouter(route_class=typed())


@router.post("/messages", response_model=None, responses=described(MessageAnswer, named_events(), anthropic=True))
async def answer(asked: MessagesRequest, request: Request, desk: TheDesk) -> Response:
    """Answers a conversation."""
    desk.check_model(asked.model)
    messages.refuse(asked)
    box = messages.box(desk.model, asked)
    form = messages.form(asked)
    prompt = await desk.prompt(messages.conversation(asked, box))
    grammar = await desk.grammar(prompt, form, box)
    how = manner(
        desk.model,
        asked.speculation,
        asked.timeout,
        max_tokens=asked.max_tokens,
        temp=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        grammar=grammar,
        stop=stops(asked.stop_sequences),
    )

    def stopped_by(choice: Choice) -> str | None:
        return stop_that_ended(desk.model.codec, prompt.tokens, choice.tokens, how.sampling)

    head = message_events.Head(desk.model.id, how.sampling.seed or 0, len(prompt.tokens), stopped_by)
    jobs = [Job(prompt.tokens, how)]
    splitters = [splitter(desk.model, prompt, box, form is not None, grammar is not None)]
    if not asked.stream:
        (choice,) = await desk.whole(request, jobs, splitters, box.one)
        return as_json(message_events.message(head, choice))
    run = await desk.streaming(request, jobs)
    return EventStream(Telling(run, splitters, box.one), message_events.Events(head))


@router.post("/messages/count_tokens", response_model=None, responses=described(TokenCount, anthropic=True))
async def count(asked: Counted, desk: TheDesk) -> Response:
    """The tokens that a conversation is."""
    desk.check_model(asked.model)
    messages.refuse(asked)
    prompt = await desk.prompt(messages.conversation(asked, messages.box(desk.model, asked)))
    return as_json(TokenCount(input_tokens=len(prompt.tokens)))
