"""Messages and tools as templates take them, of every API.

`text_of`: messages as templates take them, which is as dicts, and the parts of content that can be read.

`Toolbox`: which tools an answer may call: every API's `tools` and `tool_choice` as one record. The model is shown only
those that may be called.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.server.model.served import ServedModel
from outrider.server.problems import Refused


def text_of(parts: Iterable[tuple[str, str | None]], readable: tuple[str, ...], where: str) -> str:
    """The texts of content's parts, given as (type, text), one behind the other.

    Raises:
        Refused: a part is an image or anything else than text.
    """
    found = []
    for kind, text in parts:
        if kind not in readable:
            raise Refused(f"{where}: a part of type {kind[:40]!r} can't be read here; only text can", where)
        found.append(text or "")
    return "".join(found)


def call(name: str, arguments: str | dict[str, Any], own_id: str | None) -> dict[str, Any]:
    """An earlier call of a tool; arguments become an object where they are one, which templates expect."""
    return {"type": "function", "id": own_id or "", "function": {"name": name, "arguments": _object(arguments)}}


def assistant(content: str, calls: list[dict[str, Any]], thought: str = "") -> dict[str, Any]:
    """A turn of the model's own."""
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        said["tool_calls"] = calls
    if thought:
        said["reasoning_content"] = thought
    return said


def result(content: str, own_id: str, name: str | None) -> dict[str, Any]:
    """What a tool answered."""
    return {"role": "tool", "content": content, "tool_call_id": own_id, **({"name": name} if name else {})}


def _object(arguments: str | dict[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # the template may take it; that the model once wrote nonsense must not end the conversation


ANY, NONE, MUST = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`tools` in OpenAI's shape, as templates and parsers take them. `must`: one is called; `one`: no more than one.

    `strict`: the names of those whose calls are held to their schemas in any case; `guided`: all are, for the model
    knows tools only in words.
    """

    tools: tuple[dict[str, Any], ...] = ()
    must: bool = False
    one: bool = False
    strict: frozenset[str] = frozenset()
    guided: bool = False

    @property
    def binds(self) -> bool:
        """Whether calls are held to more than what the model writes by itself."""
        return self.must or self.guided or bool(self.strict)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`tool_choice`: `kind` is auto, none or required; `names`: of these tools alone, None: of all.

    `one`: no more than one call, as where a tool is named.
    """

    kind: str = ANY
    names: tuple[str, ...] | None = None
    one: bool = False


def function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def toolbox(
    model: ServedModel, tools: Sequence[dict[str, Any]], choice: ToolSelection, strict: Iterable[str] = ()
) -> Toolbox:
    """The tools that may be called; `strict`: the names of those that say so.

    Raises:
        Refused: the model knows no tools, two have one name, or what is required is not there.
    """
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise Refused("tools: two have the same name; expected different names", "tools")
    for name in choice.names or ():
        if name not in by_name:
            raise Refused(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    allowed = tools if choice.names is None else [by_name[name] for name in dict.fromkeys(choice.names)]
    if choice.kind == MUST and not allowed:
        raise Refused("tool_choice requires a call, but there are no tools", "tool_choice")
    if choice.kind == NONE or not allowed:
        return Toolbox()
    if model.tools is None:
        raise Refused(f"{model.id} has no template or no format for calling tools; leave tools out", "tools")
    held = frozenset(strict) & {tool["function"]["name"] for tool in allowed}
    return Toolbox(tuple(allowed), choice.kind == MUST, choice.one, held, model.tools_in_words)
