"""Anthropic's messages as a conversation, its tools and its manner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.server.mapping import speech
from outrider.server.mapping.form import Form, by_format
from outrider.server.mapping.toolbox import ANY, MUST, NONE, Choice, Toolbox, function, toolbox
from outrider.server.model.served import Conversation, ServedModel
from outrider.server.problems import Refused
from outrider.server.shapes.messages import Block, Counted, Turn

_LABEL = "x-anthropic-billing-header:"
_CHOICES = {"auto": ANY, "any": MUST, "none": NONE}


def refuse(asked: Counted) -> None:
    """Raises Refused for what would change the answer and can't be done."""
    if asked.mcp_servers:
        raise Refused("mcp_servers: this server does not call MCP servers; expected client tools", "mcp_servers")
    if asked.thread is not None:
        raise Refused(
            "thread: conversations are not stored; send all messages, without thread",
            "thread",
            details="thread_unsupported_request",
        )
    if asked.compaction is not None:
        raise Refused("compaction: conversations are not shortened; leave it out", "compaction")


def form(asked: Counted) -> Form | None:
    """What `output_config.format`, or `output_format` as it was called before, asks for. Raises Refused."""
    if asked.output_format is not None:
        return by_format(asked.output_format, "output_format")
    given = (asked.output_config or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise Refused("output_config.format: expected an object", "output_config")
    return by_format(given, "output_config.format")


def box(model: ServedModel, asked: Counted) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, "custom"):
            raise Refused(
                f"tools.{place}: {tool.type[:40]} runs only on Anthropic's servers; expected client tools", "tools"
            )
        given.append(function(tool.name, tool.description, tool.input_schema))
    strict = [tool.name for tool in asked.tools or () if tool.strict]
    return toolbox(model, given, _choice(asked), strict)


def _choice(asked: Counted) -> Choice:
    choice = asked.tool_choice
    if choice is None:
        return Choice()
    one = bool(choice.disable_parallel_tool_use)
    if choice.type != "tool":
        return Choice(_CHOICES[choice.type], one=one)
    if choice.name is None:
        raise Refused("tool_choice: type tool needs the tool's name", "tool_choice")
    return Choice(MUST, (choice.name,), one=True)


def conversation(asked: Counted, box: Toolbox) -> Conversation:
    """An assistant's turn at the end is continued, as Anthropic does."""
    said: list[dict[str, Any]] = []
    if system := _system(asked.system or ""):
        said.append({"role": "system", "content": system})
    for place, turn in enumerate(asked.messages):
        said += _turn(turn, f"messages.{place}.content")
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        keywords.setdefault("enable_thinking", asked.thinking.type != "disabled")
    last = said[-1]
    go_on = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
    return Conversation(said, box.tools, keywords, go_on=go_on)


def _turn(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """The messages that one turn is: each result of a tool is one of its own, before what the user says."""
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    results = [block for block in blocks if block.type == "tool_result"]
    calls = [block for block in blocks if block.type == "tool_use"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    rest = [b for b in blocks if b.type not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    for block in results:
        yield speech.result(_text(block.content or "", where), block.tool_use_id or "", None)
    text = speech.text_of(((block.type, block.text) for block in rest), ("text",), where)
    if turn.role == "assistant":
        made = [speech.call(block.name or "", block.input or {}, block.id) for block in calls]
        yield speech.assistant(text, made, "".join(thoughts))
    elif rest or not results:
        yield {"role": turn.role, "content": text}


def _system(given: str | list[Block]) -> str:
    """Without the line by which Claude Code labels each request: with it no two prompts would begin alike."""
    if isinstance(given, str):
        return given
    return _text([block for block in given if not (block.text or "").startswith(_LABEL)], "system")


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return speech.text_of(((block.type, block.text) for block in content), ("text",), where)
