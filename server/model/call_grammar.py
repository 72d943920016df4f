"""Grammars (Lark) of tool calls in each model's format, with arguments that satisfy the tool's schema.

A text that matches is parsed correctly by mlx-lm's parser of the format. `Rules` builds a grammar rule by rule; text
that the model has as a special token is written as that token. `Style` describes one format: @name is a function's or
an argument's name, @n the call's number, @nl an optional line break.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from keyword import kwlist
from typing import Any

from llguidance import regex_to_lark

from outrider.grammar.compiler import SPACE, Vocabulary
from outrider.protocol.errors import InvalidRequest

ANY = "/(?s:.*)/"


class Rules:
    """Builds a grammar. Methods return expressions, and add the rules they need."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._marks = sorted(vocabulary.marks, key=lambda mark: len(mark[1]), reverse=True)
        self._lines: list[str] = []

    def text(self, start: str) -> str:
        """Returns the grammar, which starts with `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])

    def literal(self, text: str) -> str:
        """Matches this text."""
        return " ".join(self._pieces(text))

    def rule(self, expression: str, prefix: str = "r") -> str:
        self._lines.append(f"{(name := f'{prefix}{len(self._lines)}')}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Adds a lexeme, which is matched greedily and contains no special tokens."""
        return self.rule(expression, "T")

    def json(self, schema: dict[str, Any]) -> str:
        """Matches JSON of a schema. References are relative to its root."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def free(self, *without: str) -> str:
        """Matches any text that contains none of these."""
        return self.terminal(" & ".join([ANY, *(f"~({_with(one)})" for one in without)]))

    def before(self, text: str, mark: str) -> str:
        """Matches the terminal `text`, which must not contain `mark`, followed by the mark.

        If the mark is not a special token it is part of the lexeme, which otherwise would not end.
        """
        first, *rest = self._pieces(mark)
        joined = [self.terminal(f"{text} {first}")] if first.startswith('"') else [text, first]
        return " ".join([*joined, *rest])

    def marks_but(self, text: str, ends: Collection[int]) -> str:
        """Matches any special token except those in `text` and `ends`; empty if there is none.

        Consecutive tokens are joined into ranges, because some models have thousands.
        """
        found = sorted(token for token, mark in self._marks if mark not in text and token not in ends)
        runs = [[token for _, token in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
        return f"<[{','.join(f'{run[0]}-{run[-1]}' for run in runs)}]>" if runs else ""

    def _pieces(self, text: str) -> list[str]:
        for token, mark in self._marks:
            before, found, after = text.partition(mark)
            if found:
                return [*self._pieces(before), f"<[{token}]>", *self._pieces(after)]
        return [quoted(text)] if text else []


def one_of(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _with(text: str) -> str:
    return f"{ANY} {quoted(text)} {ANY}"


Schema = dict[str, Any]
ValueWriter = Callable[[Rules, Schema, str], str]
"""Returns the expression of one argument's value and the text after it. Raises UnsupportedSchema."""

_SILENT = {"format", "x-guidance"}
_STRING = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NULL = "/(?i:null)/"
_NOTHING = "/(?i:none|nil)/"
_CONTAINER = r"/\s*[\[{](?s:.*)/"
_SPACED = r"/[\s\x1c-\x1f](?s:.*)/", r"/(?s:.*)[\s\x1c-\x1f]/"


class UnsupportedSchema(Exception):
    """The format can't express a tool's schema or a name in it."""


def as_json(rules: Rules, schema: Schema, after: str) -> str:
    """Any value as JSON."""
    return f"{rules.json(schema)} {rules.literal(after)}"


def glm(rules: Rules, schema: Schema, after: str) -> str:
    """Declared strings without quotes, trimmed; anything else as JSON."""
    if schema.get("type") == "string":
        return _string(rules, schema, after, _SPACED)
    return as_json(rules, schema, after)


def qwen(rules: Rules, schema: Schema, after: str) -> str:
    """By declared type: strings without quotes, several types only where JSON and Python agree. Undeclared: strings and
    null."""
    kind = schema.get("type")
    if kind is None or kind == "string":
        return _string_or_null(rules, schema, after, [] if kind else [_CONTAINER])
    if isinstance(kind, str) or set(kind) <= {"string", "null", "integer", "number"}:
        return as_json(rules, schema, after)
    raise UnsupportedSchema


def by_types(*never: str) -> ValueWriter:
    """By all types that the schema names. Strings are tried last, and trimmed; those with `never` are excluded."""

    def write(rules: Rules, schema: Schema, after: str) -> str:
        kinds = types_of(schema)
        if kinds and "string" not in kinds:
            return as_json(rules, schema, after)
        return _string_or_null(rules, schema, after, [*_SPACED, *map(_with, never)], _NOTHING)

    return write


