"""A request's sampling parameters, and the grammar that its text must match.

Names and defaults are mlx-lm's, except that "off" is always the neutral value. Knows nothing of logits or tokens;
`grammar.constraint` finds the tokens that a grammar allows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack, cast

from msgspec import Meta

from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.schema import Many, one_of

GRAMMAR_KINDS = ("json_schema", "grammar", "regex", "llguidance")
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_COUNT, MAX_SEED = 2**31 - 1, 2**63 - 1
MIN_TEMPERATURE = 1e-3
MIN_TOP_P = 2.0**-126  # no token passes a smaller one, because it may be 0 in float32
MAX_LOGPROBS = 20
SAMPLING_RULES = ("coupled", "residual")
MAX_LOGIT_BIAS = 1e6


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text, up to its end token, must match `text`. The prompt does not count.

    `kind` is "json_schema" (a JSON Schema as JSON), "grammar" (Lark's notation or llama.cpp's GBNF), "regex" (a regular
    expression without look-around), or "llguidance" (that library's JSON with a list of grammars, of which the first is
    the start). In Lark's notation, special tokens are <|name|> or <[id]>; everything else is bytes, which match no
    special token.

    Raises:
        InvalidRequest: an unknown kind, an empty text, more than 65,536 characters, or invalid JSON.
    """

    kind: Annotated[str, one_of(*GRAMMAR_KINDS)]
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]

    def __post_init__(self) -> None:
        values.set_field(self, "kind", values.check_choice("grammar kind", self.kind, GRAMMAR_KINDS))
        values.set_field(self, "text", values.check_unicode(f"the {self.name}", self.text))
        if not self.text.strip():
            raise InvalidRequest(f"the {self.name} is empty; expected a description of what may be generated")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"the {self.name} has {len(self.text)} characters; expected at most {MAX_GRAMMAR_CHARACTERS}"
            )
        if self.kind in ("json_schema", "llguidance"):
            try:
                value = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"the {self.name} can't be read ({error}); expected JSON") from None
            if not isinstance(value, dict | bool):
                raise InvalidRequest(f"the {self.name} is {values.plain_repr(value)}; expected a JSON object")

    @property
    def name(self) -> str:
        """The kind in words."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """Returns the grammar of JSON that matches this schema; {"type": "object"} is any JSON object. An object that
        lists its properties has no others, unless `additionalProperties` allows them.

        Raises:
            InvalidRequest: the schema holds a value that JSON can't express.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the JSON schema can't be written as JSON ({error}); expected JSON values") from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Returns the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})


