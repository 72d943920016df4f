"""What a generated text must be: a JSON schema, a grammar or a regular expression, as it was asked for.

Knows no tokens; what of a text's tokens is allowed is `grammar.constraint`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fields import OneOf, Size

KINDS = ("json_schema", "grammar", "regex", "llguidance")
MAX_GRAMMAR = 2**16


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text, up to its end token, is what `text` describes. The prompt does not count.

    `kind` "json_schema": a JSON Schema as JSON; "grammar": Lark's notation or llama.cpp's GBNF; "regex": a regular
    expression without look-around; "llguidance": that library's JSON with a list of grammars, where the first begins.
    Lark's notation has special tokens as <|name|> or <[id]>; all else is bytes, which spell no special token.

    Raises:
        InvalidRequest: no such kind, no text, more than 65,536 characters of it, or no JSON where it is to be.
    """

    kind: Annotated[str, OneOf(KINDS)]
    text: Annotated[str, Size(MAX_GRAMMAR)]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", values.word("grammar kind", self.kind, KINDS))
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidRequest(f"the {self.name} is empty; expected text that describes what may be generated")
        if len(self.text) > MAX_GRAMMAR:
            raise InvalidRequest(f"the {self.name} has {len(self.text)} characters; expected at most {MAX_GRAMMAR}")
        object.__setattr__(self, "text", values.plain(self.text))
        if self.kind in ("json_schema", "llguidance"):
            _require_json(self.name, self.text)

    @property
    def name(self) -> str:
        """What it is in words."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON that this schema allows; {"type": "object"} is any JSON object.

        Raises:
            InvalidRequest: the schema holds something that JSON has no word for.
        """
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the JSON schema can't be written as JSON ({error}); expected JSON values") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})


def _require_json(name: str, text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {name} can't be read ({error}); expected JSON") from None


def as_grammar(given: object) -> Grammar | None:
    """A grammar, or the dict of its fields, as JSON has it.

    Raises:
        InvalidRequest: it is neither.
    """
    if given is None or isinstance(given, Grammar):
        return given
    if isinstance(given, Mapping) and set(given) == {"kind", "text"}:
        return Grammar(**given)
    raise InvalidRequest(f"grammar is {given!r}; expected a Grammar, such as Grammar.json_schema({{...}})")
