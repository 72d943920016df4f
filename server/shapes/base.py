"""What all shapes have in common: numbers are no words, and what of a request is not known here is kept apart.

Fields whose absence changes nothing in the answer are listed, accepted and ignored; what becomes of a field that is
not listed is `mapping.unknown`'s to say.

Numbers that requests give, with the bounds that hold where they are used, so that the description tells them too.

`Speculated`: what speculation did for an answer, token by token and round by round: Outrider's own, for who asked for
it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.orchestrator.http_settings import MOST_SECONDS
from outrider.orchestrator.settings import MAX_BRANCHES_ASKED, MAX_DRAFT_TOKENS
from outrider.protocol.sampling import MAX_SEED, MOST_BIAS, NUMBERS, WHOLE


def _within(name: str) -> Any:
    low, high = (WHOLE | NUMBERS)[name]
    return Field(ge=low, le=high)


Temperature = Annotated[float, _within("temp")]
TopP = Annotated[float, _within("top_p")]
MinP = Annotated[float, _within("min_p")]
TopK = Annotated[int, Field(ge=-1, le=WHOLE["top_k"][1], description="0 and -1 are off")]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
MaxTokens = Annotated[int, _within("max_tokens")]
MinTokens = Annotated[int, _within("min_tokens")]
Penalty = Annotated[float, _within("presence_penalty")]
RepetitionPenalty = Annotated[float, _within("repetition_penalty")]
ContextSize = Annotated[int, _within("repetition_context_size")]
TokenBias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
Branches = Annotated[int, Field(ge=1, le=MAX_BRANCHES_ASKED)]
Timeout = Annotated[float, Field(gt=0, le=MOST_SECONDS, description="seconds after which the answer is given up")]


MOST_CHOICES = 128
MOST_STOPS = 32
MOST_MESSAGES = 10_000
MOST_TOOLS = 1024
MOST_TOKENS = 2**20
MOST_BIASES = 10_000
MOST_FIELDS = 1000


def many(most: int = MOST_MESSAGES, least: int = 0) -> Any:
    """How long a list may be. The first item that is wrong ends its reading: a large body has room for a million."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class StrictShape(BaseModel):
    """A request, or a part of one in which an unknown field might change what is meant."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _not_a_crowd(cls, given: Any) -> Any:
        """Each unknown field is looked at; who sends a million of them is told of none."""
        return not_a_crowd(given, MOST_FIELDS)


def not_a_crowd(given: Any, most: int) -> Any:
    """`given`, which if it is an object has no more than so many fields, before any of them is looked at."""
    if isinstance(given, dict) and len(given) > most:
        told = {"count": len(given), "most": most}
        raise PydanticCustomError("too_many_fields", "there are {count} fields; expected at most {most}", told)
    return given


class ApiRequest(StrictShape):
    """A whole request. Fields that no shape here has are in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class LooseShape(BaseModel):
    """A part of a request in which further fields change nothing, such as a message's."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class ApiResponse(BaseModel):
    """An answer, or a part of one."""

    model_config = ConfigDict(extra="forbid")


def absent() -> Any:
    """The default of a field that is left out of an answer when there is nothing to say."""
    return Field(default=None, exclude_if=lambda value: value is None)


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], many(MOST_STOPS)]
LogitBias = Annotated[
    dict[str, TokenBias],
    Field(max_length=MOST_BIASES),
    BeforeValidator(lambda given: not_a_crowd(given, MOST_BIASES)),
]
Object = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], many(1000, least=1)]
"""Texts, one of which is to be said."""


class Speculation(StrictShape):
    """Outrider's own: how drafts are used, and whose. The text is the same in every mode."""

    mode: Literal["auto", "ar", "sd", "ssd"] = "auto"
    num_draft_tokens: DraftTokens | None = None
    branches: Branches | None = None
    drafter: str = Field(
        default="", max_length=64, description="draft, ngram, or a head's name; empty: whoever is there"
    )


class Watched(Speculation):
    """`origins`: tell of each token where it came from; `rounds`: of each round who worked when."""

    origins: bool = False
    rounds: bool = False


class StreamOptions(LooseShape):
    """`include_usage`: a last event with the usage of all choices."""

    include_usage: bool | None = None


class StructuredOutputs(StrictShape):
    """vLLM's: what the text is to be; one of them."""

    json_: Annotated[Object | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None


class Generation(ApiRequest):
    """What requests of all of OpenAI's APIs have in common, and the fields that llama.cpp, vLLM and mlx-lm added."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    timeout: Timeout | None = None
    stream: bool | None = None


class Sampling(Generation):
    """What those of the two older ones have beside it."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    logit_bias: LogitBias | None = None
    presence_context_size: ContextSize | None = None
    frequency_context_size: ContextSize | None = None
    repetition_context_size: ContextSize | None = None
    speculation: Watched | None = None
    stream_options: StreamOptions | None = None
    response_format: Object | None = Field(None, description="text, json_object or json_schema")
    grammar: str | None = Field(None, description="GBNF, or Lark's notation")
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    json_schema: Object | str | None = Field(None, description="llama.cpp's name for a schema")
    structured_outputs: StructuredOutputs | None = None
    # Ignored: nothing of the answer depends on them.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None
    prediction: Any = None


class CachedTokens(ApiResponse):
    cached_tokens: int = 0


class ReasoningTokens(ApiResponse):
    reasoning_tokens: int = 0


class Usage(ApiResponse):
    """Tokens; `cached_tokens` of the prompt did not have to be read again, `reasoning_tokens` were thoughts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = absent()


class Outrider(ApiResponse):
    """What gives this text again, and what was worth telling: `mode` is what ran, `notes` why something was not."""

    seed: int
    mode: str
    notes: list[str]


Timings = dict[str, Any]
"""A request in numbers, in llama.cpp's names; docs/server.md has each."""


class TokenOrigin(ApiResponse):
    """The text that a token completes, and who said it first."""

    text: str
    origin: str = Field(description="target, prepared, drafted (just in time), head (just in time, by one) or copied")


class Work(ApiResponse):
    """When it began, and how long it took; milliseconds on one clock, which begins with the request."""

    start_ms: float
    ms: float


class Drafting(Work):
    """What a drafter did for `round`: so many `branches` are `depth` tokens deep now; 0: a chain that was asked for."""

    drafter: str
    round: int
    depth: int
    branches: int


class Round(ApiResponse):
    """One verify that has ended: a chain of `drafted` tokens, of which `accepted` held; it made `tokens` final."""

    round: int
    lookup: str = Field(description="what was prepared for the outcome before: hit, grown, late, miss; none: not asked")
    source: str = Field(description="where the chain came from: cache, drafter, ngram (the text), none")
    drafted: int
    accepted: int
    tokens: int
    verify: Work
    decided: Work | None = Field(description="from the outcome before until the orchestrator knew how to go on")
    drafting: list[Drafting]


class Speculated(ApiResponse):
    """`origins`: a token each; `rounds`: those that ended meanwhile."""

    origins: list[TokenOrigin] | None = absent()
    rounds: list[Round] | None = absent()
