"""A completed text in OpenAI's shape: whole, or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.orchestrator.client.result import TokenLogprob
from outrider.server.answers import sse
from outrider.server.answers.naming import FINGERPRINT, about
from outrider.server.answers.parts import Said
from outrider.server.answers.probabilities import Listing, Speller
from outrider.server.answers.telling import Choice, Told, Waited, sum_of, timings
from outrider.server.answers.usage import usage
from outrider.server.shapes.completions import Completion, CompletionChoice, CompletionLogprobs


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of an answer have in common. `echoes`: what each choice's text begins with.

    `speller`: for log-probabilities, if they are wanted.
    """

    model: str
    seed: int
    prompt_tokens: int
    echoes: Sequence[str]
    speller: Speller | None = None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def shape(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, system_fingerprint=FINGERPRINT, choices=choices, **more
        )


def completion(head: Head, choices: Sequence[Choice], made: Sequence[Choice]) -> Completion:
    """The whole answer; its numbers are those of all that was `made` for it."""
    texts = [
        CompletionChoice(
            index=choice.index,
            text=head.echoes[choice.index] + choice.said,
            logprobs=Listing(head.speller).next(choice.logprobs) if head.speller is not None else None,
            finish_reason=_finish(choice),
        )
        for choice in choices
    ]
    numbers = {"timings": timings(sum_of(made)), "outrider": about(choices[0].result, head.seed)}
    return head.shape(texts, **numbers, usage=usage(head.prompt_tokens, made))


async def chunks(head: Head, told: AsyncIterator[Waited | Told | Choice], include_usage: bool) -> AsyncIterator[bytes]:
    """The stream's events; a choice's last has its reason and its timings."""
    for index, echo in enumerate(head.echoes):
        if echo:
            yield _event(head.shape([CompletionChoice(index=index, text=echo)]))
    ended: list[Choice] = []
    speller = head.speller
    listings = [Listing(speller) for _ in head.echoes] if speller is not None else []

    def logprobs(index: int, rows: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        return listings[index].next(rows) if listings else None

    async for one in told:
        match one:
            case Waited(note=note):
                yield sse.comment(note)
            case Told(index=index, part=Said(text=text), logprobs=rows):
                yield _event(head.shape([CompletionChoice(index=index, text=text, logprobs=logprobs(index, rows))]))
            case Choice():
                ended.append(one)
                rest = logprobs(one.index, one.untold)
                last = CompletionChoice(index=one.index, text="", logprobs=rest, finish_reason=_finish(one))
                yield _event(head.shape([last], **_numbers(head, [one])))
    if include_usage:
        yield _event(head.shape([], **_numbers(head, ended), usage=usage(head.prompt_tokens, ended)))
    yield sse.DONE


def _numbers(head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    return {"timings": timings(sum_of(choices)), "outrider": about(choices[0].result, head.seed)}


def _finish(choice: Choice) -> Any:
    return "length" if choice.finish == "length" else "stop"


def _event(shape: Completion) -> bytes:
    return sse.event(shape.model_dump_json())