def between(quote: str, never: str) -> ValueWriter:
    """Strings between two `quote`, without `never` in them; scalars as JSON."""

    def write(rules: Rules, schema: Schema, after: str) -> str:
        kinds = types_of(schema)
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return as_json(rules, schema, after)
        if kinds != {"string"}:
            raise UnsupportedSchema
        return f"{rules.literal(quote)} {_string(rules, schema, quote, [_with(never)])} {rules.literal(after)}"

    return write


def types_of(schema: Schema) -> set[str]:
    """Returns all types that a schema names; empty if it names none, or has a reference."""
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


def _string_or_null(rules: Rules, schema: Schema, after: str, never: Sequence[str], *nothing: str) -> str:
    """A string without quotes, or null if the schema allows it; `nothing` are other words for null."""
    kinds = types_of(schema)
    if kinds == {"string"}:
        return _string(rules, schema, after, [_NULL, *never])
    strings = [choice for choice in _choices(schema) if types_of(choice) == {"string"}]
    if kinds != {"string", "null"} or len(strings) != 1 or set(schema) - _SILENT - {"anyOf", "oneOf"}:
        raise UnsupportedSchema
    text = _string(rules, strings[0], after, [_NULL, *nothing, *never])
    return one_of([f"{rules.literal('null')} {rules.literal(after)}", text])


def _string(rules: Rules, schema: Schema, after: str, never: Sequence[str]) -> str:
    """A string without quotes that matches none of `never` and does not contain `after`."""
    if set(schema) - _SILENT - _STRING:
        raise UnsupportedSchema
    parts = [ANY]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        parts.append(one_of([quoted(value) for value in values]))
    if {"minLength", "maxLength"} & set(schema):
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        parts.append(_found(schema["pattern"]))
    parts += [f"~({one})" for one in (*never, _with(after.strip()))]
    return rules.before(rules.terminal(" & ".join(parts)), after)


def _found(pattern: str) -> str:
    """Matches texts in which `pattern` is found. Supports anchors only at its ends."""
    inner = pattern.removeprefix("^").removesuffix("$")
    anchored = "|" in inner and inner != pattern
    if anchored or inner.endswith("\\") or "^" in inner.replace("[^", "") or "$" in inner:
        raise UnsupportedSchema
    before = "" if pattern.startswith("^") else ANY
    after = "" if pattern.endswith("$") else ANY
    return f"({before} /{regex_to_lark(f'(?:{inner})', use_ascii='dw')}/ {after})"


_WORD = r"[\w.-]+"
_IDENTIFIER = rf"(?!(?:{'|'.join(kwlist)})$)[^\W\d]\w*"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments written one by one: each between `before` and `after`, separated by `comma`."""

    before: str
    after: str
    write: ValueWriter
    comma: str = ""
    names: str = _WORD


@dataclass(frozen=True, slots=True)
class Style:
    """A call is `before`, its arguments and `after`; without arguments it is `empty`, if that differs.

    `arguments`: None if they are one JSON object. `block`: what begins, separates and ends several calls between one
    pair of tags; None: each call has its own pair. `names`: function names that can be written.
    """

    before: str
    after: str
    arguments: Arguments | None = None
    block: tuple[str, str, str] | None = None
    names: str = _WORD
    empty: str | None = None


def style_of(parser: str, template: str) -> Style | None:
    """Returns the style of one of mlx-lm's parsers; None if unknown."""
    return _HEADED if parser == "mistral" and "[ARGS]" in template else _STYLES.get(parser)


def _tagged(tag: str, empty: str | None = None) -> Style:
    before = f"<{tag}arg_key>@name</{tag}arg_key>@nl<{tag}arg_value>"
    return Style("@name@nl", "", Arguments(before, f"</{tag}arg_value>@nl", glm), empty=empty)


_HEADED = Style("@name[ARGS]", "", names=r"[\w-]+")
_LINES = "@nl", "@nl", "@nl"
_STYLES = {
    "json_tools": Style('@nl{"name": "@name", "arguments": ', "}@nl", names=r'[^"\\\x00-\x1f@]+'),
    "mistral": Style('{"name": "@name", "arguments": ', "}", block=(" [", ", ", "]"), names=r'[^"\\\x00-\x1f@]+'),
    "kimi_k2": Style(
        "<|tool_call_begin|>functions.@name:@n<|tool_call_argument_begin|>", "<|tool_call_end|>", block=("", "", "")
    ),
    "kimi_k3": Style(
        '<|open|>call tool="@name" index="@n"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
        block=("", "", ""),
    ),
    "qwen3_coder": Style(
        "\n<function=@name>\n", "</function>\n", Arguments("<parameter=@name>\n", "\n</parameter>\n", qwen)
    ),
    "glm47": _tagged(""),
    "laguna": _tagged(""),
    "longcat": _tagged("longcat_", '@nl{"name": "@name", "arguments": {}}@nl'),
    "minimax_m2": Style(
        '<invoke name="@name">@nl', "</invoke>",
        Arguments('<parameter name="@name">', "</parameter>@nl", by_types()), _LINES,
    ),
    "muse_spark": Style(
        '<atem:invoke name="@name">@nl', "</atem:invoke>",
        Arguments('<atem:parameter name="@name">', "</atem:parameter>@nl", as_json), _LINES,
    ),
    "minicpm5": Style('"@name">@nl', "", Arguments('<param name="@name">', "</param>@nl", by_types("<"))),
    "pythonic": Style(
        "@name(", ")", Arguments("@name=", "", as_json, ", ", _IDENTIFIER), ("[", ", ", "]"), _IDENTIFIER
    ),
    "function_gemma": Style(
        "call:@name{", "}", Arguments("@name:", "", between("<escape>", "}"), ",", r"\w+"), names=r"\w+"
    ),
    "gemma4": Style(
        "call:@name{", "}", Arguments("@name:", "", between('<|"|>', "\0"), ",", r"\w+"), names=r"[\w-]+"
    ),
}  # fmt: skip


