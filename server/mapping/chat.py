"""OpenAI's chat completions as a conversation, its tools and its manner."""

from __future__ import annotations

from typing import Any

from outrider.server.mapping import speech
from outrider.server.mapping.toolbox import ANY, MUST, Choice, Toolbox, function, toolbox
from outrider.server.model.served import Conversation, ServedModel
from outrider.server.problems import Refused
from outrider.server.shapes.chat import ChatMessage, ChatRequest, Part, Tool, ToolChosen, ToolsAllowed

_REFUSED = {
    "audio": "audio output is not supported",
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "web_search_options": "web search is not supported",
}


def refuse(asked: ChatRequest) -> None:
    """Raises Refused for what would change the answer and can't be done."""
    for name, why in _REFUSED.items():
        if getattr(asked, name) is not None:
            raise Refused(f"{name}: {why}", name)
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise Refused("modalities: only text output is supported; expected ['text'], or leave it out", "modalities")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise Refused(
            "continue_final_message and add_generation_prompt can't be used together", "continue_final_message"
        )
    if asked.continue_final_message:
        check_own_turn(asked.messages)
    if asked.top_logprobs and not asked.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")


def check_own_turn(said: list[ChatMessage]) -> None:
    """Raises Refused when the last message is not the model's own, which it could go on with."""
    if not said or said[-1].role != "assistant":
        raise Refused("continue_final_message: the last message is not the assistant's", "continue_final_message")


def logprobs(asked: ChatRequest) -> int | None:
    """How many of each place's likeliest tokens are told; None: no log-probabilities at all."""
    return asked.top_logprobs or 0 if asked.logprobs else None


def box(model: ServedModel, asked: ChatRequest) -> Toolbox:
    strict = [tool.function.name for tool in asked.tools or () if tool.function is not None and tool.function.strict]
    return toolbox(model, tools(asked.tools), _choice(asked), strict)


def _choice(asked: ChatRequest) -> Choice:
    one = asked.parallel_tool_calls is False
    match asked.tool_choice:
        case None | str() as kind:
            return Choice(kind or ANY, one=one)
        case ToolChosen(function=function):
            return Choice(MUST, (function.name,), one=True)
        case ToolsAllowed(allowed_tools=allowed):
            return Choice(allowed.mode, tuple(tool.function.name for tool in allowed.tools), one)


def conversation(asked: ChatRequest, box: Toolbox) -> Conversation:
    keywords = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        keywords.setdefault("reasoning_effort", asked.reasoning_effort)
    go_on = bool(asked.continue_final_message)
    return Conversation(
        messages=messages(asked.messages),
        tools=box.tools,
        keywords=keywords,
        answer=asked.add_generation_prompt is not False,
        go_on=go_on,
    )


def messages(given: list[ChatMessage]) -> list[dict[str, Any]]:
    """As templates take them. Raises Refused for a part that can't be read."""
    return [_message(message, f"messages.{place}.content") for place, message in enumerate(given)]


def tools(given: list[Tool] | None) -> list[dict[str, Any]]:
    """As templates take them. Raises Refused for one that is no function."""
    found = []
    for place, tool in enumerate(given or ()):
        if tool.type != "function" or tool.function is None:
            raise Refused(f"tools.{place}: only function tools are supported", f"tools.{place}")
        found.append(function(tool.function.name, tool.function.description, tool.function.parameters))
    return found


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = _content(message.content, where)
    if message.role == "assistant":
        calls = [speech.call(c.function.name, c.function.arguments, c.id) for c in message.tool_calls or ()]
        return speech.assistant(content, calls, message.reasoning_content or message.reasoning or "")
    if message.role == "tool":
        return speech.result(content, message.tool_call_id or "", message.name)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _content(content: str | list[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return speech.text_of(((part.type, part.text) for part in content), ("text",), where)
