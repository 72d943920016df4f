"""Log-probabilities in chats and completions."""

from __future__ import annotations

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.http_client import choices
from tests.harness.conformance.requests import CHAT, FORM, HELLO, PROMPT, TEXT, content_of, schema_format

cases = Cases("Log-probabilities")
LLAMA, VLLM, TEXTS = "llama.cpp test_chat_completion", "vLLM test_chat", "vLLM test_completion"
TOKENS = [5, 6, 7, 8]


@cases.add(VLLM)
def _(at: Servers) -> None:
    """logprobs false: the answer has none."""
    equal(at.chat.json(CHAT, messages=HELLO, logprobs=False)["choices"][0]["logprobs"], None, "logprobs")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """top_logprobs of 0: each token's own, and no others."""
    found = at.chat.json(CHAT, messages=HELLO, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    equal([row["top_logprobs"] for row in found], [[]] * len(found), "the others")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """top_logprobs of 5: five with each token, all at most 0, the texts together the answer."""
    choice = at.pair.json(
        CHAT, messages=[{"role": "user", "content": PROMPT}], max_tokens=6, logprobs=True, top_logprobs=5
    )
    rows = choice["choices"][0]["logprobs"]["content"]
    equal([len(row["top_logprobs"]) for row in rows], [5] * 6, "their number")
    expect(
        all(row["logprob"] <= 0 and isinstance(row["bytes"], list) for row in rows), "one is above 0, or has no bytes"
    )
    equal("".join(row["token"] for row in rows), content_of(choice), "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """In a stream every token has its log-probability, in order."""
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    contents = [c["logprobs"]["content"] for c in choices(at.pair.stream(CHAT, **asked)) if c["logprobs"]]
    streamed = [row for content in contents for row in content]
    whole = at.pair.json(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    equal([row["token"] for row in streamed], [row["token"] for row in whole], "the tokens")
    expect(
        all(abs(a["logprob"] - b["logprob"]) < 1e-3 for a, b in zip(streamed, whole, strict=True)),
        "their values differ",
    )


@cases.add(VLLM)
def _(at: Servers) -> None:
    """top_logprobs above 20 are refused, streamed or not, and the server continues."""
    for stream in (False, True):
        refused(at.chat.post(CHAT, messages=HELLO, logprobs=True, top_logprobs=21, stream=stream), "top_logprobs")
    at.chat.json(CHAT, messages=HELLO)


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """top_logprobs without logprobs is refused."""
    refused(at.chat.post(CHAT, messages=HELLO, top_logprobs=2), "logprobs")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """With an output format too, none is below -9999."""
    asked = {"messages": HELLO, "response_format": schema_format(FORM), "logprobs": True, "top_logprobs": 5}
    rows = at.chat.json(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    expect(all(top["logprob"] >= -9999.0 for row in rows for top in row["top_logprobs"]), "one is")


@cases.add(VLLM, why="a text completion with echo and logprobs has them")
def _(at: Servers) -> None:
    """prompt_logprobs returns the prompt's log-probabilities."""
    at.chat.json(CHAT, messages=HELLO, prompt_logprobs=1)


@cases.add("vLLM test_return_tokens_as_token_ids", why="`bytes` tell exactly what a token is")
def _(at: Servers) -> None:
    """return_tokens_as_token_ids writes tokens as their ids."""
    at.chat.json(CHAT, messages=HELLO, logprobs=True, return_tokens_as_token_ids=True)


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """A completion without logprobs has none."""
    equal(at.pair.json(TEXT, prompt=TOKENS, max_tokens=5)["choices"][0]["logprobs"], None, "logprobs")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """logprobs of 0: each token's own, under its text."""
    found = at.pair.json(TEXT, prompt=TOKENS, max_tokens=5, logprobs=0)["choices"][0]["logprobs"]
    equal([len(top) for top in found["top_logprobs"]], [1] * 5, "their number")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """logprobs of 5: five or six at each place."""
    found = at.pair.json(TEXT, prompt=TOKENS, max_tokens=5, logprobs=5)["choices"][0]["logprobs"]
    expect(all(4 <= len(top) <= 6 for top in found["top_logprobs"]), f"{[len(top) for top in found['top_logprobs']]}")


@cases.add("vLLM test_completion_text_offset")
def _(at: Servers) -> None:
    """text_offset is the start of each token's text."""
    choice = at.pair.json(TEXT, prompt=PROMPT, max_tokens=6, logprobs=1)["choices"][0]
    found = choice["logprobs"]
    begins = [len("".join(found["tokens"][:count])) for count in range(len(found["tokens"]))]
    equal((found["text_offset"], "".join(found["tokens"])), (begins, choice["text"]), "offsets and text")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """logprobs above 20 are refused for completions, too."""
    refused(at.pair.post(TEXT, prompt=TOKENS, logprobs=21), "logprobs")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """echo with logprobs includes the prompt's tokens, of which the first has null."""
    choice = at.pair.json(TEXT, prompt=TOKENS, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    found = choice["logprobs"]
    values = found["token_logprobs"]
    equal((len(values), values[0], found["top_logprobs"][0]), (len(TOKENS) + 2, None, None), "the prompt's")
    expect(all(value <= 0 for value in values[1:]), f"{values}")
    equal("".join(found["tokens"]), choice["text"], "the text")
