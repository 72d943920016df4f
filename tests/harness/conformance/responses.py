"""OpenAI's responses: items, events, and what a stateless server does not support."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.requests import CITY, GREETING, PARIS, RESPONSES, SUNNY, THINKS

cases = Cases("Responses")
VLLM, LLAMA, OPENAI = "vLLM test_simple", "llama.cpp test_compat_oai_responses", "OpenAI's reference"
TOOL = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
NO_STORE = "nothing is stored here; send the whole input"


def text(answer: Any) -> str:
    """Returns the text of all messages of a response."""
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def message(role: str, words: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """A response has an id, is complete, and its message has an id of its own."""
    answer = at.chat.json(RESPONSES, model=at.chat.model, input="hi")
    expect(
        answer["id"].startswith("resp_") and answer["output"][0]["id"].startswith("msg_"), "an id has a wrong prefix"
    )
    equal((answer["status"], answer["incomplete_details"]), ("completed", None), "the status")
    equal(text(answer), GREETING, "the text")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """Messages are accepted with instructions, with parts and without a type."""
    for given in ([{"role": "user", "content": "hi"}], [message("system", "Be kind."), message("user", "hi")]):
        equal(text(at.chat.json(RESPONSES, input=given, instructions="Be kind.")), GREETING, "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Earlier output, a reasoning item without words among it, is read with and without ids."""
    for more in ({}, {"id": "x_1", "status": "completed"}):
        earlier = [message("assistant", "Yes.", "output_text") | more, {"type": "reasoning", "summary": [], **more}]
        given = [message("user", "hi"), *earlier, message("user", "hi")]
        equal(text(at.chat.json(RESPONSES, input=given)), GREETING, "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """max_output_tokens: the response is incomplete, and has the reason."""
    answer = at.chat.json(RESPONSES, input="hi", max_output_tokens=2)
    equal((answer["status"], answer["incomplete_details"]), ("incomplete", {"reason": "max_output_tokens"}), "status")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """A stream's deltas concatenate to the text of its last event's response."""
    events = at.chat.stream(RESPONSES, input="hi")
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    equal((events[-1]["type"], deltas), ("response.completed", text(events[-1]["response"])), "end and deltas")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """A stream's events are numbered, and every item that starts ends, with the same id."""
    events = at.chat.stream(RESPONSES, input="hi")
    equal([event["sequence_number"] for event in events], list(range(len(events))), "the numbers")
    kinds = [event["type"] for event in events if not event["type"].endswith("delta")]
    expected = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
                "content_part.done", "output_item.done", "completed"]  # fmt: skip
    equal(kinds, [f"response.{kind}" for kind in expected], "their order")
    ids = {event["item_id"] for event in events if "item_id" in event}
    equal(ids, {events[-1]["response"]["output"][0]["id"]}, "the ids")


