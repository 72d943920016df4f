"""Sampling: seeds, several choices, stops, penalties, biases, filters."""

from __future__ import annotations

from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.requests import CHAT, ENDLESS, GREETING, HELLO, PROMPT, TEXT, content_of

cases = Cases("Sampling")
LLAMA, VLLM, TEXTS = "llama.cpp test_completion", "vLLM test_chat", "vLLM test_completion"


def texts(at: Servers, **asked: Any) -> list[str]:
    """Returns the tiny pair's choices."""
    answer = at.pair.json(TEXT, **{"prompt": PROMPT, "max_tokens": 12, **asked})
    return [choice["text"] for choice in answer["choices"]]


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """The same seed gives the same text."""
    expect(texts(at, seed=42, temperature=1.0) == texts(at, seed=42, temperature=1.0), "it does not")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """Other seeds give other texts."""
    found = {texts(at, seed=seed, temperature=1.0)[0] for seed in range(4)}
    equal(len(found), 4, "the number of texts")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """At temperature 0 the seed does not matter."""
    equal(texts(at, seed=1, temperature=0), texts(at, seed=2, temperature=0), "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """The prompt cache does not change the text."""
    first = texts(at, seed=42, temperature=1.0, prompt="class Cache:")
    equal(texts(at, seed=42, temperature=1.0, prompt="class Cache:"), first, "the second text")


@cases.add("mlx-lm test_server")
def _(at: Servers) -> None:
    """mlx-lm's fields together, twice: temperature, top_p, repetition_penalty and its context, seed, stop."""
    asked = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "repetition_context_size": 20, "seed": 999}
    expect(texts(at, **asked, stop="stop sequence") == texts(at, **asked, stop="stop sequence"), "the texts differ")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A seed beyond 64 bits is rejected."""
    for seed in (-(2**63) - 1, 2**63):
        refused(at.chat.post(CHAT, messages=HELLO, seed=seed), "seed")


@cases.add("llama.cpp's README", why="a seed is a whole number from 0 up; leave it out for a random one")
def _(at: Servers) -> None:
    """A seed of -1 is random."""
    at.chat.json(CHAT, messages=HELLO, seed=-1)


@cases.add(f"{VLLM}; llama.cpp test_chat_completion")
def _(at: Servers) -> None:
    """n choices have their own indices and texts."""
    answer = at.pair.json(CHAT, messages=[{"role": "user", "content": PROMPT}], n=3, temperature=1.0, max_tokens=8)
    equal([choice["index"] for choice in answer["choices"]], [0, 1, 2], "the indices")
    expect(len({choice["message"]["content"] for choice in answer["choices"]}) > 1, "they are all the same")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """n with a seed gives the same choices again."""
    expect(texts(at, n=2, seed=42, temperature=0.8) == texts(at, n=2, seed=42, temperature=0.8), "the texts differ")


@cases.add("OpenAI's reference; vLLM test_serving_chat")
def _(at: Servers) -> None:
    """n of 0 is refused."""
    refused(at.chat.post(CHAT, messages=HELLO, n=0), "n:")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """Of several prompts with n choices each, those of one prompt follow one another."""
    found = texts(at, prompt=[PROMPT, PROMPT], n=2, seed=1, temperature=1.0)
    expect(found[:2] == found[2:] and found[0] != found[1], f"the texts are {found}")


@cases.add(TEXTS, why="beam search is not supported; `best_of` selects among complete texts")
def _(at: Servers) -> None:
    """use_beam_search searches several texts at once."""
    texts(at, use_beam_search=True, n=2)


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """best_of generates several texts and returns the likeliest; usage counts all of them."""
    answer = at.pair.json(TEXT, prompt=PROMPT, best_of=3, n=1, temperature=1.0, max_tokens=4)
    equal((len(answer["choices"]), answer["usage"]["completion_tokens"]), (1, 12), "choices and tokens")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """A stop string ends the text before it, with the reason 'stop'."""
    choice = at.chat.json(CHAT, messages=HELLO, stop=", dear")["choices"][0]
    equal((choice["message"]["content"], choice["finish_reason"]), ("Hello there", "stop"), "text and reason")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """Of several stop strings, the first that occurs ends the text."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO, stop=["friend", "there", "zzz"])), "Hello ", "the text")


@cases.add("llama.cpp test_completion; vLLM test_stop_string_while_stop_model_terminates")
def _(at: Servers) -> None:
    """A stop string that spans tokens is never sent in part."""
    events = at.chat.stream(CHAT, messages=HELLO, stop=["there, de"])
    text = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
    equal(text, "Hello ", "the text")


@cases.add("vLLM's reference", why="the stop string is not part of the text, as in OpenAI's API")
def _(at: Servers) -> None:
    """include_stop_str_in_output keeps the stop string."""
    at.chat.json(CHAT, messages=HELLO, stop=["dear"], include_stop_str_in_output=True)


@cases.add("vLLM test_chat_stop_token_ids_validation", why="texts end at strings; logit_bias can forbid a token")
def _(at: Servers) -> None:
    """stop_token_ids ends the text at a token."""
    at.chat.json(CHAT, messages=HELLO, stop_token_ids=[7])


