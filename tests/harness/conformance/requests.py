"""Requests of the cases, and the scripted model's answers."""

from __future__ import annotations

from typing import Any

from tests.harness.scripted_model import ANSWER, PLAIN, text_of

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
GREETING, SUNNY = text_of(PLAIN), text_of(ANSWER)
PARIS = {"city": "Paris"}
PROMPT = "def fibonacci(n):"
ENDLESS = {"long": True}
"""Keywords of the template that make the scripted model repeat tick, tock, tack without end."""
THINKS = {"enable_thinking": True}
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city", "parameters": CITY}
TOOL = {"type": "function", "function": WEATHER}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """Returns OpenAI's `response_format` for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, **more}}


def content_of(answer: Any) -> str:
    """Returns the text of a complete chat answer with one choice."""
    return str(answer["choices"][0]["message"]["content"])


def assistant_call(city: str = "Paris", own_id: str = "call_1") -> dict[str, Any]:
    """Returns an assistant's turn that calls the tool."""
    function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": own_id, "type": "function", "function": function}],
    }


def result(content: Any = "22 C", own_id: str = "call_1") -> dict[str, Any]:
    """Returns a message with the tool's result."""
    return {"role": "tool", "tool_call_id": own_id, "content": content}
