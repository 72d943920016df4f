"""Chat completions: roles, parts, templates, and what a whole answer has."""

from __future__ import annotations

from tests.harness.conformance.case import Cases, Servers, equal, expect
from tests.harness.conformance.requests import (
    CHAT,
    ENDLESS,
    GREETING,
    HELLO,
    THINKS,
    assistant_call,
    content_of,
    result,
)

cases = Cases("Chat completions")
LLAMA, VLLM, MLX, OPENAI = (
    "llama.cpp test_chat_completion",
    "vLLM test_chat",
    "mlx-lm test_server",
    "OpenAI's reference",
)


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A full response has an id, object, fingerprint, model, usage and finish reason."""
    answer = at.chat.json(CHAT, model=at.chat.model, messages=HELLO)
    expect(answer["id"].startswith("chatcmpl-"), f"the id is {answer['id']}")
    equal(answer["object"], "chat.completion", "the object")
    equal(answer["model"], at.chat.model, "the model")
    expect(answer["system_fingerprint"] and answer["created"] > 1_700_000_000, "fingerprint or time is missing")
    equal(answer["choices"][0]["message"]["role"], "assistant", "the role")
    equal((content_of(answer), answer["choices"][0]["finish_reason"]), (GREETING, "stop"), "text and reason")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """Usage has prompt, completion and total tokens."""
    usage = at.chat.json(CHAT, messages=HELLO, max_tokens=3)["usage"]
    equal(usage["completion_tokens"], 3, "the count")
    counted = at.chat.json("/tokenize", messages=HELLO)["count"]
    equal((usage["prompt_tokens"], usage["total_tokens"]), (counted, counted + 3), "prompt and total")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """An answer cut off by max_tokens has finish reason 'length'."""
    choice = at.chat.json(CHAT, messages=HELLO, max_tokens=2)["choices"][0]
    equal((choice["message"]["content"], choice["finish_reason"]), ("Hello there", "length"), "text and reason")


@cases.add(OPENAI)
def _(at: Servers) -> None:
    """max_completion_tokens is the newer name of max_tokens."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO, max_completion_tokens=2)), "Hello there", "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A request without a model uses the served one."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO)), GREETING, "the text")


@cases.add(f"{LLAMA}; {MLX}")
def _(at: Servers) -> None:
    """Text parts are concatenated, in user and system messages."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    system = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    whole = at.chat.json(CHAT, messages=[{"role": "system", "content": "Be kind."}, *HELLO])
    parted = at.chat.json(CHAT, messages=[system, {"role": "user", "content": parts}])
    equal(parted["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"], "the prompt")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A conversation of several turns is read completely."""
    talk = [*HELLO, {"role": "assistant", "content": GREETING}, {"role": "user", "content": "again"}]
    answer = at.chat.json(CHAT, messages=talk)
    expect(
        answer["usage"]["prompt_tokens"] > at.chat.json(CHAT, messages=HELLO)["usage"]["prompt_tokens"],
        "the earlier turns are not in the prompt",
    )
    equal(content_of(answer), GREETING, "the text")


@cases.add(OPENAI)
def _(at: Servers) -> None:
    """The role 'developer' is treated as 'system'."""
    counts = [
        at.chat.json(CHAT, messages=[{"role": role, "content": "Be kind."}, *HELLO])["usage"]["prompt_tokens"]
        for role in ("developer", "system")
    ]
    equal(counts[0], counts[1], "the prompt")


@cases.add(MLX)
def _(at: Servers) -> None:
    """A tool call without content and its result are accepted."""
    equal(
        content_of(at.chat.json(CHAT, messages=[*HELLO, assistant_call(), result("5")])), "Sunny in Paris.", "the text"
    )


@cases.add(VLLM)
def _(at: Servers) -> None:
    """Unknown fields of a message are ignored."""
    at.chat.json(CHAT, messages=[{"role": "user", "content": "hi", "extra_field": "0"}])


@cases.add(VLLM, why="the API defines the roles; what a template does with another is undefined")
def _(at: Servers) -> None:
    """A custom role is passed to the template."""
    at.chat.json(CHAT, messages=[{"role": "my-custom-role", "content": "hi"}])


@cases.add("vLLM test_chat_echo", why="the prompt of a chat is the template's; completions have `echo`")
def _(at: Servers) -> None:
    """`echo` repeats the last message before the answer."""
    at.chat.json(CHAT, messages=HELLO, echo=True)


@cases.add(f"{LLAMA}; vLLM test_chat_template")
def _(at: Servers) -> None:
    """A final assistant message is continued if requested."""
    talk = [*HELLO, {"role": "assistant", "content": "<|plain|>Hello there"}]
    answer = at.chat.json(CHAT, messages=talk, continue_final_message=True, add_generation_prompt=False)
    equal(content_of(answer), ", dear friend!", "the text")


@cases.add("llama.cpp test_template; vLLM test_chat_template")
def _(at: Servers) -> None:
    """chat_template_kwargs reach the template."""
    answer = at.chat.json(CHAT, messages=HELLO, chat_template_kwargs=ENDLESS, max_tokens=4)
    equal(content_of(answer), "tick tock tack tick ", "the text")


@cases.add("llama.cpp test_template; vLLM test_include_reasoning")
def _(at: Servers) -> None:
    """Thinking is in reasoning_content, not in content."""
    message = at.chat.json(CHAT, messages=HELLO, chat_template_kwargs=THINKS)["choices"][0]["message"]
    equal((message["reasoning_content"].strip(), message["content"]), ("Hmm, let me see.", "It is four."), "the parts")


@cases.add("vLLM's chat completions")
def _(at: Servers) -> None:
    """A reasoning_effort makes the model think, and "none" does not."""
    for effort, expected in (("low", "It is four."), ("none", GREETING)):
        equal(content_of(at.chat.json(CHAT, messages=HELLO, reasoning_effort=effort)), expected, "the text")


@cases.add("vLLM test_chat_with_tool_reasoning")
def _(at: Servers) -> None:
    """A message with earlier thinking is accepted, under both field names."""
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "Four.", name: "Hmm."}
        equal(content_of(at.chat.json(CHAT, messages=[*HELLO, turn, *HELLO])), GREETING, "the text")


@cases.add("vLLM test_vision", why="only text is read here")
def _(at: Servers) -> None:
    """An image in a message is accepted."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    at.chat.json(CHAT, messages=[{"role": "user", "content": [image]}])


@cases.add("llama.cpp test_chat_completion")
def _(at: Servers) -> None:
    """A response has timings of prompt and generation."""
    times = at.chat.json(CHAT, messages=HELLO)["timings"]
    for name in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"):
        expect(isinstance(times[name], int | float), f"{name} is {times.get(name)!r}")


@cases.add("mlx-lm test_server; vLLM test_cache_accounting")
def _(at: Servers) -> None:
    """The second request with the same prompt reports cached tokens."""
    at.chat.json(CHAT, messages=HELLO)
    usage = at.chat.json(CHAT, messages=HELLO)["usage"]
    expect(usage["prompt_tokens_details"]["cached_tokens"] > 0, "cached_tokens is 0")