@cases.add("vLLM test_chat", why="ignore_eos with max_tokens gives an exact length")
def _(at: Servers) -> None:
    """min_tokens: the text does not end before."""
    at.chat.json(CHAT, messages=HELLO, min_tokens=10, max_tokens=10)


@cases.add("llama.cpp test_ignore_eos; vLLM's reference")
def _(at: Servers) -> None:
    """ignore_eos continues to max_tokens."""
    answer = at.chat.json(CHAT, messages=HELLO, ignore_eos=True, max_tokens=9)
    equal((answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]), (9, "length"), "the end")


@cases.add("OpenAI's reference; llama.cpp test_completion")
def _(at: Servers) -> None:
    """A logit bias of -100 excludes a token."""
    (token,) = at.chat.json("/tokenize", content=", dear", add_special=False)["tokens"]
    expect(
        ", dear" not in content_of(at.chat.json(CHAT, messages=HELLO, logit_bias={str(token): -100}, max_tokens=8)),
        "it came",
    )


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """A logit bias of 100 selects a token."""
    (token,) = at.chat.json("/tokenize", content="tick ", add_special=False)["tokens"]
    equal(
        content_of(at.chat.json(CHAT, messages=HELLO, logit_bias={str(token): 100}, max_tokens=2)),
        "tick tick ",
        "the text",
    )


@cases.add("vLLM test_chat_logit_bias_validation")
def _(at: Servers) -> None:
    """A logit bias of an unknown token is rejected, and the token named."""
    refused(at.chat.post(CHAT, messages=HELLO, logit_bias={"999999": 1.0}), "999999", "logit_bias")


@cases.add("vLLM test_chat_logit_bias_validation")
def _(at: Servers) -> None:
    """A logit bias with a non-numeric key is rejected, and the key named."""
    refused(at.chat.post(CHAT, messages=HELLO, logit_bias={"not_a_token_id": 50}), "not_a_token_id", "logit_bias")


@cases.add("vLLM test_chat_logit_bias_validation")
def _(at: Servers) -> None:
    """A logit bias with a non-numeric value is rejected."""
    refused(at.chat.post(CHAT, messages=HELLO, logit_bias={"1": "much"}), "logit_bias")


@cases.add(LLAMA, why="OpenAI's format is an object by token id; /tokenize returns ids")
def _(at: Servers) -> None:
    """A logit bias by text, or as a list of pairs."""
    at.chat.json(CHAT, messages=HELLO, logit_bias=[[" dear ", -100]])


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """A frequency penalty keeps a text from repeating itself."""
    asked = {"messages": HELLO, "chat_template_kwargs": ENDLESS, "max_tokens": 12}
    plain, less = (content_of(at.chat.json(CHAT, **asked, frequency_penalty=p)) for p in (0.0, 30.0))
    expect(plain.count("tick") > less.count("tick"), f"{less!r} repeats itself as {plain!r} does")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """A presence penalty does the same."""
    asked = {"messages": HELLO, "chat_template_kwargs": ENDLESS, "max_tokens": 12}
    plain, less = (content_of(at.chat.json(CHAT, **asked, presence_penalty=p)) for p in (0.0, 30.0))
    expect(plain.count("tick") > less.count("tick"), f"{less!r} repeats itself as {plain!r} does")


@cases.add("OpenAI's reference; llama.cpp's README")
def _(at: Servers) -> None:
    """Temperatures of 0 and 2 are accepted."""
    for temperature in (0, 2):
        texts(at, temperature=temperature)


@cases.add("vLLM's reference")
def _(at: Servers) -> None:
    """top_k of 1 is greedy at any temperature; -1 and 0 are off."""
    equal(texts(at, temperature=2, top_k=1), texts(at, temperature=0), "the text")
    for off in (-1, 0):
        equal(texts(at, temperature=1, seed=3, top_k=off), texts(at, temperature=1, seed=3), "the text")


@cases.add("vLLM's reference; llama.cpp's README")
def _(at: Servers) -> None:
    """min_p of 1 leaves the likeliest token only."""
    equal(texts(at, temperature=2, min_p=1.0), texts(at, temperature=0), "the text")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """top_p and temperature beyond their ranges are refused."""
    refused(at.chat.post(CHAT, messages=HELLO, top_p=1.5), "top_p")
    refused(at.chat.post(CHAT, messages=HELLO, temperature=-0.1), "temp")


@cases.add("llama.cpp test_speculative")
def _(at: Servers) -> None:
    """Drafts change the speed and not the text."""
    for temperature in (0, 1.0):
        found = [texts(at, seed=5, temperature=temperature, speculation={"mode": mode}) for mode in ("ar", "sd", "ssd")]
        expect(found[0] == found[1] == found[2], f"the texts are {found}")


@cases.add("mlx-lm TestServerWithDraftModel")
def _(at: Servers) -> None:
    """With a draft model a chat is answered, whole and streamed, and again from its cache."""
    for _ in range(2):
        equal(content_of(at.chat.json(CHAT, messages=HELLO)), GREETING, "the text")
    at.chat.stream(CHAT, messages=HELLO)
