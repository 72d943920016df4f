"""Tools in words, for a model whose template has none: they stand in the system prompt, in the manner of Hermes.

Calls and results become text of the conversation's own turns. What the model then writes is read as `json_tools` is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.orchestrator.pair.chat import Message

FORMAT = "json_tools"
NOTE = (
    "The chat template of this model has no tools: they are described in the system prompt, and calls are held to a"
    " grammar. --no-tool-fallback refuses tools instead."
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


def in_words(messages: Iterable[Message], tools: Sequence[dict[str, Any]], in_system: bool = True) -> list[Message]:
    """The conversation without anything that only a template with tools could write.

    `in_system`: the instruction stands in a system message; otherwise before the user's first words.
    """
    said: list[Message] = []
    for message in messages:
        one = _worded(message)
        last = said[-1] if said else None
        if last is not None and one["role"] == last["role"] == "user" and _is_result(last):
            said[-1] = {**last, "content": f"{last['content']}\n{one['content']}"}
        else:
            said.append(one)
    if not tools:
        return said
    told = _INSTRUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    role = "system" if in_system else "user"
    if said and said[0]["role"] == role:
        words = said[0]["content"] or ""
        joined = f"{words}\n\n{told}" if in_system else f"{told}\n\n{words}"
        return [{**said[0], "content": joined}, *said[1:]]
    return [{"role": role, "content": told}, *said]


def _worded(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [_call(call["function"]) for call in message["tool_calls"]]
    words = [message["content"]] if message.get("content") else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*words, *calls])}


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'


def _is_result(message: Message) -> bool:
    return str(message.get("content") or "").endswith("</tool_response>")