def _check_grammar(name: str, given: object) -> Grammar:
    """Converts a dict of a grammar's fields to a Grammar. Raises InvalidRequest if `given` is neither."""
    if isinstance(given, Grammar):
        return given
    if isinstance(given, Mapping) and set(given) == {"kind", "text"}:
        return Grammar(**given)
    raise InvalidRequest(
        f"{name} is {values.plain_repr(given)}; expected a Grammar, such as Grammar.json_schema({{...}})"
    )


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, with all types that they accept."""

    max_tokens: int
    min_tokens: int
    temp: float
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    presence_context_size: int
    frequency_penalty: float
    frequency_context_size: int
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    rule: str
    saguaro: float
    q_width: int
    grammar: Grammar | Mapping[str, str] | None
    logprobs: int | None
    prompt_logprobs: int | None


def _check_bias(name: str, given: object) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        entries = [(token, bias) for token, bias in cast("Iterable[Any]", pairs)]
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name} is {values.plain_repr(given)}; expected a dict of token ids and biases, or (token, bias) pairs"
        ) from None
    return tuple(
        (
            values.check_int(f"{name} token", token, 0, 2**31 - 1),
            values.check_float(f"{name} value", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        )
        for token, bias in entries
    )


def _check_stops(name: str, given: object) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or any(not isinstance(text, str) or not text for text in texts):
        raise InvalidRequest(
            f"{name} is {values.plain_repr(given)}; expected a text or a list of texts that are not empty"
        )
    return tuple(values.check_unicode(name, text) for text in texts)


def _check_rule(name: str, given: object) -> str:
    return values.check_choice(f"sampling {name}", given, SAMPLING_RULES)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    `temperature` is an alias of `temp`. 0 is greedy. Below `MIN_TEMPERATURE` it becomes 0, because float32 can't hold a
    score of logit / `temp` together with the noise that decides between near equals. It also becomes 0 if `top_p` is
    below 2^-126. `top_p` 1, `min_p` 0, `top_k` 0, penalties of 0 and `repetition_penalty` 1 are off. With `seed` None a
    seed is drawn and reported. Penalties look at the last `*_context_size` tokens, prompt included.

    `rule` sets how proposals are verified above temperature 0: "coupled" or "residual" (docs/exactness.md). For
    residual sampling a draft proposes from its `q_width` most likely tokens, with the weight of those that the work
    ahead prepares for multiplied by `saguaro` (the C of the SSD paper, definition 14).

    A `grammar` constrains the generated text, also one that is cut off. It rules tokens out before temperature and
    filters, and allows an end only where the text may end. `logprobs` n returns with each token its log-probability and
    the n most likely tokens at its position (0: only its own; None: nothing). They are the target's own after
    penalties, bias and grammar, before temperature and filters. `prompt_logprobs` n returns the same for each token of
    the prompt but the first, from the model's logits alone. The whole prompt is then read, without the prompt cache.

    The first `min_tokens` tokens contain no end token, unless a grammar allows nothing else. Stop strings still end a
    text.

    `max_tokens` and context sizes are at least 1, `temp` is 0 to 100, `top_p` and `min_p` 0 to 1, `top_k` at least 0,
    `repetition_penalty` 0.01 to 100, the other penalties -100 to 100, a bias -10^6 to 10^6, `seed` 0 to 2^63-1,
    `saguaro` 0.01 to 1 (1 is off), `q_width` 1 to 1024, both `logprobs` 0 to 20. A grammar excludes `ignore_eos`.

    numpy numbers are accepted. `stop` may be one text or a list of texts, `logit_bias` a dict. They are stored in the
    types below.

    Raises:
        InvalidRequest: a value is out of range; the message names the field, the value and what is allowed.
    """

    max_tokens: int = values.int_field(256, 1, MAX_COUNT)
    temp: float = values.float_field(0.0, 0.0, 100.0)
    top_p: float = values.float_field(1.0, 0.0, 1.0)
    min_p: float = values.float_field(0.0, 0.0, 1.0)
    top_k: int = values.int_field(0, 0, MAX_COUNT)
    repetition_penalty: float = values.float_field(1.0, 0.01, 100.0)
    repetition_context_size: int = values.int_field(20, 1, MAX_COUNT)
    presence_penalty: float = values.float_field(0.0, -100.0, 100.0)
    presence_context_size: int = values.int_field(20, 1, MAX_COUNT)
    frequency_penalty: float = values.float_field(0.0, -100.0, 100.0)
    frequency_context_size: int = values.int_field(20, 1, MAX_COUNT)
    logit_bias: Many[tuple[int, float]] = values.checked_field((), _check_bias)
    seed: int | None = values.int_field(None, 0, MAX_SEED)
    stop: Many[str] = values.checked_field((), _check_stops)
    ignore_eos: bool = values.checked_field(False, values.check_bool)
    rule: str = values.checked_field("coupled", _check_rule)
    saguaro: float = values.float_field(1.0, 0.01, 1.0)
    q_width: int = values.int_field(100, 1, 1024)
    grammar: Grammar | None = values.checked_field(None, _check_grammar)
    logprobs: int | None = values.int_field(None, 0, MAX_LOGPROBS)
    min_tokens: int = values.int_field(0, 0, MAX_COUNT)
    prompt_logprobs: int | None = values.int_field(None, 0, MAX_LOGPROBS)

    def __init__(self, **fields: Unpack[SamplingFields]) -> None:
        given = _resolve_aliases(fields)
        for field in dataclasses.fields(self):
            values.set_field(self, field.name, given.get(field.name, field.default))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the fields. The codec, which sets them itself, calls it, too."""
        values.check_fields(self)
        if self.temp < MIN_TEMPERATURE or self.top_p < MIN_TOP_P:
            values.set_field(self, "temp", 0.0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; expected at most max_tokens, which is {self.max_tokens}"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos and a grammar can't be used together: the grammar decides where the text ends"
            )
        if self.saguaro != 1.0 and self.rule != "residual":
            raise InvalidRequest(f"saguaro is {self.saguaro:g}; it needs rule residual, or must be 1")

    def changed(self, **fields: Unpack[SamplingFields]) -> SamplingParams:
        """Returns a copy with other values for these fields."""
        return dataclasses.replace(self, **_resolve_aliases(fields))

    __repr__ = values.short_repr

    @property
    def temperature(self) -> float:
        """The same as `temp`."""
        return self.temp

    @property
    def is_residual(self) -> bool:
        """True when chains are verified by rejection sampling. At temperature 0 both rules test for equality."""
        return self.rule == "residual" and self.temp > 0

    def require_coupled(self) -> None:
        """Raises InvalidRequest for residual sampling, which can't be replayed."""
        if self.is_residual:
            raise InvalidRequest(
                "residual sampling can't be replayed: its text may differ each time; expected coupled sampling"
            )

    @property
    def has_penalties(self) -> bool:
        """True when a token's choice depends on earlier tokens in ways other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _resolve_aliases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces `temperature` by the name of its field, `temp`.

    Raises:
        InvalidRequest: both names are given.
        TypeError: there is no such field.
    """
    known = SamplingFields.__annotations__
    if not given.keys() <= known.keys():
        raise values.unknown_keyword_error("SamplingParams", given, known)
    if "temperature" not in given:
        return dict(given)
    if "temp" in given:
        raise InvalidRequest("temp and temperature are names of the same setting; expected one of them")
    return {"temp" if name == "temperature" else name: value for name, value in given.items()}
