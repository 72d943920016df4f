"""Lark grammars of tool calls in each model's format, with arguments that satisfy the tool's schema.

mlx-lm's parser of the format parses a matching text correctly.
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

from outrider.grammar.compiler import ANNOTATION_KEYS, JSON_WHITESPACE, Vocabulary, close_object, close_objects, prune
from outrider.protocol.errors import InvalidRequest

ANY_TEXT = "/(?s:.*)/"

Schema = dict[str, Any]

_IGNORED_KEYS = {"format", "x-guidance"}
_STRING_KEYS = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NULL_WORDS = "/(?i:null)/"
_OTHER_NULL_WORDS = "/(?i:none|nil)/"
_JSON_CONTAINER = r"/\s*[\[{](?s:.*)/"
_UNTRIMMED = r"/[\s\x1c-\x1f](?s:.*)/", r"/(?s:.*)[\s\x1c-\x1f]/"
_WORD = r"[\w.-]+"
_IDENTIFIER = rf"(?!(?:{'|'.join(kwlist)})$)[^\W\d]\w*"
_LINE_BREAK_BLOCK = "@nl", "@nl", "@nl"
_MARKS = {"@nl": '"\\n"?', "@sp": '" "?', "@n": "/[0-9]{1,2}/"}
_UNREADABLE = re.compile(r"\(\?<?[=!]|\\[1-9]")
_SEPARABLE_KEYS = {"type", "properties", "required", "$defs", "definitions", "additionalProperties", "x-guidance"}


class Rules:
    """Builds a grammar rule by rule. Methods return expressions, and add the rules they need. Text that the model has
    as a special token is written as that token."""

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
        """Matches JSON that satisfies a schema. References are relative to its root."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text_without(self, *without: str) -> str:
        """Matches any text that contains none of these."""
        return self.terminal(" & ".join([ANY_TEXT, *(f"~({_with(one)})" for one in without)]))

    def followed_by(self, text: str, mark: str) -> str:
        """Matches the terminal `text`, which must not contain `mark`, followed by the mark.

        If the mark is not a special token it is part of the lexeme, which otherwise would not end.
        """
        first, *rest = self._pieces(mark)
        joined = [self.terminal(f"{text} {first}")] if first.startswith('"') else [text, first]
        return " ".join([*joined, *rest])

    def special_tokens_except(self, text: str, ends: Collection[int]) -> str:
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
    return f"{ANY_TEXT} {quoted(text)} {ANY_TEXT}"


ValueWriter = Callable[[Rules, Schema, str], str]
"""Returns the expression of one argument's value and the text after it. Raises UnsupportedSchema."""


class UnsupportedSchema(Exception):
    """The format can't express a tool's schema or a name in it."""


def write_json(rules: Rules, schema: Schema, after: str) -> str:
    """Writes any value as JSON."""
    return f"{rules.json(schema)} {rules.literal(after)}"


def write_glm(rules: Rules, schema: Schema, after: str) -> str:
    """Writes declared strings without quotes, trimmed; anything else as JSON."""
    if schema.get("type") == "string":
        return _string(rules, schema, after, _UNTRIMMED)
    return write_json(rules, schema, after)


def write_qwen(rules: Rules, schema: Schema, after: str) -> str:
    """Writes by declared type: strings without quotes, several types only where JSON and Python agree. Undeclared:
    strings and null."""
    kind = schema.get("type")
    if kind is None or kind == "string":
        return _string_or_null(rules, schema, after, [] if kind else [_JSON_CONTAINER])
    if isinstance(kind, str) or set(kind) <= {"string", "null", "integer", "number"}:
        return write_json(rules, schema, after)
    raise UnsupportedSchema


def write_by_types(*never: str) -> ValueWriter:
    """Returns a writer by all types of the schema. Strings come last, trimmed; those with `never` are excluded."""

    def write(rules: Rules, schema: Schema, after: str) -> str:
        kinds = collect_types(schema)
        if kinds and "string" not in kinds:
            return write_json(rules, schema, after)
        return _string_or_null(rules, schema, after, [*_UNTRIMMED, *map(_with, never)], _OTHER_NULL_WORDS)

    return write


def write_between(quote: str, never: str) -> ValueWriter:
    """Returns a writer of strings between two `quote`, without `never` in them, and of scalars as JSON."""

    def write(rules: Rules, schema: Schema, after: str) -> str:
        kinds = collect_types(schema)
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return write_json(rules, schema, after)
        if kinds != {"string"}:
            raise UnsupportedSchema
        return f"{rules.literal(quote)} {_string(rules, schema, quote, [_with(never)])} {rules.literal(after)}"

    return write


def collect_types(schema: Any) -> set[str]:
    """Returns all types that a schema names; empty if it names none, has a reference, or is no object."""
    found = set[str]()
    if not isinstance(schema, dict) or "$ref" in schema or "allOf" in schema:
        return found
    kind = schema.get("type")
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    found |= {kind} if isinstance(kind, str) else set(kind or ())
    found |= {_KINDS.get(type(value), "null") for value in values}
    for choice in _alternatives(schema):
        inner = collect_types(choice)
        if not inner:
            return inner
        found |= inner
    return found


