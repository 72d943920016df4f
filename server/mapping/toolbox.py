"""Which tools an answer may call: every API's `tools` and `tool_choice` as one record.

A call that is asked for is begun for the model, by its format's own mark, with only the tool that was named to choose
from; what it writes then is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.server.model.served import ServedModel
from outrider.server.problems import Refused

ANY, NONE, MUST = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`tools` in OpenAI's shape, as templates and parsers take them. `must`: one is called; `one`: no more than one."""

    tools: tuple[dict[str, Any], ...] = ()
    must: bool = False
    one: bool = False


def function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def toolbox(model: ServedModel, tools: Sequence[dict[str, Any]], choice: str, named: str | None, one: bool) -> Toolbox:
    """`choice` is auto, none or required; `named`: that one is required.

    Raises:
        Refused: the model knows no tools, or what is required is not there.
    """
    if named is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == named]
        if not tools:
            raise Refused(f"tool_choice names {named[:80]!r}, which is not among the tools", "tool_choice")
    if choice == MUST and not tools:
        raise Refused("tool_choice requires a call, and there are no tools", "tool_choice")
    if choice == NONE or not tools:
        return Toolbox()
    if model.tools is None:
        raise Refused(f"{model.id} has no template or no format for calling tools; leave tools out", "tools")
    return Toolbox(tuple(tools), must=choice == MUST or named is not None, one=one)
