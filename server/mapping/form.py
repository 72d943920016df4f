"""What form a text is to have: every API's schemas and grammars, and vLLM's names for them, as one record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.grammar import Grammar
from outrider.server.problems import Refused
from outrider.server.shapes.base import Sampling


@dataclass(frozen=True, slots=True)
class Form:
    """`param` is the field that asked for it. `loose`: what no grammar can hold of a schema is checked afterwards."""

    grammar: Grammar
    param: str
    loose: bool = False

    @property
    def leniently(self) -> Grammar:
        """By a grammar that leaves out what the library has no words for."""
        schema = json.loads(self.grammar.text)
        return Grammar.json_schema({**schema, "x-guidance": {**schema.get("x-guidance", {}), "lenient": True}})


def form_of(asked: Sampling) -> Form | None:
    """That of a request in one of OpenAI's two older APIs.

    Raises:
        Refused: there are two, or one can't be read.
    """
    given: list[tuple[str, object, str]] = [
        ("grammar", asked.grammar, "grammar"),
        ("json_schema", asked.guided_json, "guided_json"),
        ("regex", asked.guided_regex, "guided_regex"),
        ("grammar", asked.guided_grammar, "guided_grammar"),
        ("regex", _one_of(asked.guided_choice), "guided_choice"),
        ("json_schema", asked.json_schema, "json_schema"),
    ]
    if (told := asked.structured_outputs) is not None:
        given += [
            ("json_schema", told.json_, "structured_outputs.json"),
            ("json_schema", {"type": "object"} if told.json_object else None, "structured_outputs.json_object"),
            ("regex", _one_of(told.choice), "structured_outputs.choice"),
            ("regex", told.regex, "structured_outputs.regex"),
            ("grammar", told.grammar, "structured_outputs.grammar"),
        ]
    forms = [_form(*one) for one in given if one[1] is not None]
    if (form := by_format(asked.response_format, "response_format", may_be_loose=True)) is not None:
        forms.insert(0, form)
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise Refused(f"{names} each set the output format; expected one of them", forms[1].param)
    return forms[0] if forms else None


def by_format(given: Mapping[str, Any] | None, name: str, may_be_loose: bool = False) -> Form | None:
    """OpenAI's `response_format` and `text.format`, whose schemas `may_be_loose`, and Anthropic's `format`.

    Raises:
        Refused: it can't be read.
    """
    kind = (given or {}).get("type", "text")
    if given is None or kind == "text":
        return None
    inner = given.get("json_schema")
    schema = (inner if isinstance(inner, Mapping) else given).get("schema")
    if kind == "json_object":
        return _form("json_schema", schema if schema is not None else {"type": "object"}, name)
    if kind != "json_schema":
        raise Refused(f"{name}: {str(kind)[:40]!r} is not supported; expected text, json_object or json_schema", name)
    if schema is None:
        raise Refused(f"{name}: the schema is missing; expected a JSON schema as 'schema'", name)
    strict = inner if isinstance(inner, Mapping) else given
    loose = may_be_loose and isinstance(schema, Mapping) and strict.get("strict") is not True
    return replace(_form(kind, schema, name), loose=loose)


def _one_of(texts: Sequence[str] | None) -> str | None:
    return "|".join(map(re.escape, texts)) if texts is not None else None


def _form(kind: str, given: object, name: str) -> Form:
    try:
        if kind != "json_schema":
            return Form(Grammar(kind, str(given)), name)
        if not isinstance(given, Mapping | str | bool):
            raise Refused(f"{name}: the schema is not an object; expected a JSON schema", name)
        return Form(Grammar.json_schema(given), name)
    except InvalidRequest as error:
        raise Refused(f"{name}: {error}", name) from None