def _alternatives(schema: Schema) -> list[Any]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _string_or_null(rules: Rules, schema: Schema, after: str, never: Sequence[str], *nothing: str) -> str:
    """Writes a string without quotes, or null if the schema allows it; `nothing` are other words for null."""
    kinds = collect_types(schema)
    if kinds == {"string"}:
        return _string(rules, schema, after, [_NULL_WORDS, *never])
    strings = [choice for choice in _alternatives(schema) if collect_types(choice) == {"string"}]
    if kinds != {"string", "null"} or len(strings) != 1 or set(schema) - _IGNORED_KEYS - {"anyOf", "oneOf"}:
        raise UnsupportedSchema
    text = _string(rules, strings[0], after, [_NULL_WORDS, *nothing, *never])
    return one_of([f"{rules.literal('null')} {rules.literal(after)}", text])


def _string(rules: Rules, schema: Schema, after: str, never: Sequence[str]) -> str:
    """Writes a string without quotes that matches none of `never` and does not contain `after`."""
    if set(schema) - _IGNORED_KEYS - _STRING_KEYS:
        raise UnsupportedSchema
    parts = [ANY_TEXT]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        parts.append(one_of([quoted(value) for value in values]))
    if {"minLength", "maxLength"} & set(schema):
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        parts.append(_match_pattern(schema["pattern"]))
    parts += [f"~({one})" for one in (*never, _with(after.strip()))]
    return rules.followed_by(rules.terminal(" & ".join(parts)), after)


def _match_pattern(pattern: str) -> str:
    """Matches texts in which `pattern` is found. Supports anchors only at its ends."""
    inner = pattern.removeprefix("^").removesuffix("$")
    anchored = "|" in inner and inner != pattern
    if anchored or inner.endswith("\\") or "^" in inner.replace("[^", "") or "$" in inner:
        raise UnsupportedSchema
    before = "" if pattern.startswith("^") else ANY_TEXT
    after = "" if pattern.endswith("$") else ANY_TEXT
    return f"({before} /{regex_to_lark(f'(?:{inner})', use_ascii='dw')}/ {after})"


@dataclass(frozen=True, slots=True)
class ArgumentStyle:
    """How arguments are written one by one: each between `before` and `after`, separated by `comma`."""

    before: str
    after: str
    write: ValueWriter
    comma: str = ""
    names: str = _WORD


@dataclass(frozen=True, slots=True)
class CallStyle:
    """A call is `before`, its arguments and `after`; without arguments it is `empty`, if that differs. In these, @name
    is a function's or an argument's name, @n the call's number, @nl an optional line break, @sp an optional space.

    `arguments`: None if they are one JSON object. `block`: what begins, separates and ends several calls between one
    pair of tags; None: each call has its own pair. `names`: function names that can be written.
    """

    before: str
    after: str
    arguments: ArgumentStyle | None = None
    block: tuple[str, str, str] | None = None
    names: str = _WORD
    empty: str | None = None


def get_style(parser: str, template: str) -> CallStyle | None:
    """Returns the style of one of mlx-lm's parsers; None if unknown."""
    return _MISTRAL_ARGS_STYLE if parser == "mistral" and "[ARGS]" in template else _STYLES.get(parser)


def _tagged_style(tag: str, empty: str | None = None) -> CallStyle:
    before = f"<{tag}arg_key>@name</{tag}arg_key>@nl<{tag}arg_value>"
    return CallStyle("@name@nl", "", ArgumentStyle(before, f"</{tag}arg_value>@nl", write_glm), empty=empty)


_MISTRAL_ARGS_STYLE = CallStyle("@name[ARGS]", "", names=r"[\w-]+")
_STYLES = {
    "json_tools": CallStyle('@nl{"name": "@name", "arguments": ', "}@nl", names=r'[^"\\\x00-\x1f@]+'),
    "mistral": CallStyle('{"name": "@name", "arguments": ', "}", block=("@sp[", ", ", "]"), names=r'[^"\\\x00-\x1f@]+'),
    "kimi_k2": CallStyle(
        "<|tool_call_begin|>functions.@name:@n<|tool_call_argument_begin|>", "<|tool_call_end|>", block=("", "", "")
    ),
    "kimi_k3": CallStyle(
        '<|open|>call tool="@name" index="@n"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
        block=("", "", ""),
    ),
    "qwen3_coder": CallStyle(
        "\n<function=@name>\n", "</function>\n", ArgumentStyle("<parameter=@name>\n", "\n</parameter>\n", write_qwen)
    ),
    "glm47": _tagged_style(""),
    "laguna": _tagged_style(""),
    "longcat": _tagged_style("longcat_", '@nl{"name": "@name", "arguments": {}}@nl'),
    "minimax_m2": CallStyle(
        '<invoke name="@name">@nl', "</invoke>",
        ArgumentStyle('<parameter name="@name">', "</parameter>@nl", write_by_types()), _LINE_BREAK_BLOCK,
    ),
    "muse_spark": CallStyle(
        '<atem:invoke name="@name">@nl', "</atem:invoke>",
        ArgumentStyle('<atem:parameter name="@name">', "</atem:parameter>@nl", write_json), _LINE_BREAK_BLOCK,
    ),
    "minicpm5": CallStyle('"@name">@nl', "", ArgumentStyle('<param name="@name">', "</param>@nl", write_by_types("<"))),
    "pythonic": CallStyle(
        "@name(", ")", ArgumentStyle("@name=", "", write_json, ", ", _IDENTIFIER), ("[", ", ", "]"), _IDENTIFIER
    ),
    "function_gemma": CallStyle(
        "call:@name{", "}", ArgumentStyle("@name:", "", write_between("<escape>", "}"), ",", r"\w+"), names=r"\w+"
    ),
    "gemma4": CallStyle(
        "call:@name{", "}", ArgumentStyle("@name:", "", write_between('<|"|>', "\0"), ",", r"\w+"), names=r"[\w-]+"
    ),
}  # fmt: skip


