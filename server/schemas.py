"""Schemas that the APIs share: bounds of numbers, sampling fields, speculation, usage, errors.

Numbers have the bounds of `SamplingParams`, so that the OpenAPI document has them too. Fields that no schema has are
handled by `endpoints/json_route.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.orchestrator.http_settings import MAX_WAIT_SECONDS
from outrider.orchestrator.settings import MAX_DRAFT_TOKENS, MAX_REQUESTED_BRANCHES
from outrider.protocol.sampling import MAX_COUNT, MAX_LOGIT_BIAS, MAX_SEED, SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_TOKENS = 2**20
MAX_BIASES = 10_000
MAX_FIELDS = 1000
MAX_NAME_LENGTH = 256

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]

JsonObject = dict[str, Any]

Timings = dict[str, Any]
"""Statistics of a request, with llama.cpp's names; docs/protocol.md explains each."""


def _sampling_bounds(name: str) -> Any:
    allowed = SamplingParams.__dataclass_fields__[name].metadata["check"].keywords
    return Field(ge=allowed["low"], le=allowed["high"])


MaxTokens = Annotated[int, _sampling_bounds("max_tokens")]
UNLIMITED = -1
TokenLimit = Annotated[int, Field(ge=UNLIMITED, le=MAX_COUNT, description="-1: until the context is full")]
Penalty = Annotated[float, _sampling_bounds("presence_penalty")]
ContextSize = Annotated[int, _sampling_bounds("repetition_context_size")]


def bounded(most: int = MAX_MESSAGES, least: int = 0) -> Any:
    """Limits the length of a list or dict. Validation stops at the first error: a large body can have a million."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class StrictSchema(BaseModel):
    """A request, or a part of one, in which an unknown field might change the meaning."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, given: Any) -> Any:
        """Limits the number of fields, because each unknown one is reported, and takes 5.0 for the integer 5."""
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            limits = {"count": len(given), "most": MAX_FIELDS}
            raise PydanticCustomError("too_many_fields", "there are {count} fields; expected at most {most}", limits)
        return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in given.items()}


class ApiRequest(StrictSchema):
    """A whole request. Unknown fields are in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None


class LooseSchema(BaseModel):
    """A part of a request in which unknown fields have no effect, such as a message."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class ContentPart(LooseSchema):
    """A part of a message's content. Only text can be read; images, audio and files are rejected."""

    type: str
    text: str | None = Field(None, validation_alias=AliasChoices("text", "refusal"))


Content = str | Annotated[list[ContentPart], bounded()]


class Function(LooseSchema):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ApiResponse(BaseModel):
    """A response, or a part of one."""

    model_config = ConfigDict(extra="forbid")


def unsupported(reason: str, code: str | None = None, supported: Sequence[Any] = (None, False, "", [])) -> Any:
    """Rejects a field that would change the answer, unless it has a supported value. {given} in `reason` is its value;
    `code` is the API's own for such an error."""

    def check(given: Any) -> Any:
        if given not in supported:
            raise PydanticCustomError("unsupported", reason, {"given": repr(given)[:40], "code": code})
        return given

    return BeforeValidator(check)


CLIENT_TOOLS = "{given} is not supported; leave it out, or describe a tool that the client runs: its name and schema"
FunctionType = Annotated[Literal["function"], unsupported(CLIENT_TOOLS, supported=("function", "allowed_tools"))]


def omit_if_none() -> Any:
    """Returns the default of a response field that is omitted if it is None."""
    return Field(default=None, exclude_if=lambda value: value is None)


Stops = Annotated[list[Stop], bounded(MAX_STOPS)]
LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]], bounded(MAX_BIASES)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], bounded(1000, least=1)]
"""The possible texts of an answer."""


class Speculation(StrictSchema):
    """Outrider's extension: how to speculate; mode auto: the server's own. The text is the same in every mode."""

    mode: Literal["auto", "ar", "sd", "ssd"] = "auto"
    num_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    branches: Annotated[int, Field(ge=1, le=MAX_REQUESTED_BRANCHES)] | None = None
    drafter: str = Field(default="", max_length=64, description="draft, ngram, or a head's name; empty: any")


