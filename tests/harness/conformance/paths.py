"""Models, tokenization, health and metrics."""

from __future__ import annotations

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.requests import CHAT, GREETING, HELLO, MESSAGES, PROMPT, TOOL, content_of

cases = Cases("Models, tokens, health")
VLLM, LLAMA = "vLLM test_tokenization", "llama.cpp test_tokenize"


@cases.add("mlx-lm test_server; llama.cpp test_basic")
def _(at: Servers) -> None:
    """/v1/models is a list of models with id and time."""
    answer = at.chat.get("/v1/models").ok().json
    model = answer["data"][0]
    equal((answer["object"], model["object"], model["id"]), ("list", "model", at.chat.model), "the list")
    expect(model["created"] > 1_700_000_000 and model["owned_by"], f"the model is {model}")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """/v1/models/{name} is one of them, and 404 for another name."""
    equal(at.chat.get(f"/v1/models/{at.chat.model}").ok().json["id"], at.chat.model, "the id")
    refused(at.chat.get("/v1/models/nonsense"), "nonsense", status=404)


@cases.add("Anthropic's reference")
def _(at: Servers) -> None:
    """/v1/models has Anthropic's fields, too: type, display_name, created_at, has_more."""
    answer = at.chat.get("/v1/models?limit=1000").ok().json
    model = answer["data"][0]
    expect(model["type"] == "model" and model["display_name"] and model["created_at"], f"the model is {model}")
    equal((answer["has_more"], answer["first_id"]), (False, model["id"]), "the list")


@cases.add("vLLM test_basic")
def _(at: Servers) -> None:
    """/v1/models has the context length as max_model_len."""
    expect(at.chat.get("/v1/models").ok().json["data"][0]["max_model_len"] > 0, "it is not positive")


@cases.add("llama.cpp test_basic; mlx-lm test_server")
def _(at: Servers) -> None:
    """The paths exist without /v1, too."""
    equal(at.chat.get("/models").ok().json["data"][0]["id"], at.chat.model, "the id")
    equal(content_of(at.chat.json("/chat/completions", messages=HELLO)), GREETING, "the text")


@cases.add("llama.cpp test_basic; vLLM test_basic")
def _(at: Servers) -> None:
    """/health reports that the server is alive."""
    at.chat.get("/health").ok()


@cases.add("llama.cpp test_metrics; vLLM test_metrics")
def _(at: Servers) -> None:
    """/metrics is Prometheus's text, with prompt and generation tokens."""
    text = at.chat.get("/metrics").ok().body.decode()
    expect("prompt_tokens_total" in text and "generation_tokens_total" in text, "they are missing")


@cases.add(f"{LLAMA}; {VLLM}")
def _(at: Servers) -> None:
    """The tokens of a text concatenate to the text."""
    message = "What is the capital of France? 媽 🤗"
    tokens = at.pair.json("/tokenize", content=message, add_special=False)["tokens"]
    answer = at.pair.json("/detokenize", tokens=tokens)
    equal((answer["content"], answer["prompt"]), (message, message), "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """`prompt` is vLLM's name of `content`; the response has count and max_model_len."""
    answer = at.pair.json("/tokenize", prompt=PROMPT, add_special_tokens=False)
    equal(answer["tokens"], at.pair.json("/tokenize", content=PROMPT, add_special=False)["tokens"], "the tokens")
    equal((answer["count"], answer["max_model_len"] > 0), (len(answer["tokens"]), True), "count and context")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A conversation's tokens are those of its prompt, with tools and with the answer's beginning or without."""
    for tools in (None, [TOOL]):
        counted = at.chat.json("/tokenize", messages=HELLO, tools=tools)["count"]
        asked = at.chat.json(CHAT, messages=HELLO, tools=tools)["usage"]["prompt_tokens"]
        equal(counted, asked, "the count")
        bare = at.chat.json("/tokenize", messages=HELLO, tools=tools, add_generation_prompt=False)["count"]
        expect(bare < counted, f"{bare} is not less than {counted}")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """continue_final_message leaves the last message open."""
    turns = [*HELLO, {"role": "assistant", "content": "Sure,"}]
    asked = {"messages": turns, "add_generation_prompt": False}
    closed, opened = (at.chat.json("/tokenize", **asked, continue_final_message=c)["count"] for c in (False, True))
    expect(opened < closed, f"{opened} is not less than {closed}")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """return_token_strs returns each token's text."""
    answer = at.pair.json("/tokenize", prompt=PROMPT, add_special_tokens=False, return_token_strs=True)
    equal("".join(answer["token_strs"]), PROMPT, "the texts")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """with_pieces returns id and piece of each token, as bytes if the piece is not text."""
    message = "a test with unicode 媽 and emoji 🤗"
    pieces = at.pair.json("/tokenize", content=message, with_pieces=True, add_special=False)["tokens"]
    spelled = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    expect(spelled.decode() == message and all(isinstance(p["id"], int) for p in pieces), f"they are {pieces}")


@cases.add("vLLM test_tokenization")
def _(at: Servers) -> None:
    """Invalid tokens are rejected."""
    refused(at.pair.post("/detokenize", tokens=[999999]), "999999")


@cases.add("llama.cpp test_chat_completion")
def _(at: Servers) -> None:
    """/apply-template returns the prompt of a conversation."""
    prompt = at.chat.json("/apply-template", messages=HELLO)["prompt"]
    expect("hi" in prompt and prompt.endswith("<|plain|>"), f"it is {prompt!r}")


@cases.add("llama.cpp test_basic", why="/metrics and /ready show workers and rounds")
def _(at: Servers) -> None:
    """llama.cpp's own /props, /slots, /completion, /infill."""
    for path in ("/props", "/slots"):
        at.chat.get(path).ok()


@cases.add("vLLM test_embedding; llama.cpp test_embedding", why="only models that generate text are served")
def _(at: Servers) -> None:
    """/v1/embeddings."""
    at.chat.json("/v1/embeddings", input="hi")


@cases.add("vLLM test_rerank; llama.cpp test_rerank", why="only models that generate text are served")
def _(at: Servers) -> None:
    """/v1/rerank."""
    at.chat.json("/v1/rerank", query="hi", documents=["a"])


@cases.add("vLLM test_transcription", why="only models that generate text are served")
def _(at: Servers) -> None:
    """/v1/audio/transcriptions."""
    at.chat.json("/v1/audio/transcriptions")


@cases.add("Anthropic's reference", why="only models that generate text are served, one answer a request")
def _(at: Servers) -> None:
    """/v1/messages/batches."""
    at.chat.json(f"{MESSAGES}/batches", requests=[])
