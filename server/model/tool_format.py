"""How a model marks thinking and writes tool calls.

Calls are parsed by mlx-lm's tool parsers, which are loaded without importing mlx-lm, because that imports MLX. Tags are
found as in mlx-lm, by the vocabulary's tokens and the template, and for some families that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.orchestrator.pairing.chat_template import Message
from outrider.protocol.errors import ModelError
from outrider.server.model.call_grammar import CallStyle, get_style

_KIMI_K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
PACKAGE = "_outrider_tool_parsers"

# Parsers, in mlx-lm's order, and substrings, all of which a template of theirs contains.
_TEMPLATE_MARKERS = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
)

# Of Mistral Small 3.2: an id, which mlx-lm reads as the name; the marks have no names in copies with 3.1's tokenizer.
_BEFORE_ARGUMENTS = re.compile(r"((\[CALL_ID\]|<SPECIAL_33>)\s*[\w-]+\s*)?(\[ARGS\]|<SPECIAL_32>)")
FALLBACK_FORMAT = "json_tools"
FALLBACK_NOTE = (
    "The chat template of this model does not support tools, or writes calls that can't be parsed. Tools are described"
    " in the system prompt, and a grammar constrains calls. --no-tool-fallback refuses tools instead."
)
_INSTRUCTION = """You may call functions to answer the user. These are the functions, a JSON object each:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, like this:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>
What the function returned follows between <tool_response> and </tool_response>. Call a function only if its result is \
needed; otherwise answer in words."""


@dataclass(frozen=True, slots=True)
class SpanTags:
    """The tags that begin and end a span. An empty `end` means the end of the text.

    For thinking: `answer` always begins the answer, if the format has such a tag; `marks` are further tags between
    parts, which are not text.
    """

    start: str
    end: str
    answer: str = ""
    marks: tuple[str, ...] = ()


_HARMONY_END = "<|end|><|start|>assistant"
# For each format: tokens that the vocabulary contains, and the tags.
_THINKING_TAGS: tuple[tuple[tuple[str, ...], SpanTags], ...] = (
    (("<think>", "</think>"), SpanTags("<think>", "</think>")),
    (("<longcat_think>", "</longcat_think>"), SpanTags("<longcat_think>", "</longcat_think>")),
    (("<|think:start|>", "<|think:end|>"), SpanTags("<|think:start|>", "<|think:end|>")),
    (("[THINK]", "[/THINK]"), SpanTags("[THINK]", "[/THINK]")),
    (("<seed:think>", "</seed:think>"), SpanTags("<seed:think>", "</seed:think>")),
    (("<|inner_prefix|>", "<|inner_suffix|>"), SpanTags("<|inner_prefix|>", "<|inner_suffix|>")),
    (("<|channel>", "<channel|>"), SpanTags("<|channel>thought", "<channel|>")),
    (_KIMI_K3_TOKENS, SpanTags(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>",
        marks=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    )),
    # MiniMax-M3 begins an answer without thinking with the end tag.
    (("<mm:think>",), SpanTags("<mm:think>", "</mm:think>", marks=("</mm:think>",))),
    (("<|begin|>", "<|think|>", "<|content|>", "<|end|>"),  # Solar
     SpanTags("<|think|>", "<|end|><|begin|>assistant", "<|content|>")),
    (("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Cohere
     SpanTags("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", ("<|END_RESPONSE|>",))),
    (("<|start|>", "<|channel|>", "<|message|>", "<|call|>"),  # gpt-oss, whose message header ends the thinking
     SpanTags("<|channel|>analysis<|message|>", _HARMONY_END, "<|channel|>final<|message|>",
              (_HARMONY_END, "<|channel|>commentary<|message|>"))),
)  # fmt: skip


def find_thinking_tags(vocabulary: Collection[str]) -> SpanTags | None:
    """Returns the thinking tags, or None if the model has none."""
    return next((tags for tokens, tags in _THINKING_TAGS if all(token in vocabulary for token in tokens)), None)


class InvalidToolCall(Exception):
    """The text between a call's tags can't be parsed, usually because it was cut off."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function and its arguments as JSON text. `id` is the model's own, if its format has one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One of mlx-lm's parsers. `style`: how to write its calls in a grammar; None if unknown."""

    name: str
    tags: SpanTags
    module: ModuleType
    style: CallStyle | None = None

    def calls(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
        """Parses the text between the tags.

        Raises:
            InvalidToolCall: it can't be parsed.
        """
        try:
            parsed = self.module.parse_tool_call(_BEFORE_ARGUMENTS.sub("[ARGS]", text), list(tools))
            many = parsed if isinstance(parsed, list) else [parsed]
            return tuple(_to_tool_call(one) for one in many)
        except Exception as error:  # parsers raise anything on malformed text
            raise InvalidToolCall(str(error)) from None


def find_tool_format(template: str | None, vocabulary: Collection[str], named: str | None) -> ToolFormat | None:
    """Returns the format named in the tokenizer's settings, or inferred from template and vocabulary; None if there is
    none.

    Raises:
        ModelError: the installed mlx-lm does not have the named parser.
    """
    name = named or infer_parser(template, vocabulary)
    if name is None or "]<]minimax[>[" in (template or ""):  # MiniMax-M3's calls, which mlx-lm takes for JSON
        return None
    try:
        module = import_module(f"{_import_parsers()}.{name}")
    except ImportError:
        raise ModelError(f"the model writes tool calls as {name!r}, which the installed mlx-lm can't parse") from None
    tags = SpanTags(module.tool_call_start, module.tool_call_end)
    return ToolFormat(name, tags, module, get_style(name, template or ""))


def infer_parser(template: str | None, vocabulary: Collection[str]) -> str | None:
    """Returns the parser's name by mlx-lm's rules, in the same order."""
    for name, marks in _TEMPLATE_MARKERS:
        if template is not None and all(mark in template for mark in marks):
            return name
    if all(token in vocabulary for token in _KIMI_K3_TOKENS):
        return "kimi_k3"
    if "<|tool_call_start|>" in vocabulary and "<|tool_call_end|>" in vocabulary:
        return "pythonic"
    return None


def _to_tool_call(parsed: dict[str, Any]) -> ToolCall:
    name, own = parsed["name"], parsed.get("id")
    arguments = parsed.get("arguments", parsed.get("parameters", {}))  # Llama's name for them, which others mix in
    if not isinstance(name, str) or not name:
        raise InvalidToolCall("it names no function")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    name, text = replace_lone_surrogates(name), replace_lone_surrogates(text)
    return ToolCall(name, text, own if isinstance(own, str) else None)


@cache
def _import_parsers() -> str:
    """Makes the parsers importable as a package of their own, and returns its name.

    `find_spec` locates mlx-lm without running it.
    """
    package = find_spec("mlx_lm")
    places = package.submodule_search_locations or () if package is not None else ()
    module = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    module.__path__ = [str(Path(place) / "tool_parsers") for place in places]
    return PACKAGE


def tools_as_text(messages: Iterable[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Rewrites a conversation for a template without tools: the system message describes them, in Hermes' style."""
    converted: list[Message] = []
    for message in messages:
        one = _message_to_text(message)
        if converted and str(converted[-1].get("content") or "").endswith("</tool_response>"):
            add_turn(converted, one, "\n")
        else:
            converted.append(one)
    if not tools:
        return converted
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction: Message = {"role": "system", "content": _INSTRUCTION.format(tools=functions)}
    own = converted[:1] if converted and converted[0]["role"] == "system" else []
    return [*join_turns([*own, instruction]), *converted[len(own) :]]


def add_turn(messages: list[Message], turn: Message, separator: str = "\n\n", to_results: bool = False) -> None:
    """Adds a turn. Consecutive ones of one role but a tool's become one; `to_results`: so do a tool's and a user's."""
    last = messages[-1] if messages else {}
    roles = last.get("role"), turn["role"]
    if (roles[0] == roles[1] != "tool") or (to_results and roles == ("tool", "user")):
        text = separator.join(str(one["content"]) for one in (last, turn) if one.get("content"))
        calls = [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]
        messages[-1] = {**turn, **last, "content": text, **({"tool_calls": calls} if calls else {})}
    else:
        messages.append(turn)


def join_turns(messages: Iterable[Message], keep_first: bool = True, to_results: bool = False) -> list[Message]:
    """Rewrites a conversation for a template with alternating turns, of which the system's can only be the first, or
    none without `keep_first`; its other messages become the user's. `to_results`: a tool's result takes in the user's
    text after it, because Mistral's templates require an answer between them."""
    found: list[Message] = []
    for message in messages:
        keep_first = keep_first and message["role"] == "system"
        turn = {**message, "role": "user"} if message["role"] == "system" and not keep_first else message
        add_turn(found, turn, to_results=to_results)
    return found


def with_short_ids(messages: Iterable[Message]) -> list[Message]:
    """Replaces the ids of calls and results by nine letters and digits, as Mistral's templates require; equal ids stay
    equal."""
    found: list[Message] = []
    for message in messages:
        one = dict(message)
        if one.get("tool_calls"):
            one["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in one["tool_calls"]]
        if "tool_call_id" in one:
            one["tool_call_id"] = _short_id(one["tool_call_id"])
        found.append(one)
    return found


def calls_in_text(messages: Iterable[Message], tags: SpanTags) -> list[Message]:
    """Writes earlier calls into the text, in Python's syntax, for LFM2's templates, which show only the text."""
    found: list[Message] = []
    for message in messages:
        if calls := ", ".join(_call_to_python(**call["function"]) for call in message.get("tool_calls", ())):
            message = {**message, "content": f"{message['content']}{tags.start}[{calls}]{tags.end}"}
        found.append(message)
    return found


def replace_lone_surrogates(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON's escapes can write but UTF-8 can't, by question marks."""
    return text.encode(errors="replace").decode()


def _short_id(own: str) -> str:
    return own if re.fullmatch("[A-Za-z0-9]{9}", own) else hashlib.sha256(own.encode()).hexdigest()[:9]


def _message_to_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    words = [message["content"]] if message.get("content") else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*words, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])}


def _call_to_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