_WORDS_ONLY = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const", "required"}
_PLAIN = {"type", "properties", "required", "$defs", "definitions"}
_ONE_BY_ONE = _PLAIN | {"additionalProperties", "x-guidance"}


def calls(rules: Rules, style: Style, tools: Sequence[dict[str, Any]], strict: Iterable[str], one: bool) -> str | None:
    """Returns what stands between a pair of tags: one call, or several if the style and `one` allow that.

    For tools not in `strict`, unsupported parts of the schema are ignored.

    Returns:
        None if a tool can't be written in this style.
    """
    try:
        written = [_call(rules, style, tool["function"], tool["function"]["name"] in strict) for tool in tools]
    except UnsupportedSchema:
        return None
    call = rules.rule(one_of(written))
    if style.block is None:
        return call
    begin, comma, end = (_literal(rules, text) for text in style.block)
    more = "" if one else f"({comma} {call})*"
    return rules.rule(f"{begin} {call} {more} {end}")


def arguments_of(function: dict[str, Any], strict: bool) -> Schema:
    """Returns the schema of a call's arguments, without annotations. Additional properties are excluded unless the
    schema says otherwise.

    Raises:
        InvalidRequest: the schema is not of an object.
    """
    schema = _bare(function["parameters"])
    if "object" not in (kind := schema.get("type", "object")):
        raise InvalidRequest(f"arguments are to be {kind!r}; expected a schema of an object")
    closed = {"additionalProperties": False} if "properties" in schema and not set(schema) - _PLAIN else {}
    return {**schema, "type": "object", **closed, "x-guidance": {**SPACE, "lenient": not strict}}


def _call(rules: Rules, style: Style, function: dict[str, Any], strict: bool) -> str:
    name, schema = function["name"], arguments_of(function, strict)
    if re.fullmatch(style.names, name, re.ASCII) is None:
        raise UnsupportedSchema
    before, after = _literal(rules, style.before, name), _literal(rules, style.after)
    if style.arguments is None:
        return rules.rule(f"{before} {rules.json(schema)} {after}")
    parts = _arguments(rules, style.arguments, schema)
    comma, rest, firsts = _literal(rules, style.arguments.comma), '""', list[str]()
    for part, needed in reversed(parts):  # a subset of them, in order; `firsts` are the alternatives by first part
        firsts = [f"{part} {rest}", *(() if needed else firsts)]
        rest = rules.rule(one_of([f"{comma} {part} {rest}", *(() if needed else [rest])]))
    ways = [f"{before} {first} {after}" for first in firsts]
    if not any(needed for _, needed in parts):
        ways.append(_literal(rules, style.empty, name) if style.empty is not None else f"{before} {after}")
    return rules.rule(one_of(ways))


def _arguments(rules: Rules, style: Arguments, schema: Schema) -> list[tuple[str, bool]]:
    """Returns each argument's rule and whether it is required."""
    if set(schema) - _ONE_BY_ONE:
        raise UnsupportedSchema
    needed = schema.get("required", [])
    known = schema.get("properties", {})
    found = []
    after, line_break, _ = style.after.partition("@nl")
    for name, inner in {**known, **{name: {} for name in needed if name not in known}}.items():
        if not isinstance(inner, dict) or re.fullmatch(style.names, name, re.ASCII) is None:
            raise UnsupportedSchema
        shared = {"x-guidance", *(("$defs", "definitions") if "$ref" in json.dumps(inner) else ())}
        value = style.write(rules, {**inner, **{key: schema[key] for key in shared & set(schema)}}, after)
        text = f"{_literal(rules, style.before, name)} {value} {_literal(rules, line_break)}"
        found.append((rules.rule(text), name in needed))
    return found


def _literal(rules: Rules, text: str, name: str = "") -> str:
    """Returns a piece of a style with `name` filled in."""
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
    """Removes annotations from a schema."""
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
