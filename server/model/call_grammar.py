"""Calls of tools as Lark rules: in the model's own format, with arguments that satisfy each tool's schema.

What mlx-lm's parser then reads is such a call. Knows formats and schemas; nothing of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.grammar.compiler import SPACE
from outrider.protocol.errors import InvalidRequest
from outrider.server.model.call_styles import Arguments, Style
from outrider.server.model.call_values import Schema
from outrider.server.model.lark import Rules, one_of

_WORDS_ONLY = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const", "required"}
_PLAIN = {"type", "properties", "required", "$defs", "definitions"}
_ONE_BY_ONE = _PLAIN | {"additionalProperties", "x-guidance"}


def calls(rules: Rules, style: Style, tools: Sequence[dict[str, Any]], strict: Iterable[str], one: bool) -> str | None:
    """What stands between a pair of marks: one call, or more where the style has them there and more than `one` may be.

    Of tools that are not in `strict` what the library has no words for in a schema is left out.

    Returns:
        None where a tool can't be written in this style.
    """
    found = [_call(rules, style, tool["function"], tool["function"]["name"] in strict) for tool in tools]
    written = [call for call in found if call is not None]
    if len(written) < len(found):
        return None
    call = rules.rule(one_of(written))
    if style.block is None:
        return call
    begin, comma, end = (_literal(rules, text) for text in style.block)
    more = "" if one else f"({comma} {call})*"
    return rules.rule(f"{begin} {call} {more} {end}")


def arguments_of(function: dict[str, Any], strict: bool) -> Schema:
    """The schema of a call's arguments, without what is meant for readers. Where it does not say whether there may be
    others than it lists, there may not.

    Raises:
        InvalidRequest: it says that they are no object.
    """
    schema = _bare(function["parameters"])
    if "object" not in (kind := schema.get("type", "object")):
        raise InvalidRequest(f"arguments are to be {kind!r}; expected a schema of an object")
    closed = {"additionalProperties": False} if "properties" in schema and not set(schema) - _PLAIN else {}
    return {**schema, "type": "object", **closed, "x-guidance": {**SPACE, "lenient": not strict}}


def _call(rules: Rules, style: Style, function: dict[str, Any], strict: bool) -> str | None:
    name, schema = function["name"], arguments_of(function, strict)
    if re.fullmatch(style.names, name, re.ASCII) is None:
        return None
    before, after = _literal(rules, style.before, name), _literal(rules, style.after)
    if style.arguments is None:
        return rules.rule(f"{before} {rules.json(schema)} {after}")
    parts = _arguments(rules, style.arguments, schema)
    if parts is None:
        return None
    firsts, may_be_none = _in_order(rules, _literal(rules, style.arguments.comma), parts)
    ways = [f"{before} {first} {after}" for first in firsts]
    if may_be_none:
        ways.append(_literal(rules, style.empty, name) if style.empty is not None else f"{before} {after}")
    return rules.rule(one_of(ways))


def _arguments(rules: Rules, style: Arguments, schema: Schema) -> list[tuple[str, bool]] | None:
    """Each argument as a rule, and whether it has to be there; None where one can't be written."""
    if set(schema) - _ONE_BY_ONE:
        return None
    needed = schema.get("required", [])
    known = schema.get("properties", {})
    found = []
    for name, inner in {**known, **{name: {} for name in needed if name not in known}}.items():
        written = _argument(rules, style, name, _alone(inner, schema)) if isinstance(inner, dict) else None
        if written is None:
            return None
        found.append((written, name in needed))
    return found


def _argument(rules: Rules, style: Arguments, name: str, schema: Schema) -> str | None:
    if re.fullmatch(style.names, name, re.ASCII) is None:
        return None
    after, line_break, _ = style.after.partition("@nl")
    value = style.way(rules, schema, after)
    return value and rules.rule(f"{_literal(rules, style.before, name)} {value} {_literal(rules, line_break)}")


def _alone(schema: Schema, root: Schema) -> Schema:
    """A part of `root` that is compiled by itself, with what it refers to."""
    shared = {"$defs", "definitions"} if "$ref" in json.dumps(schema) else set[str]()
    return {**schema, **{key: root[key] for key in ({"x-guidance"} | shared) & set(root)}}


def _in_order(rules: Rules, comma: str, parts: list[tuple[str, bool]]) -> tuple[list[str], bool]:
    """Some of `parts`, in order, by which comes first, and whether there may be none at all."""
    rest, firsts, may_be_none = '""', list[str](), True
    for part, needed in reversed(parts):
        firsts = [f"{part} {rest}", *(() if needed else firsts)]
        may_be_none = may_be_none and not needed
        rest = rules.rule(one_of([f"{comma} {part} {rest}", *(() if needed else [rest])]))
    return firsts, may_be_none


def _literal(rules: Rules, text: str, name: str = "") -> str:
    """A piece of a style, with `name` in its place."""
    found = []
    for piece in re.split("(@nl|@n(?!ame))", text):
        match piece:
            case "@nl":
                found.append('"\\n"?')
            case "@n":
                found.append("/[0-9]{1,2}/")
            case _:
                found.append(rules.literal(piece.replace("@name", name)))
    return " ".join(found)


def _bare(schema: Any) -> Any:
    """A schema without what says nothing about values."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _bare(one) for name, one in value.items()}
        elif key not in _WORDS_ONLY:
            found[key] = value if key in _VALUES else _bare(value)
    return found
