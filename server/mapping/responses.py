"""OpenAI's responses as a conversation, its tools and its manner."""

from __future__ import annotations

from typing import Any

from outrider.server.mapping import speech
from outrider.server.mapping.form import Form, by_format
from outrider.server.mapping.toolbox import ANY, MUST, Choice, Toolbox, function, toolbox
from outrider.server.model.served import Conversation, ServedModel
from outrider.server.problems import Refused
from outrider.server.shapes.responses import Content, FunctionChosen, FunctionsAllowed, Item, ResponsesRequest

_LOGPROBS = "message.output_text.logprobs"
_READABLE = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_REFUSED = {
    "previous_response_id": "responses are not stored; send the whole input",
    "conversation": "conversations are not stored; send the whole input",
    "prompt": "prompts are not stored; send instructions and input",
    "max_tool_calls": "tools are called by the client",
}


def refuse(asked: ResponsesRequest) -> None:
    """Raises Refused for what would change the answer and can't be done."""
    if asked.top_logprobs and logprobs(asked) is None:
        raise Refused(f"top_logprobs: none are wanted; expected {_LOGPROBS} in include", "top_logprobs")
    for name, why in _REFUSED.items():
        if getattr(asked, name) is not None:
            raise Refused(f"{name}: {why}", name)
    if asked.background:
        raise Refused("background: responses can't run in the background; leave it out", "background")


def logprobs(asked: ResponsesRequest) -> int | None:
    """How many of each place's likeliest tokens are told; None: no log-probabilities at all."""
    return asked.top_logprobs or 0 if _LOGPROBS in (asked.include or ()) else None


def form(asked: ResponsesRequest) -> Form | None:
    """What `text.format` asks for. Raises Refused."""
    given = (asked.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise Refused("text.format: expected an object", "text")
    return by_format(given, "text.format", may_be_loose=True)


def box(model: ServedModel, asked: ResponsesRequest) -> Toolbox:
    given = []
    for place, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            continue  # an offer that nobody here can keep; `notes` says so
        if not tool.name:
            raise Refused(f"tools.{place}: the function has no name", f"tools.{place}")
        given.append(function(tool.name, tool.description, tool.parameters))
    strict = [tool.name for tool in asked.tools or () if tool.strict and tool.name]
    return toolbox(model, given, _choice(asked), strict)


def _choice(asked: ResponsesRequest) -> Choice:
    one = asked.parallel_tool_calls is False
    match asked.tool_choice:
        case None | str() as kind:
            return Choice(kind or ANY, one=one)
        case FunctionChosen(name=name):
            return Choice(MUST, (name,), one=True)
        case FunctionsAllowed(mode=mode, tools=allowed):
            return Choice(mode, tuple(tool.name for tool in allowed), one)


def notes(asked: ResponsesRequest) -> list[str]:
    """What was left out: coding agents offer tools that run at OpenAI beside their own."""
    others = sorted({tool.type[:40] for tool in asked.tools or () if tool.type != "function"})
    return [f"tools: {', '.join(others)} ignored; only function tools are supported"] if others else []


def conversation(asked: ResponsesRequest, box: Toolbox) -> Conversation:
    said: list[dict[str, Any]] = []
    if asked.instructions:
        said.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        said.append({"role": "user", "content": asked.input})
    else:
        said += _items(asked.input)
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        keywords.setdefault("reasoning_effort", asked.reasoning.effort)
    return Conversation(said, box.tools, keywords)


def _items(items: list[Item]) -> list[dict[str, Any]]:
    """Calls and thoughts are items of their own here, and belong to one turn of the assistant's in a template."""
    said: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"input.{place}"
        match item.type:
            case "message" if item.role is not None:
                _say(said, item.role, _text(item.content, f"{where}.content"))
            case "function_call":
                _own(said).setdefault("tool_calls", []).append(
                    speech.call(item.name or "", item.arguments or "{}", item.call_id)
                )
            case "function_call_output":
                said.append(speech.result(_text(item.output, f"{where}.output"), item.call_id or "", None))
            case "reasoning":
                thought = _text(item.content, f"{where}.content")
                said.append(speech.assistant("", [], thought))
            case other:
                raise Refused(f"{where}: an item of type {other[:40]!r} can't be read here", where)
    return [message for message in said if not _is_empty(message)]


def _say(said: list[dict[str, Any]], role: str, text: str) -> None:
    if role == "assistant" and said and said[-1]["role"] == "assistant" and not said[-1]["content"]:
        said[-1]["content"] = text  # behind its own thought
    else:
        said.append({"role": "system" if role == "developer" else role, "content": text})


def _own(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn at the end; a new one where another speaks last."""
    if not said or said[-1]["role"] != "assistant":
        said.append(speech.assistant("", []))
    return said[-1]


def _is_empty(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not any(message.get(k) for k in ("content", "tool_calls"))


def _text(content: str | list[Content] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return speech.text_of(((part.type, part.text) for part in content), _READABLE, where)