@cases.add("vLLM test_function_call")
def _(at: Servers) -> None:
    """A call is an item with name, arguments and call_id; with its output the conversation continues."""
    call = at.chat.json(RESPONSES, input="hi", tools=[TOOL])["output"][-1]
    equal(
        (call["type"], call["name"], json.loads(call["arguments"])), ("function_call", "get_weather", PARIS), "the call"
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 C"}
    answer = at.chat.json(RESPONSES, input=[message("user", "hi"), call, output], tools=[TOOL])
    equal(text(answer), SUNNY, "the text")


@cases.add("vLLM test_function_call")
def _(at: Servers) -> None:
    """A stream sends a call's arguments as deltas, and completely at the end."""
    events = at.chat.stream(RESPONSES, input="hi", tools=[TOOL])
    deltas = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    whole = [e["arguments"] for e in events if e["type"] == "response.function_call_arguments.done"]
    equal((json.loads(deltas), whole), (PARIS, [deltas]), "the arguments")


@cases.add("vLLM test_function_call")
def _(at: Servers) -> None:
    """tool_choice is repeated in the response; none calls nothing, required calls one."""
    answer = at.chat.json(RESPONSES, input="hi", tools=[TOOL], tool_choice="none")
    equal((text(answer), answer["tool_choice"]), (GREETING, "none"), "text and choice")
    call = at.chat.json(RESPONSES, input="hi", tools=[TOOL], tool_choice="required")["output"][-1]
    equal(call["type"], "function_call", "the item")


@cases.add("vLLM test_simple; vLLM test_basic")
def _(at: Servers) -> None:
    """A model that thinks has a reasoning item before its message."""
    answer = at.chat.json(RESPONSES, input="hi", chat_template_kwargs=THINKS)
    equal([item["type"] for item in answer["output"]], ["reasoning", "message"], "the items")


@cases.add(OPENAI)
def _(at: Servers) -> None:
    """With reasoning.summary the reasoning is a summary, whole and as events."""
    asked = {"input": "hi", "chat_template_kwargs": THINKS, "reasoning": {"summary": "detailed"}}
    item = at.chat.json(RESPONSES, **asked)["output"][0]
    deltas = [e["delta"] for e in at.chat.stream(RESPONSES, **asked) if "reasoning_summary_text.delta" in e["type"]]
    equal(item["summary"], [{"type": "summary_text", "text": "".join(deltas)}], "the summary")


@cases.add(OPENAI)
def _(at: Servers) -> None:
    """reasoning.encrypted_content returns reasoning that a client may send back without its text."""
    asked = {"input": "hi", "chat_template_kwargs": THINKS, "include": ["reasoning.encrypted_content"]}
    item = at.chat.json(RESPONSES, **asked)["output"][0]
    expect(item["type"] == "reasoning" and item["encrypted_content"], f"the item is {item}")
    back = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
    equal(text(at.chat.json(RESPONSES, input=[message("user", "hi"), back, message("user", "hi")])), GREETING, "it")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Usage has the number of thinking tokens, streamed or not."""
    whole = at.chat.json(RESPONSES, input="hi", chat_template_kwargs=THINKS)
    last = at.chat.stream(RESPONSES, input="hi", chat_template_kwargs=THINKS)[-1]["response"]
    for answer in (whole, last):
        count = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        expect(0 < count < answer["usage"]["output_tokens"], f"reasoning_tokens is {count}")


@cases.add("vLLM test_sampling_params")
def _(at: Servers) -> None:
    """temperature, top_p, top_k and seed are applied."""
    asked = {"input": "hi", "temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 42, "max_output_tokens": 12}
    first, second = (at.pair.json(RESPONSES, **asked) for _ in range(2))
    equal((text(second), first["temperature"], first["top_p"]), (text(first), 0.8, 0.95), "text and fields")


@cases.add("vLLM test_sampling_params")
def _(at: Servers) -> None:
    """repetition_penalty, stop and ignore_eos work as in chats."""
    equal(text(at.chat.json(RESPONSES, input="hi", stop=[", dear"])), "Hello there", "the text")
    answer = at.chat.json(RESPONSES, input="hi", ignore_eos=True, repetition_penalty=1.2, max_output_tokens=9)
    equal(answer["usage"]["output_tokens"], 9, "the number")


@cases.add("vLLM test_sampling_params")
def _(at: Servers) -> None:
    """A seed of a response beyond 64 bits is rejected."""
    refused(at.chat.post(RESPONSES, input="hi", seed=2**63), "seed")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """top_logprobs with include: the log-probabilities of the text's tokens."""
    asked = {"input": "hi", "top_logprobs": 3, "include": ["message.output_text.logprobs"]}
    part = at.chat.json(RESPONSES, **asked)["output"][0]["content"][0]
    expect(part["logprobs"] and len(part["logprobs"][0]["top_logprobs"]) == 3, "there are none")


@cases.add(OPENAI)
def _(at: Servers) -> None:
    """reasoning.effort, store, metadata, truncation disabled and parallel_tool_calls are accepted."""
    asked = {"reasoning": {"effort": "none"}, "store": False, "metadata": {"a": "b"}, "truncation": "disabled"}
    equal(text(at.chat.json(RESPONSES, input="hi", **asked, parallel_tool_calls=True)), GREETING, "the text")


@cases.add("vLLM test_stateful", why=NO_STORE)
def _(at: Servers) -> None:
    """previous_response_id continues an earlier response."""
    first = at.chat.json(RESPONSES, input="hi")["id"]
    at.chat.json(RESPONSES, input="hi", previous_response_id=first)


@cases.add("vLLM test_stateful", why=NO_STORE)
def _(at: Servers) -> None:
    """GET /v1/responses/{id} returns an earlier response."""
    at.chat.get(f"/v1/responses/{at.chat.json(RESPONSES, input='hi')['id']}").ok()


@cases.add("vLLM test_stateful", why="responses are generated while the client waits; disconnect to cancel")
def _(at: Servers) -> None:
    """background: the response is generated without a connection."""
    at.chat.json(RESPONSES, input="hi", background=True)


@cases.add("vLLM test_image", why="only text is read here")
def _(at: Servers) -> None:
    """An image in the input is read."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    at.chat.json(RESPONSES, input=[{"role": "user", "content": [image]}])
