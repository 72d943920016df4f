"""OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outrider.protocol.sampling import MOST_LOGPROBS
from outrider.server.shapes.base import (
    MOST_CHOICES,
    MOST_TOKENS,
    Answered,
    Outrider,
    Sampling,
    Timings,
    Usage,
    absent,
    many,
)
from outrider.server.shapes.speculated import Speculated

Tokens = Annotated[list[int], many(MOST_TOKENS, least=1)]


class CompletionRequest(Sampling):
    """Texts, or token ids, that are to be completed; no chat template is applied."""

    prompt: str | Tokens | Annotated[list[str | Tokens], many(MOST_CHOICES, least=1)]
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, description="vLLM's: tell what the text is of, too")


class CompletionLogprobs(Answered):
    """Of each token: its text, the natural logarithm of its probability, the likeliest of its place by their texts, and
    where its text begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answered):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = absent()
    speculation: Speculated | None = absent()


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
