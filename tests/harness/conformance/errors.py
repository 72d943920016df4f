"""Invalid requests, and their errors."""

from __future__ import annotations

from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.requests import CHAT, HELLO, MESSAGES, PROMPT, RESPONSES, TEXT, content_of

cases = Cases("Errors")
LLAMA = "llama.cpp test_chat_completion"


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """Messages that are missing, not a list, without a role or with content of a wrong type are refused."""
    wrong: tuple[Any, ...] = (
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [*HELLO, {}],
        [],
    )
    for messages in wrong:
        refused(at.chat.post(CHAT, messages=messages), "messages")


@cases.add(LLAMA, why="a template may take it, and clients of agents send it")
def _(at: Servers) -> None:
    """Two assistant turns in a row at the end are refused."""
    turn = {"role": "assistant", "content": "test"}
    refused(at.chat.post(CHAT, messages=[*HELLO, turn, turn]))


@cases.add("vLLM test_non_object_body_validation")
def _(at: Servers) -> None:
    """A body that is not a JSON object is a 400."""
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        for body in (b"[]", b"null", b'"x"', b"{", b"", b"\xff"):
            reply = at.chat.send("POST", path, body)
            expect(reply.status == 400 and reply.message, f"{body!r} at {path} is {reply.status}: {reply.message!r}")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """An error has message, type, param and code; param names the field."""
    error = at.chat.post(CHAT, messages=HELLO, temperature="hot").json["error"]
    equal((set(error), error["type"]), ({"message", "type", "param", "code"}, "invalid_request_error"), "the error")
    equal(error["param"], "temperature", "param")


@cases.add("vLLM test_basic; OpenAI's reference")
def _(at: Servers) -> None:
    """A model that is not served is a 404 with OpenAI's code."""
    reply = at.chat.post(CHAT, model="nonsense", messages=HELLO)
    refused(reply, "nonsense", status=404)
    equal(reply.json["error"]["code"], "model_not_found", "the code")


@cases.add(
    "llama.cpp test_chat_completion; mlx-lm's server",
    why="one model is served; --served-model-name gives it more names",
)
def _(at: Servers) -> None:
    """Any model's name is answered by the one that is served."""
    at.chat.json(CHAT, model="gpt-3.5-turbo-instruct", messages=HELLO)


@cases.add("vLLM's and llama.cpp's practice")
def _(at: Servers) -> None:
    """Unknown fields are ignored."""
    at.chat.json(CHAT, messages=HELLO, brand_new={"of": 2027})


@cases.add("llama.cpp's practice", why="the answer would not be what the request asks for")
def _(at: Servers) -> None:
    """Fields of unsupported samplers, such as mirostat, are ignored."""
    at.chat.json(CHAT, messages=HELLO, mirostat=2)


@cases.add("the practice of Anthropic's runners of tools")
def _(at: Servers) -> None:
    """`thread` is rejected with the error code on which clients retry without it."""
    reply = at.chat.post(MESSAGES, messages=HELLO, max_tokens=5, thread={"type": "create"})
    refused(reply, "thread")
    equal(reply.json["error"]["details"]["error_code"], "thread_unsupported_request", "the word")


@cases.add("LangChain's and LlamaIndex's practice")
def _(at: Servers) -> None:
    """Embeddings are a 404 with the reason."""
    refused(at.chat.post("/v1/embeddings", input="x"), "embeddings are not supported", status=404)


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """Fields without effect are accepted: user, metadata, store, service_tier, prediction and the like."""
    names = ("user", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity")
    more = {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "modalities": ["text"]}
    expect(content_of(at.chat.json(CHAT, messages=HELLO, **dict.fromkeys(names, "x"), **more)), "there is no text")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """null means omitted."""
    names = "temperature top_p max_tokens n stop seed stream tools response_format logprobs logit_bias presence_penalty"
    at.chat.json(CHAT, messages=HELLO, **dict.fromkeys(names.split()), frequency_penalty=None, stream_options=None)


@cases.add("OpenAI's reference", why="audio output is not supported")
def _(at: Servers) -> None:
    """modalities with audio."""
    at.chat.json(CHAT, messages=HELLO, modalities=["text", "audio"])


@cases.add("vLLM test_chat_completion")
def _(at: Servers) -> None:
    """max_tokens of 0 and of less than -1 are refused."""
    for most in (0, -2):
        refused(at.chat.post(CHAT, messages=HELLO, max_tokens=most), "max_tokens")


@cases.add("llama.cpp test_chat_completion; vLLM test_completion_error")
def _(at: Servers) -> None:
    """A conversation longer than the context is refused, whole and streamed, with both numbers."""
    talk = [{"role": "user", "content": "What is the best book"}] * 400
    for stream in (False, True):
        reply = at.pair.post(CHAT, messages=talk, stream=stream)
        refused(reply, "maximum context length is")
        equal(reply.json["error"]["code"], "context_length_exceeded", "the code")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """An unknown path is a 404 and a wrong method a 405, in the API's format."""
    refused(at.chat.get("/v1/nothing"), "", status=404)
    wrong = at.chat.get(CHAT)
    expect(wrong.status == 405 and wrong.message and wrong.headers.get("allow") == "POST", f"it is {wrong}")


@cases.add("OpenAI's reference; Anthropic's reference")
def _(at: Servers) -> None:
    """Every response, errors too, has a request id; a given one is returned."""
    reply = at.chat.send("GET", "/v1/models", headers={"x-request-id": "mine-1"})
    equal(reply.headers["x-request-id"], "mine-1", "the id")
    expect(at.chat.post(CHAT).headers["x-request-id"].startswith("req_"), "there is none")


@cases.add("llama.cpp test_security")
def _(at: Servers) -> None:
    """Another site's page may not ask: no CORS headers unless the site is named."""
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    reply = at.chat.send("OPTIONS", CHAT, headers=asked)
    expect("access-control-allow-origin" not in reply.headers, "it may")


@cases.add("vLLM test_shutdown; llama.cpp test_completion")
def _(at: Servers) -> None:
    """The server keeps working after rejected and failed requests."""
    at.pair.post(TEXT, prompt="x " * 5000)
    at.pair.json(TEXT, prompt=PROMPT)
