"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers import response_events
from outrider.server.answers.afterwards import checker
from outrider.server.answers.parts import splitter
from outrider.server.answers.probabilities import speller
from outrider.server.answers.run import Job
from outrider.server.answers.sse import EventStream
from outrider.server.answers.telling import Telling
from outrider.server.answers.thoughts import counter
from outrider.server.desk import TheDesk, as_json
from outrider.server.endpoints.described import described, named_events, typed
from outrider.server.mapping import responses
from outrider.server.mapping.manner import manner, room, stops
from outrider.server.shapes.responses import InputTokens, ResponseObject, ResponsesRequest

router = APIRouter(route_class=typed())


@router.post("/responses", response_model=None, responses=described(ResponseObject, named_events()))
async def respond(asked: ResponsesRequest, request: Request, desk: TheDesk) -> Response:
    """Answers an input."""
    desk.check_model(asked.model)
    responses.refuse(asked)
    box = responses.box(desk.model, asked)
    form = await desk.form(responses.form(asked))
    prompt = await desk.prompt(responses.conversation(asked, box))
    grammar = await desk.grammar(prompt, form, box)
    how = manner(
        desk.model,
        asked.speculation,
        asked.timeout,
        max_tokens=room(desk.model, len(prompt.tokens), asked.max_output_tokens),
        temp=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop=stops(asked.stop),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        ignore_eos=asked.ignore_eos,
        grammar=grammar,
        logprobs=responses.logprobs(asked),
    )
    head = response_events.Head(
        model=desk.model.id,
        seed=how.sampling.seed or 0,
        prompt_tokens=len(prompt.tokens),
        thoughts=counter(desk.model, prompt),
        notes=responses.notes(asked),
        tool_choice=_choice(asked),
        tools=[tool.model_dump() for tool in asked.tools or ()],
        parallel=asked.parallel_tool_calls is not False,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        temperature=how.sampling.temp,
        top_p=how.sampling.top_p,
        speller=speller(desk.model, how.sampling),
        checked=checker(form, box),
    )
    jobs = [Job(prompt.tokens, how)]
    splitters = [splitter(desk.model, prompt, box, form is not None, grammar is not None)]
    if not asked.stream:
        (choice,) = await desk.whole(request, jobs, splitters, box.one)
        return as_json(response_events.response(head, choice))
    run = await desk.streaming(request, jobs)
    return EventStream(Telling(run, splitters, box.one), response_events.Events(head))


@router.post("/responses/input_tokens", response_model=None, responses=described(InputTokens))
async def count(asked: ResponsesRequest, desk: TheDesk) -> Response:
    """The tokens that an input is."""
    desk.check_model(asked.model)
    responses.refuse(asked)
    prompt = await desk.prompt(responses.conversation(asked, responses.box(desk.model, asked)))
    return as_json(InputTokens(input_tokens=len(prompt.tokens)))


def _choice(asked: ResponsesRequest) -> str | dict[str, Any]:
    choice = asked.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()
