"""A completed text in OpenAI's shape: whole, or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from outrider.server.answers import sse
from outrider.server.answers.afterwards import Notes, no_notes
from outrider.server.answers.extras import NO_EXTRAS, Extras, speculated
from outrider.server.answers.naming import FINGERPRINT, about
from outrider.server.answers.parts import Said
from outrider.server.answers.probabilities import Listing, Speller
from outrider.server.answers.stencil import Stencil
from outrider.server.answers.telling import Choice, Told, Waited, Words, sum_of, timings
from outrider.server.answers.usage import usage
from outrider.server.problems import Problem
from outrider.server.shapes.completions import Completion, CompletionChoice


@dataclass(frozen=True, slots=True)
class Head:
    """What all events of an answer have in common. `echoes`: what each choice's text begins with.

    `speller`: for log-probabilities, if they are wanted. `notes`: of choices.
    """

    model: str
    seed: int
    prompt_tokens: int
    echoes: Sequence[str]
    speller: Speller | None = None
    notes: Notes = no_notes
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
            finish_reason=_finish(choice),
            **_beside(Listing(head.speller) if head.speller is not None else None, choice.extras),
        )
        for choice in choices
    ]
    numbers = {"timings": timings(sum_of(made)), "outrider": about(choices[0].result, head.seed, head.notes(choices))}
    return head.shape(texts, **numbers, usage=usage(head.prompt_tokens, made))


class Events:
    """A stream's; a choice's last has its reason and its timings."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._ended: list[Choice] = []
        self._listings = [Listing(head.speller) if head.speller is not None else None for _ in head.echoes]
        self._stencil = cache(lambda index: Stencil(lambda text: self._event(index, text)))

    def begin(self) -> bytes:
        return b"".join(self._event(index, echo) for index, echo in enumerate(self._head.echoes) if echo)

    def of(self, one: Words) -> bytes:
        match one:
            case Told(index=index, part=Said(text=text), extras=extras):
                if extras is NO_EXTRAS:
                    return self._stencil(index).filled(text)
                return self._event(index, text, **_beside(self._listings[index], extras))
            case Waited(note=note):
                return sse.comment(note)
            case Choice():
                self._ended.append(one)
                rest = _beside(self._listings[one.index], one.untold)
                last = CompletionChoice(index=one.index, text="", finish_reason=_finish(one), **rest)
                return _event(self._head.shape([last], **_numbers(self._head, [one])))
        return b""

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        told = usage(self._head.prompt_tokens, self._ended)
        return _event(self._head.shape([], **_numbers(self._head, self._ended), usage=told)) + sse.DONE

    def failed(self, problem: Problem) -> bytes:
        return sse.failed(problem)

    def _event(self, index: int, text: str, **beside: Any) -> bytes:
        return _event(self._head.shape([CompletionChoice(index=index, text=text, **beside)]))


def _numbers(head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    return {"timings": timings(sum_of(choices)), "outrider": about(choices[0].result, head.seed, head.notes(choices))}


def _beside(listing: Listing | None, extras: Extras) -> dict[str, Any]:
    """What a choice has beside its text."""
    rows = listing.next(extras.logprobs) if listing is not None else None
    return {"logprobs": rows, "token_ids": list(extras.ids) or None, "speculation": speculated(extras)}


def _finish(choice: Choice) -> Any:
    return "length" if choice.finish == "length" else "stop"


def _event(shape: Completion) -> bytes:
    return sse.event(shape.model_dump_json())
