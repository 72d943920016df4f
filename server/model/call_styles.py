"""How each of mlx-lm's formats writes calls between its marks: what a grammar needs to hold a model to them.

In a style @name is a function's or an argument's name, @n which call it is, @nl a line break or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from keyword import kwlist

from outrider.server.model.call_values import Way, as_json, between, glm, minicpm, minimax, qwen

_WORD = r"[\w.-]+"
_IDENTIFIER = rf"(?!(?:{'|'.join(kwlist)})$)[^\W\d]\w*"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments one by one: each between `before` and `after`, and `comma` between two."""

    before: str
    after: str
    way: Way
    comma: str = ""
    names: str = _WORD


@dataclass(frozen=True, slots=True)
class Style:
    """A call is `before`, its arguments, and `after`; without arguments it is `empty`, where that is another.

    `arguments`: None where they are one JSON object. `block`: what begins, parts and ends the calls between one pair of
    marks; None: each call has a pair of its own. `names`: functions that can be written so.
    """

    before: str
    after: str
    arguments: Arguments | None = None
    block: tuple[str, str, str] | None = None
    names: str = _WORD
    empty: str | None = None


def style_of(parser: str, template: str) -> Style | None:
    """That of one of mlx-lm's parsers; None for one that is not known here."""
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
        Arguments('<parameter name="@name">', "</parameter>@nl", minimax), _LINES,
    ),
    "muse_spark": Style(
        '<atem:invoke name="@name">@nl', "</atem:invoke>",
        Arguments('<atem:parameter name="@name">', "</atem:parameter>@nl", as_json), _LINES,
    ),
    "minicpm5": Style('"@name">@nl', "", Arguments('<param name="@name">', "</param>@nl", minicpm)),
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
