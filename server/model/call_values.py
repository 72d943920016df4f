"""How formats that write a call's arguments one by one write a value, so that mlx-lm's parser reads what was meant.

Each way gives a Lark expression for the values that a schema allows and the mark behind them; None where the format has
no words for them, or where its parser would take them for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llguidance import regex_to_lark

from outrider.server.model.lark import ANY, Rules, one_of, quoted

Schema = dict[str, Any]
Way = Callable[[Rules, Schema, str], str | None]

_SILENT = {"title", "description", "default", "examples", "deprecated", "format", "x-guidance"}
_STRING = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NULL = "/(?i:null)/"
_NOTHING = "/(?i:none|nil)/"
_CONTAINER = r"/\s*[\[{](?s:.*)/"
_SPACED = r"/[\s\x1c-\x1f](?s:.*)/", r"/(?s:.*)[\s\x1c-\x1f]/"


def as_json(rules: Rules, schema: Schema, after: str) -> str | None:
    """Anything, strings in quotes."""
    return f"{rules.json(schema)} {rules.literal(after)}"


def glm(rules: Rules, schema: Schema, after: str) -> str | None:
    """What is declared a string, and that alone, without quotes; it is trimmed."""
    if schema.get("type") == "string":
        return _string(rules, schema, after, _SPACED)
    return as_json(rules, schema, after)


def qwen(rules: Rules, schema: Schema, after: str) -> str | None:
    """By the type that is declared: of several what Python writes as JSON does; undeclared only strings, and null."""
    kind = schema.get("type")
    if kind is None or kind == "string":
        return _string_or_null(rules, schema, after, [] if kind else [_CONTAINER])
    if isinstance(kind, str) or set(kind) <= {"string", "null", "integer", "number"}:
        return as_json(rules, schema, after)
    return None


def minimax(rules: Rules, schema: Schema, after: str) -> str | None:
    """By all types that the schema names, strings last, which are trimmed."""
    kinds = types_of(schema)
    if kinds and "string" not in kinds:
        return as_json(rules, schema, after)
    return _string_or_null(rules, schema, after, _SPACED, _NOTHING)


def minicpm(rules: Rules, schema: Schema, after: str) -> str | None:
    """The same, but that a string with a tag in it would have to be CDATA."""
    kinds = types_of(schema)
    if kinds and "string" not in kinds:
        return as_json(rules, schema, after)
    return _string_or_null(rules, schema, after, [*_SPACED, _with("<")], _NOTHING)


def between(quote: str, never: str) -> Way:
    """Strings between two of `quote`, in which `never` does not stand, and what has no parts as JSON."""

    def way(rules: Rules, schema: Schema, after: str) -> str | None:
        kinds = types_of(schema)
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return as_json(rules, schema, after)
        text = _string(rules, schema, quote, [_with(never)]) if kinds == {"string"} else None
        return text and f"{rules.literal(quote)} {text} {rules.literal(after)}"

    return way


def types_of(schema: Schema) -> set[str]:
    """All types that a schema names; empty where it names none, or refers to another."""
    kind, found = schema.get("type"), set[str]()
    if "$ref" in schema or "allOf" in schema:
        return found
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    found |= {kind} if isinstance(kind, str) else set(kind or ())
    found |= {_KINDS.get(type(value), "null") for value in values}
    for choice in _choices(schema):
        inner = types_of(choice) if isinstance(choice, dict) else set[str]()
        if not inner:
            return inner
        found |= inner
    return found


def _choices(schema: Schema) -> list[Any]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _string_or_null(rules: Rules, schema: Schema, after: str, never: Sequence[str], *nothing: str) -> str | None:
    """A string without quotes, or null where the schema allows it beside: then `nothing` are words for it, too."""
    kinds = types_of(schema)
    if kinds == {"string"}:
        return _string(rules, schema, after, [_NULL, *never])
    strings = [choice for choice in _choices(schema) if types_of(choice) == {"string"}]
    if kinds != {"string", "null"} or len(strings) != 1 or set(schema) - _SILENT - {"anyOf", "oneOf"}:
        return None
    text = _string(rules, strings[0], after, [_NULL, *nothing, *never])
    return text and one_of([f"{rules.literal('null')} {rules.literal(after)}", text])


def _string(rules: Rules, schema: Schema, after: str, never: Sequence[str]) -> str | None:
    """A string without quotes, which is none of `never` and has no `after` in it."""
    if set(schema) - _SILENT - _STRING:
        return None
    parts = [ANY]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        parts.append(one_of([quoted(value) for value in values]))
    if {"minLength", "maxLength"} & set(schema):
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        found = _found(schema["pattern"])
        if found is None:
            return None
        parts.append(found)
    parts += [f"~({one})" for one in (*never, _with(after.strip()))]
    return rules.before(rules.terminal(" & ".join(parts)), after)


def _with(text: str) -> str:
    return f"{ANY} {quoted(text)} {ANY}"


def _found(pattern: str) -> str | None:
    """Texts in which `pattern` is found; anchors are known at its ends only."""
    inner = pattern.removeprefix("^").removesuffix("$")
    anchored = "|" in inner and inner != pattern
    if anchored or inner.endswith("\\") or "^" in inner.replace("[^", "") or "$" in inner:
        return None
    before = "" if pattern.startswith("^") else ANY
    after = "" if pattern.endswith("$") else ANY
    return f"({before} /{regex_to_lark(f'(?:{inner})', use_ascii='dw')}/ {after})"
