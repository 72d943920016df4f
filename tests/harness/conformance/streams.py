"""Streams: chunks of the text, first and last events, usage and timings."""

from __future__ import annotations

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.http_client import choices
from tests.harness.conformance.requests import CHAT, ENDLESS, GREETING, HELLO, PROMPT, TEXT

cases = Cases("Streams")
LLAMA, VLLM = "llama.cpp test_chat_completion", "vLLM test_chat"
USAGE = {"include_usage": True}


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """The chunks concatenate to the full text."""
    events = at.chat.stream(CHAT, messages=HELLO)
    equal("".join(choice["delta"].get("content") or "" for choice in choices(events)), GREETING, "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """Only the first event has the role."""
    deltas = [choice["delta"] for choice in choices(at.chat.stream(CHAT, messages=HELLO))]
    equal([delta.get("role") for delta in deltas], ["assistant"] + [None] * (len(deltas) - 1), "the roles")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """All events are chat.completion.chunk with the same id, model and time."""
    events = at.chat.stream(CHAT, messages=HELLO)
    equal(
        len({(event["id"], event["model"], event["created"], event["object"]) for event in events}), 1, "their number"
    )
    equal(events[0]["object"], "chat.completion.chunk", "the object")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """Only a choice's last event has a finish reason, and it has no content."""
    events = list(choices(at.chat.stream(CHAT, messages=HELLO)))
    equal([choice["finish_reason"] for choice in events if choice["finish_reason"]], ["stop"], "the reasons")
    expect(events[-1]["finish_reason"] and not events[-1]["delta"].get("content"), "the last one has content")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """A stream is text/event-stream and ends with [DONE]."""
    reply = at.chat.post(CHAT, messages=HELLO, stream=True).ok()
    expect(reply.headers["content-type"].startswith("text/event-stream"), f"it is {reply.headers['content-type']}")
    equal(reply.lines("data")[-1], "[DONE]", "the last event")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """include_usage adds an event with usage and without choices."""
    *events, last = at.chat.stream(CHAT, messages=HELLO, stream_options=USAGE)
    equal(last["choices"], [], "the choices of the last")
    usage = last["usage"]
    equal(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "the total")
    expect(usage["completion_tokens"] == 5, f"completion_tokens is {usage['completion_tokens']}")
    expect(all(event.get("usage") is None for event in events), "others have it, too")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Without include_usage no event has the usage."""
    for options in ({"include_usage": False}, {}):
        events = at.chat.stream(CHAT, messages=HELLO, stream_options=options)
        expect(all(event.get("usage") is None and event["choices"] for event in events), "one has it")


@cases.add(VLLM, why="usage is sent once, at the end")
def _(at: Servers) -> None:
    """continuous_usage_stats: every event has the current usage."""
    options = {**USAGE, "continuous_usage_stats": True}
    events = at.chat.stream(CHAT, messages=HELLO, stream_options=options)
    expect(all(event.get("usage") for event in events), "only the last event has it")


@cases.add(f"{VLLM}; vLLM test_completion")
def _(at: Servers) -> None:
    """stream_options without stream is rejected."""
    refused(at.chat.post(CHAT, messages=HELLO, stream_options=USAGE), "stream_options")
    refused(at.pair.post(TEXT, prompt=PROMPT, stream_options={"include_usage": None}), "stream_options")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """The last event has timings, the first has none."""
    events = at.chat.stream(CHAT, messages=HELLO, stream_options=USAGE)
    expect(
        "timings" not in events[0] and events[-1]["timings"]["predicted_n"] == 5,
        "the timings are missing, or in the first event",
    )


@cases.add(LLAMA, why="progress comes as comments, which every client skips; the fields are llama.cpp's own")
def _(at: Servers) -> None:
    """timings_per_token and return_progress are accepted."""
    at.chat.stream(CHAT, messages=HELLO, timings_per_token=True, return_progress=True)


@cases.add("mlx-lm TestKeepalive")
def _(at: Servers) -> None:
    """Comments keep the connection alive while the prompt is read."""
    reply = at.chat.post(CHAT, messages=[{"role": "user", "content": "x" * 3000}], stream=True).ok()
    comments = [line for line in reply.body.decode().splitlines() if line.startswith(":")]
    expect(any("prompt" in line for line in comments), f"the comments are {comments[:3]}")


@cases.add("vLLM test_completion; llama.cpp test_completion")
def _(at: Servers) -> None:
    """A completion's chunks concatenate to its text, and the last has the finish reason."""
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    events = list(choices(at.pair.stream(TEXT, **asked)))
    equal("".join(c["text"] for c in events), at.pair.json(TEXT, **asked)["choices"][0]["text"], "the text")
    equal([c["finish_reason"] for c in events if c["finish_reason"]], ["length"], "the reasons")


@cases.add("vLLM test_completion")
def _(at: Servers) -> None:
    """Choices in a stream have an index, and each has a finish reason."""
    events = list(choices(at.pair.stream(TEXT, prompt=PROMPT, n=3, temperature=1.0, seed=42, max_tokens=6)))
    equal({choice["index"] for choice in events}, {0, 1, 2}, "the indices")
    equal(sum(choice["finish_reason"] is not None for choice in events), 3, "the number of ends")


@cases.add("vLLM test_completion")
def _(at: Servers) -> None:
    """Several prompts in a stream are distinguished by the choices' index."""
    events = list(choices(at.pair.stream(TEXT, prompt=[PROMPT, PROMPT], max_tokens=5)))
    texts = ["".join(c["text"] for c in events if c["index"] == index) for index in (0, 1)]
    expect(texts[0] == texts[1] != "", f"the texts are {texts}")


@cases.add(f"{LLAMA}; vLLM test_chat_error")
def _(at: Servers) -> None:
    """Errors have an HTTP status, for streams too."""
    refused(at.pair.post(TEXT, prompt="x " * 5000, stream=True), "maximum context length is")


@cases.add("vLLM test_chat")
def _(at: Servers) -> None:
    """An endless stream ends at max_tokens."""
    events = list(choices(at.chat.stream(CHAT, messages=HELLO, chat_template_kwargs=ENDLESS, max_tokens=9)))
    equal(events[-1]["finish_reason"], "length", "the reason")
