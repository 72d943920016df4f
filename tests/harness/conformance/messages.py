"""Anthropic's messages: content blocks, events, tools, thinking, token counts."""

from __future__ import annotations

import json
from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect
from tests.harness.conformance.requests import CITY, ENDLESS, GREETING, HELLO, MESSAGES, PARIS, SUNNY, THINKS

cases = Cases("Messages")
LLAMA, VLLM, ANTHROPIC = "llama.cpp test_compat_anthropic", "vLLM tests/entrypoints/anthropic", "Anthropic's reference"
TOOL = {"name": "get_weather", "input_schema": CITY}
COUNT = f"{MESSAGES}/count_tokens"
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": PARIS}


def ask(at: Servers, **asked: Any) -> Any:
    return at.chat.json(MESSAGES, **{"model": at.chat.model, "messages": HELLO, "max_tokens": 50, **asked})


def stream(at: Servers, **asked: Any) -> list[Any]:
    return at.chat.stream(MESSAGES, **{"messages": HELLO, "max_tokens": 50, **asked})


def talk(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a conversation in which the tool was called, with `blocks` as the user's next turn."""
    return [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": list(blocks)}]


def tool_result(content: Any = "22 C", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """A message has its type, role, content in blocks, a reason and usage in Anthropic's names."""
    answer = ask(at)
    equal((answer["type"], answer["role"], answer["stop_reason"]), ("message", "assistant", "end_turn"), "the head")
    equal([(b["type"], b["text"]) for b in answer["content"]], [("text", GREETING)], "the content")
    usage = answer["usage"]
    expect(
        all(isinstance(usage[f"{n}_tokens"], int) for n in ("input", "output", "cache_read_input")), f"it is {usage}"
    )


@cases.add(LLAMA, why="`timings` and `outrider` are added to Anthropic's fields; clients ignore unknown fields")
def _(at: Servers) -> None:
    """Responses have no other fields than Anthropic's."""
    answer = ask(at)
    expect("timings" not in answer, "there are timings")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """system, as text and as blocks, is read."""
    before = ask(at)["usage"]
    for system in ("Be kind.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]):
        usage = ask(at, system=system)["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        expect(total > before["input_tokens"] + before["cache_read_input_tokens"], "it is not in the prompt")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Claude Code's label of each request is not part of the prompt, so that the prompt cache works."""
    label = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;"}
    kind = {"type": "text", "text": "Be kind."}
    counts = [at.chat.json(COUNT, messages=HELLO, system=s)["input_tokens"] for s in ([kind], [label, kind])]
    equal(counts[1], counts[0], "the prompt")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A user's turn in several blocks is one text; several turns are a conversation."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Hm?"}, *HELLO]
    equal(ask(at, messages=turns)["content"][0]["text"], GREETING, "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A stream has message_start, content block deltas, a stop reason and message_stop."""
    events = stream(at)
    kinds = [event["type"] for event in events if event["type"] not in ("ping", "content_block_delta")]
    expected = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    equal(kinds, expected, "the order")
    equal("".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta"), GREETING, "the text")
    expect(
        events[0]["message"]["usage"]["input_tokens"] > 0 and events[0]["message"]["content"] == [],
        "the first event is wrong",
    )
    end = next(event for event in events if event["type"] == "message_delta")
    equal((end["delta"]["stop_reason"], end["usage"]["output_tokens"]), ("end_turn", 5), "the end")


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """Each event of a stream has the type of its data as its name."""
    reply = at.chat.post(MESSAGES, messages=HELLO, max_tokens=5, stream=True).ok()
    equal(reply.lines("event"), [event["type"] for event in reply.events()], "the names")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """count_tokens includes system and tools, needs no max_tokens, and returns nothing else."""
    plain = at.chat.json(COUNT, messages=HELLO)
    equal(set(plain), {"input_tokens"}, "the fields")
    more = at.chat.json(COUNT, messages=HELLO, system="Be kind.", tools=[TOOL])["input_tokens"]
    expect(more > plain["input_tokens"] > 0, f"they are {plain} and {more}")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """A tool call is a block with id, name and input, and the stop reason is tool_use."""
    answer = ask(at, tools=[TOOL])
    use = answer["content"][-1]
    equal((use["type"], use["name"], use["input"]), ("tool_use", "get_weather", PARIS), "the block")
    expect(use["id"] and answer["stop_reason"] == "tool_use", f"the reason is {answer['stop_reason']}")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """In a stream the input arrives as JSON deltas, and block indices are consecutive."""
    events = stream(at, tools=[TOOL])
    parts = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    equal(json.loads("".join(parts)), PARIS, "the input")
    begun, ended = ([e["index"] for e in events if e["type"] == f"content_block_{k}"] for k in ("start", "stop"))
    equal((begun, ended), ([0, 1], [0, 1]), "the indices")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """A tool's result, as text, as blocks, as an error or empty, is read."""
    for result in (tool_result(), tool_result([{"type": "text", "text": "22 C"}]), tool_result(is_error=True),
                   {"type": "tool_result", "tool_use_id": "toolu_1"}, tool_result(None)):  # fmt: skip
        equal(ask(at, messages=talk(result), tools=[TOOL])["content"][0]["text"], SUNNY, "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A turn may have tool results and text."""
    ask(at, messages=talk({"type": "text", "text": "Here:"}, tool_result()))


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """A tool with defer_loading is in the prompt once a result has a tool_reference to it."""
    counts = []
    for late, name in ((True, "other"), (True, "get_weather"), (False, "get_weather")):
        found = tool_result([{"type": "tool_reference", "tool_name": name}])
        asked = {"messages": talk(found), "tools": [{**TOOL, "defer_loading": late}]}
        counts.append(at.chat.json(COUNT, **asked)["input_tokens"])
    expect(counts[0] < counts[1] == counts[2], f"the prompts have {counts} tokens")


@cases.add(VLLM, why="only text is read here")
def _(at: Servers) -> None:
    """A tool's result may be an image."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    ask(at, messages=talk(tool_result([image])), tools=[TOOL])


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """tool_choice: none calls no tool, any and tool call one."""
    equal(ask(at, tools=[TOOL], tool_choice={"type": "none"})["stop_reason"], "end_turn", "the reason")
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        equal(ask(at, tools=[TOOL], tool_choice=choice)["content"][-1]["type"], "tool_use", "the block")


@cases.add(f"{LLAMA}; {ANTHROPIC}")
def _(at: Servers) -> None:
    """A stop sequence ends the message and is reported."""
    answer = ask(at, stop_sequences=["END", ", dear"])
    found = (answer["stop_reason"], answer["stop_sequence"], answer["content"][0]["text"])
    equal(found, ("stop_sequence", ", dear", "Hello there"), "the end")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """temperature, top_p, top_k and metadata are accepted."""
    ask(at, temperature=0.5, top_p=0.9, top_k=40, metadata={"user_id": "user_123"})


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """output_config.effort is taken."""
    ask(at, output_config={"effort": "low"})


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """A system turn may set the effort without a text, which adds nothing to the prompt."""
    turns = [*HELLO, {"role": "system", "content": [], "output_config": {"effort": "low"}}]
    counts = [at.chat.json(COUNT, messages=messages)["input_tokens"] for messages in (HELLO, turns)]
    equal(counts[1], counts[0], "the prompt's length")
    ask(at, messages=turns)


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """A message cut off by max_tokens has stop reason max_tokens."""
    answer = ask(at, chat_template_kwargs=ENDLESS, max_tokens=4)
    equal((answer["stop_reason"], answer["usage"]["output_tokens"]), ("max_tokens", 4), "the end")


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """max_tokens of 0 reads the prompt, for the cache, and answers nothing."""
    answer = ask(at, max_tokens=0)
    equal((answer["content"], answer["stop_reason"]), ([], "max_tokens"), "the answer")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """thinking is a block with a signature before the text, and may be sent back."""
    answer = ask(at, thinking={"type": "enabled", "budget_tokens": 1024})
    equal([block["type"] for block in answer["content"]], ["thinking", "text"], "the blocks")
    expect(answer["content"][0]["signature"], "there is no signature")
    again = [*HELLO, {"role": "assistant", "content": answer["content"]}, *HELLO]
    redacted = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}],
    }
    for turns in (again, [*HELLO, redacted, *HELLO]):
        equal(ask(at, messages=turns)["content"][0]["text"], GREETING, "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """In a stream thinking ends with its signature."""
    events = stream(at, chat_template_kwargs=THINKS)
    kinds = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta" and e["index"] == 0]
    equal(kinds[-1], "signature_delta", "the last delta")


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """A final assistant turn is continued."""
    turns = [*HELLO, {"role": "assistant", "content": "<|plain|>Hello there"}]
    equal(ask(at, messages=turns)["content"][0]["text"], ", dear friend!", "the text")


@cases.add(f"{LLAMA}; {ANTHROPIC}")
def _(at: Servers) -> None:
    """Missing messages and max_tokens are rejected, in Anthropic's format."""
    for asked in ({"max_tokens": 5}, {"messages": HELLO}):
        reply = at.chat.post(MESSAGES, **asked)
        equal(
            (reply.status, reply.json["type"], reply.json["error"]["type"]),
            (400, "error", "invalid_request_error"),
            "it",
        )


@cases.add(LLAMA, why="there is nothing to answer; Anthropic's API rejects it too")
def _(at: Servers) -> None:
    """An empty list of messages is answered."""
    ask(at, messages=[])


@cases.add(ANTHROPIC)
def _(at: Servers) -> None:
    """Query parameters such as ?beta=true and version and beta headers are ignored."""
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "anthropic-beta": "x-2025"}
    body = json.dumps({"messages": HELLO, "max_tokens": 5}).encode()
    at.chat.send("POST", f"{MESSAGES}?beta=true", body, headers).ok()


@cases.add(LLAMA, why="only text is read here")
def _(at: Servers) -> None:
    """An image in a user's turn is read."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    ask(at, messages=[{"role": "user", "content": [image]}])