class ReportedSpeculation(Speculation):
    """`origins`: return where each token came from. `rounds`: return each round's timing."""

    origins: bool = False
    rounds: bool = False


class StreamOptions(LooseSchema):
    """`include_usage`: add a last event with the usage of all choices."""

    include_usage: bool | None = None


class StructuredOutputs(StrictSchema):
    """vLLM's structured outputs; one field at most."""

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None


class Generation(ApiRequest):
    """Common fields of all APIs that generate."""

    temperature: Annotated[float, _sampling_bounds("temp")] | None = None
    top_p: Annotated[float, _sampling_bounds("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT, description="0 and -1 are off")] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    speculation: Speculation | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_WAIT_SECONDS, description="seconds until cancelled")] | None = None
    stream: bool | None = None


class OpenAIGeneration(Generation):
    """Common fields of OpenAI's APIs, and additional fields of llama.cpp, vLLM and mlx-lm."""

    min_p: Annotated[float, _sampling_bounds("min_p")] | None = None
    stop: Stop | Stops | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, _sampling_bounds("repetition_penalty")] | None = None
    ignore_eos: bool | None = None


class Sampling(OpenAIGeneration):
    """Common fields of chat and text completions."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, _sampling_bounds("min_tokens")] | None = None
    logit_bias: LogitBias | None = None
    presence_context_size: ContextSize | None = None
    frequency_context_size: ContextSize | None = None
    repetition_context_size: ContextSize | None = None
    speculation: ReportedSpeculation | None = None
    stream_options: StreamOptions | None = None
    response_format: JsonObject | None = Field(None, description="text, json_object or json_schema")
    grammar: str | None = Field(None, description="GBNF, or Lark's notation")
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    json_schema: JsonObject | str | None = Field(None, description="llama.cpp's name for a schema")
    regex: str | None = Field(None, description="SGLang's name for guided_regex")
    ebnf: str | None = Field(None, description="SGLang's name for grammar")
    structured_outputs: StructuredOutputs | None = None


class TopLogprob(ApiResponse):
    """A token's text and bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ApiResponse):
    content: list[ChatTokenLogprob]
    refusal: None = None


class Usage(ApiResponse):
    """Token counts. `cached_tokens` of the prompt came from the cache; `reasoning_tokens` were thinking."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: dict[Literal["reasoning_tokens"], int] | None = omit_if_none()


class Outrider(ApiResponse):
    """What reproduces this text: `seed` and the `mode` that ran. `notes` say what was ignored or unavailable."""

    seed: int
    mode: str
    notes: list[str]


class TokenOrigin(ApiResponse):
    """The text that a token adds, and where the token came from."""

    text: str
    origin: str = Field(
        description="target, prepared, drafted (on request), head (drafted by a head), copied (n-grams) or"
        " guessed (an alternative to a drafted token)"
    )


class SpeculationReport(ApiResponse):
    """`origins`: one for each token. `rounds`: those that ended since the last event, as docs/server.md says."""

    origins: list[TokenOrigin] | None = omit_if_none()
    rounds: list[JsonObject] | None = omit_if_none()


class CompletionBase(ApiResponse):
    """The fields that chat and text completions share, whole and as events."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ApiResponse]
    usage: Usage | None = omit_if_none()
    timings: Timings | None = omit_if_none()
    outrider: Outrider | None = omit_if_none()


class OpenAIError(ApiResponse):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(ApiResponse):
    """An error in OpenAI's format."""

    error: OpenAIError
    request_id: str | None = omit_if_none()


class AnthropicError(ApiResponse):
    type: str
    message: str
    details: dict[str, str] | None = omit_if_none()


class AnthropicErrorBody(ApiResponse):
    """An error in Anthropic's format."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str
