"""OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outrider.server.shapes.base import MOST_CHOICES, Answered, Object, Outrider, Sampling, Timings, Usage, absent

Tokens = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(Sampling):
    """Texts, or token ids, that are to be completed; no chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_CHOICES)]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class CompletionChoice(Answered):
    index: int
    text: str
    logprobs: Object | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(Answered):
    """The whole answer, and in the same shape each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = absent()
    timings: Timings | None = absent()
    outrider: Outrider | None = absent()
