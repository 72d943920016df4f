"""Text completions: prompts as text and as tokens, several prompts, echo, and invalid prompts."""

from __future__ import annotations

from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.requests import PROMPT, TEXT

cases = Cases("Completions")
VLLM, LLAMA = "vLLM test_completion", "llama.cpp test_completion"


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A full response has an id, text, usage with cached tokens, and a finish reason."""
    answer = at.pair.json(TEXT, prompt=PROMPT, max_tokens=5, temperature=0)
    expect(answer["id"].startswith("cmpl-") and answer["object"] == "text_completion", "id or object is wrong")
    choice, usage = answer["choices"][0], answer["usage"]
    expect(choice["text"] and choice["finish_reason"] == "length", f"the choice is {choice}")
    equal(usage["total_tokens"], usage["prompt_tokens"] + 5, "the total")
    expect(isinstance(usage["prompt_tokens_details"]["cached_tokens"], int), "cached_tokens is not a number")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """A prompt of token ids equals its text."""
    tokens = at.pair.json("/tokenize", content=PROMPT)["tokens"]
    texts = [at.pair.json(TEXT, prompt=p, max_tokens=8)["choices"][0]["text"] for p in (PROMPT, tokens)]
    equal(texts[1], texts[0], "the text")


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """Several prompts, of text and of tokens, are answered in their order."""
    tokens = at.pair.json("/tokenize", content=PROMPT)["tokens"]
    choices = at.pair.json(TEXT, prompt=[tokens, PROMPT], max_tokens=8)["choices"]
    equal([choice["index"] for choice in choices], [0, 1], "the indices")
    equal(choices[0]["text"], choices[1]["text"], "the first text")


@cases.add(LLAMA, why="OpenAI's prompts are one or the other")
def _(at: Servers) -> None:
    """Text and token ids are mixed in one prompt."""
    at.pair.json(TEXT, prompt=[1, 2, PROMPT, 3], max_tokens=2)


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """Without max_tokens 16 tokens are generated."""
    equal(at.pair.json(TEXT, prompt=PROMPT)["usage"]["completion_tokens"], 16, "the number")


@cases.add("vLLM test_chat_echo")
def _(at: Servers) -> None:
    """echo puts the prompt before the text."""
    texts = [at.pair.json(TEXT, prompt=PROMPT, max_tokens=5, echo=e)["choices"][0]["text"] for e in (True, False)]
    equal(texts[0], PROMPT + texts[1], "the text")


@cases.add("vLLM test_chat_echo")
def _(at: Servers) -> None:
    """max_tokens of 0 with echo returns only the prompt."""
    equal(at.pair.json(TEXT, prompt=PROMPT, max_tokens=0, echo=True)["choices"][0]["text"], PROMPT, "the text")


@cases.add("vLLM test_prompt_validation")
def _(at: Servers) -> None:
    """An empty prompt, an empty list and null are refused."""
    wrong: tuple[Any, ...] = ("", [], None, [[]])
    for prompt in wrong:
        refused(at.pair.post(TEXT, prompt=prompt), "prompt")


@cases.add("vLLM test_prompt_validation")
def _(at: Servers) -> None:
    """A token that the vocabulary does not have is refused, and named."""
    refused(at.pair.post(TEXT, prompt=[999999], max_tokens=5), "999999")


@cases.add("llama.cpp test_completion; vLLM test_completion_error")
def _(at: Servers) -> None:
    """A prompt longer than the context is refused, with both numbers and OpenAI's code."""
    reply = at.pair.post(TEXT, prompt=[5] * 1024, max_tokens=5)
    refused(reply, "1024 tokens", "maximum context length is")
    equal(reply.json["error"]["code"], "context_length_exceeded", "the code")


@cases.add("llama.cpp test_ctx_shift")
def _(at: Servers) -> None:
    """More max_tokens than the context has room for are refused, or the text is cut off there."""
    reply = at.pair.post(TEXT, prompt=[5] * 1010, max_tokens=100_000, ignore_eos=True)
    if reply.status == 400:
        refused(reply, "tokens")
    else:
        equal(reply.ok().json["choices"][0]["finish_reason"], "length", "the reason")


@cases.add("llama.cpp test_ctx_shift", why="a truncated prompt would change the answer; send a shorter one")
def _(at: Servers) -> None:
    """A prompt that is too long is truncated (context_shift, truncate_prompt_tokens)."""
    at.pair.json(TEXT, prompt=[5] * 2000, truncate_prompt_tokens=4)


@cases.add("OpenAI's reference", why="the models served continue a text and don't support fill-in-the-middle")
def _(at: Servers) -> None:
    """suffix: the text fits before it."""
    at.pair.json(TEXT, prompt="def f(", suffix="return 1", max_tokens=5)


@cases.add("vLLM test_return_token_ids")
def _(at: Servers) -> None:
    """return_token_ids adds token ids to the text, streamed or not; a client can continue from them."""
    asked: dict[str, Any] = {"max_tokens": 8, "seed": 3, "temperature": 0.8, "return_token_ids": True}
    tokens = at.pair.json("/tokenize", content=PROMPT)["tokens"]
    whole = at.pair.json(TEXT, prompt=tokens, **asked)["choices"][0]["token_ids"]
    events = at.pair.stream(TEXT, prompt=tokens, **asked)
    equal([one for event in events for one in event["choices"][0].get("token_ids", ())], whole, "what is streamed")
    rest = at.pair.json(TEXT, prompt=tokens + whole[:5], **{**asked, "max_tokens": 3})["choices"][0]["token_ids"]
    equal(rest, whole[5:], "what follows")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """best_of less than n, and best_of in a stream, are refused."""
    refused(at.pair.post(TEXT, prompt=PROMPT, best_of=1, n=2), "best_of")
    refused(at.pair.post(TEXT, prompt=PROMPT, best_of=2, stream=True), "best_of")


@cases.add("vLLM test_chat")
def _(at: Servers) -> None:
    """Text of any script arrives intact, whatever bytes its tokens are."""
    events = at.chat.stream(TEXT, prompt="x", grammar='root ::= "媽🤗é"', max_tokens=40)
    equal("".join(event["choices"][0]["text"] for event in events), "媽🤗é", "the text")
