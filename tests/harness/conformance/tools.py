"""Tools: calls, results, tool_choice, and streamed calls."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.http_client import choices
from tests.harness.conformance.requests import (
    CHAT,
    GREETING,
    HELLO,
    OTHER,
    PARIS,
    SUNNY,
    TOOL,
    WEATHER,
    assistant_call,
    content_of,
    result,
)

cases = Cases("Tools")
LLAMA, VLLM = "llama.cpp test_tool_call", "vLLM tests/tool_use"


def calls(at: Servers, **asked: Any) -> list[tuple[str, Any]]:
    """Returns names and arguments of the calls of a complete answer."""
    message = at.chat.json(CHAT, **{"messages": HELLO, "tools": [TOOL], **asked})["choices"][0]["message"]
    made = [call["function"] for call in message.get("tool_calls") or ()]
    return [(one["name"], json.loads(one["arguments"])) for one in made]


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """A call has a name, JSON arguments and an id, and the finish reason is tool_calls."""
    choice = at.chat.json(CHAT, messages=HELLO, tools=[TOOL])["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    equal((call["type"], choice["finish_reason"]), ("function", "tool_calls"), "type and reason")
    expect(call["id"] and json.loads(call["function"]["arguments"]) == PARIS, f"the call is {call}")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """A stream sends a call's name, id and arguments by index, and ends with tool_calls."""
    events = list(choices(at.chat.stream(CHAT, messages=HELLO, tools=[TOOL])))
    parts = [call for choice in events for call in choice["delta"].get("tool_calls") or ()]
    name = "".join(part["function"].get("name") or "" for part in parts)
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    equal((name, json.loads(arguments), {part["index"] for part in parts}), ("get_weather", PARIS, {0}), "the call")
    equal(events[-1]["finish_reason"], "tool_calls", "the reason")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Text before a call is content; the format's tags are not."""
    choice = at.chat.json(CHAT, messages=HELLO, tools=[TOOL])["choices"][0]
    equal(choice["message"]["content"], "I look.", "the content")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """With the tool's result the conversation continues."""
    talk = [*HELLO, assistant_call(), result()]
    equal(content_of(at.chat.json(CHAT, messages=talk, tools=[TOOL])), SUNNY, "the text")


@cases.add("mlx-lm test_server")
def _(at: Servers) -> None:
    """A result may be parts of text, or nothing."""
    for content in ([{"type": "text", "text": "22 C"}], "", None):
        talk = [*HELLO, assistant_call(), result(content)]
        equal(content_of(at.chat.json(CHAT, messages=talk, tools=[TOOL])), SUNNY, "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Several calls of one answer have indices and ids of their own."""
    events = list(choices(at.chat.stream(CHAT, messages=HELLO, tools=[TOOL], chat_template_kwargs={"both": True})))
    parts = [call for choice in events for call in choice["delta"].get("tool_calls") or ()]
    equal([part["index"] for part in parts], [0, 1], "the indices")
    equal(len({part["id"] for part in parts}), 2, "the number of ids")


@cases.add("OpenAI's reference; vLLM test_parallel_tool_calls")
def _(at: Servers) -> None:
    """parallel_tool_calls: false leaves one call."""
    found = calls(at, chat_template_kwargs={"both": True}, parallel_tool_calls=False)
    equal(found, [("get_weather", {"city": "Oslo"})], "the calls")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """tool_choice none: no call."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO, tools=[TOOL], tool_choice="none")), GREETING, "the text")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """tool_choice required: a tool is called, also if there are several."""
    equal(calls(at, tools=[OTHER, TOOL], tool_choice="required"), [("get_weather", PARIS)], "the calls")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A named function is called."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    equal(calls(at, tools=[OTHER, TOOL], tool_choice=named), [("get_weather", PARIS)], "the calls")


@cases.add("vLLM test_completion_with_function_calling")
def _(at: Servers) -> None:
    """A named function is called even if the model prefers another."""
    found = calls(at, tools=[OTHER, TOOL], tool_choice={"type": "function", "function": {"name": "other"}})
    equal([name for name, _ in found], ["other"], "the calls")


@cases.add("vLLM test_tool_choice_null")
def _(at: Servers) -> None:
    """tool_choice null and an empty list of tools mean omitted."""
    equal(calls(at, tool_choice=None), [("get_weather", PARIS)], "the calls")
    left_out: tuple[Any, ...] = (None, [])
    for tools in left_out:
        equal(content_of(at.chat.json(CHAT, messages=HELLO, tools=tools)), GREETING, "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """tool_choice that requires a call, without tools, is refused."""
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        refused(at.chat.post(CHAT, messages=HELLO, tool_choice=choice), "tool_choice")


@cases.add("vLLM test_completion_with_function_calling")
def _(at: Servers) -> None:
    """A function that is not among the tools is refused, and named."""
    wrong = {"type": "function", "function": {"name": "nonsense"}}
    refused(at.chat.post(CHAT, messages=HELLO, tools=[TOOL], tool_choice=wrong), "nonsense")


@cases.add("vLLM test_completion_with_function_calling")
def _(at: Servers) -> None:
    """An unknown tool_choice is refused."""
    for wrong in ("sometimes", {}, {"type": "function"}):
        refused(at.chat.post(CHAT, messages=HELLO, tools=[TOOL], tool_choice=wrong), "tool_choice")


@cases.add("OpenAI's reference", why="deprecated since 2023 in favour of tools, which are here")
def _(at: Servers) -> None:
    """functions and function_call."""
    at.chat.json(CHAT, messages=HELLO, functions=[TOOL["function"]])


@cases.add("OpenAI's reference", why="the server runs no tools; clients run their functions")
def _(at: Servers) -> None:
    """The server runs tools of its own, such as web_search."""
    answer = at.chat.json("/v1/responses", input="hi", tools=[{"type": "web_search"}])
    expect(
        any(item["type"] == "web_search_call" for item in answer["output"]), "the tool is left out, and a note says so"
    )


@cases.add("vLLM test_namespace_tools; Codex's practice")
def _(at: Servers) -> None:
    """A response's tools of other kinds do not keep its functions from being called."""
    mine = {"type": "function", **WEATHER}
    others = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": [mine]}]
    answer = at.chat.json("/v1/responses", input="hi", tools=[*others, mine])
    equal(answer["output"][-1]["type"], "function_call", "the item")
    expect("namespace, web_search" in answer["outrider"]["notes"][0], f"the notes are {answer['outrider']['notes']}")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """Tools for a model without tool calls are rejected with the reason."""
    refused(at.pair.post(CHAT, messages=HELLO, tools=[TOOL]), "no template")
