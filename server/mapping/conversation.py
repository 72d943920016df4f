"""Messages and tools of every API as chat templates take them.

`toolbox` selects the tools that an answer may call. The model sees only these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.server.model.served import ServedModel, Toolbox
from outrider.server.problems import Refused
from outrider.server.schemas import ContentPart


def text_of(content: str | Sequence[ContentPart] | None, where: str, readable: Collection[str] = ("text",)) -> str:
    """Returns a message's content, whose parts are concatenated.

    Raises:
        Refused: a part is an image or anything else but text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in readable:
            raise Refused(f"{where}: a part of type {part.type[:40]!r} can't be read here; only text can", where)
    return "".join(part.text or "" for part in content)


def past_call(name: str, arguments: str | dict[str, Any], own_id: str | None) -> dict[str, Any]:
    """Returns an earlier tool call. JSON arguments become an object, which templates expect."""
    function = {"name": name, "arguments": parsed_arguments(arguments)}
    return {"type": "function", "id": own_id or "", "function": function}


def assistant_message(content: str, calls: list[dict[str, Any]], thought: str = "") -> dict[str, Any]:
    """Returns an assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought
    return message


def tool_result(content: str, own_id: str, name: str | None) -> dict[str, Any]:
    """Returns a tool's result."""
    return {"role": "tool", "content": content, "tool_call_id": own_id, **({"name": name} if name else {})}


def parsed_arguments(arguments: str | dict[str, Any]) -> Any:
    """Returns the value that JSON arguments stand for; invalid ones are returned as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # invalid JSON of an earlier turn must not end the conversation


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`tool_choice`. `names` limits the tools, None: all. `one`: at most one call."""

    kind: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None
    one: bool = False


def function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a tool in OpenAI's format."""
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def toolbox(
    model: ServedModel, tools: Sequence[dict[str, Any]], choice: ToolSelection, strict: Iterable[str] = ()
) -> Toolbox:
    """Returns the tools that may be called. `strict`: the names of strict ones.

    Raises:
        Refused: the model can't call tools, two have the same name, or a required one is missing.
    """
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise Refused("tools: two have the same name; expected different names", "tools")
    for name in choice.names or ():
        if name not in by_name:
            raise Refused(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    allowed = tools if choice.names is None else [by_name[name] for name in dict.fromkeys(choice.names)]
    if choice.kind == "required" and not allowed:
        raise Refused("tool_choice requires a call, but there are no tools", "tool_choice")
    if choice.kind == "none" or not allowed:
        return Toolbox()
    if model.tools is None:
        raise Refused(f"{model.id} has no template or no format for calling tools; leave tools out", "tools")
    held = frozenset(strict) & {tool["function"]["name"] for tool in allowed}
    return Toolbox(tuple(allowed), choice.kind == "required", choice.one, held, model.tools_as_text)