def write_calls(
    rules: Rules, style: CallStyle, tools: Sequence[dict[str, Any]], strict: Iterable[str], single: bool
) -> str | None:
    """Returns the rule between a pair of tags: one call, or several if the style and `single` allow that.

    For tools not in `strict`, unsupported parts of the schema are ignored.

    Returns:
        None if a tool can't be written in this style.
    """
    try:
        written = [_write_call(rules, style, tool["function"], tool["function"]["name"] in strict) for tool in tools]
    except UnsupportedSchema:
        return None
    call = rules.rule(one_of(written))
    if style.block is None:
        return call
    begin, comma, end = (_fill_in(rules, text) for text in style.block)
    more = "" if single else f"({comma} {call})*"
    return rules.rule(f"{begin} {call} {more} {end}")


def arguments_of(function: dict[str, Any], strict: bool) -> Schema:
    """Returns the schema of a call's arguments, without annotations. Additional properties are excluded unless the
    schema says otherwise.

    Raises:
        InvalidRequest: the schema does not describe an object.
    """
    schema = prune(function["parameters"], lambda key, _: key in ANNOTATION_KEYS)
    schema = close_object(close_objects(schema if strict else drop_unreadable(schema)))
    if (kind := schema.get("type", "object")) != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"the arguments have type {kind!r}; expected the schema of an object")
    return {**schema, "type": "object", "x-guidance": {**JSON_WHITESPACE, "lenient": not strict}}


def _write_call(rules: Rules, style: CallStyle, function: dict[str, Any], strict: bool) -> str:
    name, schema = function["name"], arguments_of(function, strict)
    if re.fullmatch(style.names, name, re.ASCII) is None:
        raise UnsupportedSchema
    before, after = _fill_in(rules, style.before, name), _fill_in(rules, style.after)
    if style.arguments is None:
        return rules.rule(f"{before} {rules.json(schema)} {after}")
    parts = _write_arguments(rules, style.arguments, schema)
    comma, rest, firsts = _fill_in(rules, style.arguments.comma), '""', list[str]()
    for part, needed in reversed(parts):  # a subset of them, in order; `firsts` are the alternatives by first part
        firsts = [f"{part} {rest}", *(() if needed else firsts)]
        rest = rules.rule(one_of([f"{comma} {part} {rest}", *(() if needed else [rest])]))
    ways = [f"{before} {first} {after}" for first in firsts]
    if not any(needed for _, needed in parts):
        ways.append(_fill_in(rules, style.empty, name) if style.empty is not None else f"{before} {after}")
    return rules.rule(one_of(ways))


def _write_arguments(rules: Rules, style: ArgumentStyle, schema: Schema) -> list[tuple[str, bool]]:
    """Returns each argument's rule and whether it is required."""
    if set(schema) - _SEPARABLE_KEYS:
        raise UnsupportedSchema
    needed, known, found = schema.get("required", []), schema.get("properties", {}), list[tuple[str, bool]]()
    after, line_break, _ = style.after.partition("@nl")
    for name, inner in {**known, **{name: {} for name in needed if name not in known}}.items():
        if not isinstance(inner, dict) or re.fullmatch(style.names, name, re.ASCII) is None:
            raise UnsupportedSchema
        shared = {"x-guidance", *(("$defs", "definitions") if "$ref" in json.dumps(inner) else ())}
        value = style.write(rules, {**inner, **{key: schema[key] for key in shared & set(schema)}}, after)
        text = f"{_fill_in(rules, style.before, name)} {value} {_fill_in(rules, line_break)}"
        found.append((rules.rule(text), name in needed))
    return found


def _fill_in(rules: Rules, text: str, name: str = "") -> str:
    """Returns a piece of a style with `name` filled in."""
    pieces = re.split("(@nl|@sp|@n(?!ame))", text)
    return " ".join(_MARKS.get(piece) or rules.literal(piece.replace("@name", name)) for piece in pieces)


def drop_unreadable(schema: Any) -> Any:
    """Removes the patterns that llguidance rejects: those with look-around or back references."""
    return prune(schema, lambda key, value: key == "pattern" and bool(_UNREADABLE.search(str(value))))
