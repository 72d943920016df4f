"""Messages as templates take them, which is as dicts, and the parts of content that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

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
