"""The APIs with their own clients and real clusters: a scripted chat model and a plain pair."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from outrider import EndpointError, Grammar, SamplingParams, WorkerError
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine import http_process
from outrider.orchestrator.machine.http_process import HttpListener
from outrider.server.endpoints import responses
from outrider.server.endpoints.responses import ResponsesRequest
from outrider.server.mapping import derive_seed
from outrider.server.model.served import load_served_model
from tests.harness.scripted_model import ANSWER, PLAIN, text_of
from tests.pairwise import matrix
from tests.server.running_server import STREAMS, TRIES, RunningServer, wait_until_up
from tests.suspend import pid_of, throttled

if TYPE_CHECKING:
    import anthropic
    import openai

PROMPT = "def fibonacci(n):"
PLAIN_PROMPT: Any = [{"role": "user", "content": PROMPT}]
MODEL = "plain"
HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": WEATHER}
PARIS = {"city": "Paris"}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=200)


def events(server: RunningServer, path: str, **body: Any) -> list[Any]:
    """The data of a stream's events."""
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=200) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- the text is the Python client's --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_text_equals_that_of_the_python_client(pair: RunningServer, path: str, stream: bool) -> None:
    """A model without a chat template reads the message itself."""
    sampling = SamplingParams(max_tokens=24, temp=0.8, top_p=0.95, seed=11, repetition_penalty=1.1)
    expected = pair.client.generate(PROMPT, sampling, mode="ar")
    fields = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    asked = {**fields, "max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}
    if stream:
        received = events(pair, path, **asked)
        choices = [choice for event in received for choice in event["choices"]]
        text = "".join(c.get("text", "") or c.get("delta", {}).get("content", "") for c in choices)
        last = received[-1]
    else:
        last = post(pair, path, **asked).json()
        text = last["choices"][0].get("text") or last["choices"][0]["message"]["content"]
    assert text == expected.text
    assert last["choices"][0]["finish_reason"] == "length"
    times = last["timings"]
    assert times["predicted_n"] == 24 and times["prompt_n"] + times["cache_n"] == expected.prompt_tokens
    assert last["outrider"]["seed"] == 11


def test_choices_have_their_own_seeds_in_the_order_of_prompts(pair: RunningServer) -> None:
    asked = post(pair, "/v1/completions", prompt=[PROMPT, [5, 6, 7]], n=2, seed=3, temperature=1.0, max_tokens=6).json()
    seeds = [derive_seed(3, index) for index in range(2)]
    sampling = [SamplingParams(max_tokens=6, temp=1.0, seed=seed) for seed in seeds]
    expected = [pair.client.generate(prompt, one).text for prompt in (PROMPT, [5, 6, 7]) for one in sampling]
    assert [choice["text"] for choice in asked["choices"]] == expected
    assert [choice["index"] for choice in asked["choices"]] == [0, 1, 2, 3] and seeds[0] == 3 != seeds[1]
    assert asked["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_speculation_settings_do_not_change_the_text(pair: RunningServer, mode: str) -> None:
    speculation = {"mode": mode, "num_draft_tokens": 3, "branches": 8}
    answer = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=16, speculation=speculation).json()
    assert answer["choices"][0]["text"] == pair.client.generate(PROMPT, SamplingParams(max_tokens=16)).text
    assert answer["outrider"]["mode"] == mode
    if mode != "ssd":  # SSD drafts only what it has time for
        assert (answer["timings"]["draft_n"] > 0) == (mode == "sd")


def test_stop_echo_and_logit_bias_are_applied(pair: RunningServer) -> None:
    whole = pair.client.generate(PROMPT, SamplingParams(max_tokens=24)).text
    stopped = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=24, stop=[whole[9:12]], echo=True).json()
    assert stopped["choices"][0]["text"] == PROMPT + whole[: whole.index(whole[9:12])]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    biased = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=3, logit_bias={"77": 1000}).json()
    assert biased["choices"][0]["text"] == pair.client.generate(
        PROMPT, SamplingParams(max_tokens=3, logit_bias=((77, 1000.0),))
    ).text  # fmt: skip


# --- forms and log-probabilities ------------------------------------------------------------------------------------


FORM = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta"]}, "sure": {"type": "boolean"}, "size": {"enum": [1, 20, 300]}},
    "required": ["kind", "sure", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
IN_FORM: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_schema_constrained_text_is_valid_and_drafted(
    pair: RunningServer, other_ai: openai.OpenAI, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "messages": PLAIN_PROMPT, "response_format": IN_FORM, "temperature": 0.9, "seed": 5}
    asked["extra_body"] = {"speculation": {"mode": "sd"}}  # which always drafts, even if that is slower
    if stream:
        chunks = list(other_ai.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish, timings = chunks[-1].choices[0].finish_reason, chunks[-1].model_extra["timings"]
    else:
        answer = other_ai.chat.completions.create(**asked)
        text = answer.choices[0].message.content or ""
        finish, timings = answer.choices[0].finish_reason, answer.model_extra["timings"]
    sampling = SamplingParams(temp=0.9, seed=5, grammar=Grammar.json_schema(FORM))
    assert text == pair.client.generate(PROMPT, sampling, mode="ar").text and finish == "stop"
    assert set(json.loads(text)) == {"kind", "sure", "size"} and timings["draft_n"] > 0


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": FORM},
        {"structured_outputs": {"json": FORM}},
        {"response_format": {"type": "json_object", "schema": FORM}},
        {"grammar": 'root ::= "{" "\\"size\\":" [0-9] "}"'},
        {"guided_regex": r"\{\"size\":[1-9]\}"},
        {"regex": r"\{\"size\":[1-9]\}"},
        {"guided_json": FORM, "structured_outputs": {"json": FORM}},
        {"ebnf": 'root ::= "{" "\\"size\\":" [1-9] "}"'},
    ],
    ids=["guided_json", "structured_outputs", "json_object", "grammar", "guided_regex", "regex", "same", "ebnf"],
)
def test_output_format_is_accepted_under_every_field_name(pair: RunningServer, field: dict[str, Any]) -> None:
    answer = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=64, **field).json()
    assert "size" in json.loads(answer["choices"][0]["text"])


def test_responses_and_messages_apis_support_output_formats(pair: RunningServer, other_ai: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "form", "schema": FORM}}
    assert json.loads(other_ai.responses.create(model=MODEL, input=PROMPT, text=text).output_text)["kind"]
    config: Any = {"format": {"type": "json_schema", "schema": FORM}}
    answer = post(pair, "/v1/messages", messages=PLAIN_PROMPT, max_tokens=64, output_config=config).json()
    assert json.loads(answer["content"][0]["text"])["kind"] and answer["stop_reason"] == "end_turn"


def test_content_of_a_formatted_answer_excludes_thinking(chat: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 4}}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = post(chat, "/v1/chat/completions", messages=HELLO, response_format=form, **thinking).json()
    assert message["choices"][0]["message"]["content"] == "4"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_equal_those_of_the_python_client(
    pair: RunningServer, other_ai: openai.OpenAI, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "messages": PLAIN_PROMPT, "max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = list(other_ai.chat.completions.create(**asked, stream=True))
        content = [row for c in chunks if (given := c.choices[0].logprobs) for row in given.content or ()]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        choice = other_ai.chat.completions.create(**asked).choices[0]
        assert choice.logprobs is not None
        content, text = choice.logprobs.content or [], choice.message.content or ""
    expected = pair.client.generate(PROMPT, SamplingParams(max_tokens=24, logprobs=3)).logprobs or ()
    assert [row.logprob for row in content] == pytest.approx([row.logprob for row in expected], abs=1e-4)
    assert [[top.logprob for top in row.top_logprobs] for row in content] == [
        pytest.approx([value for _, value in row.top], abs=1e-4) for row in expected
    ]
    assert bytes(byte for row in content for byte in row.bytes or ()).decode() == text
    assert [row.token for row in content] == [bytes(row.bytes or ()).decode(errors="replace") for row in content]


def test_unlimited_completion_has_the_room_that_its_own_prompt_leaves(pair: RunningServer) -> None:
    asked: Any = {"prompt": [[5] * 1023, [5, 6, 7]], "max_tokens": -1, "regex": "[ab]{20}"}
    full, short = post(pair, "/v1/completions", return_token_ids=True, **asked).json()["choices"]
    assert len(full["token_ids"]) == 1 and full["finish_reason"] == "length"
    assert len(short["text"]) == 20 and short["finish_reason"] == "stop"


def test_echoed_prompt_has_the_logprobs_of_its_generation(pair: RunningServer) -> None:
    """As lm-evaluation-harness requests them: generated and echoed tokens have the same log-probabilities."""
    asked: Any = {"logprobs": 2, "return_token_ids": True}
    (first,) = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=24, **asked).json()["choices"]
    text = [*post(pair, "/tokenize", prompt=PROMPT).json()["tokens"], *first["token_ids"]]
    body = post(pair, "/v1/completions", prompt=[text, text[:1]], max_tokens=1, echo=True, **asked).json()
    whole, one = (choice["logprobs"] for choice in body["choices"])
    generated = first["logprobs"]
    count = len(generated["tokens"])
    assert whole["token_logprobs"][-count - 1 : -1] == pytest.approx(generated["token_logprobs"], abs=1e-4)
    assert whole["tokens"][-count - 1 : -1] == generated["tokens"]
    assert [set(top) for top in whole["top_logprobs"][-count - 1 : -1]] == [
        set(top) for top in generated["top_logprobs"]
    ]
    for found, tokens in ((whole, text), (one, text[:1])):
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert {len(rows) for rows in found.values()} == {len(tokens) + 1}
    starts = [*whole["text_offset"], len(body["choices"][0]["text"])]
    assert [body["choices"][0]["text"][a:b] for a, b in pairwise(starts)] == whole["tokens"]


def test_max_tokens_of_minus_1_sets_no_limit(chat: RunningServer, pair: RunningServer) -> None:
    """As in llama.cpp and LM Studio."""
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    ended = post(chat, "/v1/chat/completions", **conversation).json()
    for name in ("max_tokens", "max_completion_tokens"):
        assert post(chat, "/v1/chat/completions", **conversation, **{name: -1}).json()["choices"] == ended["choices"]
    whole = pair.client.generate(PROMPT, SamplingParams(max_tokens=60)).text
    (text,) = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=-1, temperature=0, stop=whole[-6:]).json()[
        "choices"
    ]
    assert text["finish_reason"] == "stop" and text["text"] == whole[: whole.index(whole[-6:])]


def test_echo_with_no_tokens_returns_and_scores_the_prompt_alone(pair: RunningServer) -> None:
    asked: Any = {"prompt": PROMPT, "echo": True}
    more = post(pair, "/v1/completions", max_tokens=1, logprobs=0, **asked).json()["choices"][0]["logprobs"]
    body = post(pair, "/v1/completions", max_tokens=0, logprobs=0, **asked).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"] == {name: rows[:-1] for name, rows in more.items()}
    assert body["usage"]["completion_tokens"] == 0
    starts = [*choice["logprobs"]["text_offset"], len(PROMPT)]  # the tokenizer's own first token has no text
    assert [PROMPT[a:b] for a, b in pairwise(starts)] == ["", *choice["logprobs"]["tokens"][1:]]
    events = post(pair, "/v1/completions", max_tokens=0, stream=True, **asked).text.split("\n\n")
    received = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(choice["text"] for event in received for choice in event["choices"]) == PROMPT


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_are_parallel_lists(other_ai: openai.OpenAI, stream: bool) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "logprobs": 2, "stop": ["zzz"]}
    if stream:
        choices = [chunk.choices[0] for chunk in other_ai.completions.create(**asked, stream=True)]
    else:
        choices = [other_ai.completions.create(**asked).choices[0]]
    lists = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for one in lists for token in one.tokens or ()]
    assert "".join(tokens) == "".join(choice.text for choice in choices) and len(tokens) == 12
    places = [place for one in lists for place in one.text_offset or ()]
    assert places == [len("".join(tokens[:count])) for count in range(12)]
    tops = [top for one in lists for top in one.top_logprobs or ()]
    values = [value for one in lists for value in one.token_logprobs or ()]
    assert all(top[token] == value for token, top, value in zip(tokens, tops, values, strict=True))


def test_best_of_returns_the_likeliest_texts(pair: RunningServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.2, "seed": 3}
    every = [
        pair.client.generate(PROMPT, SamplingParams(max_tokens=8, temp=1.2, seed=derive_seed(3, index), logprobs=0))
        for index in range(4)
    ]
    ranked = sorted(every, key=lambda one: sum(row.logprob for row in one.logprobs or ()) / 8, reverse=True)
    best = post(pair, "/v1/completions", **asked, best_of=4, n=2).json()
    assert [choice["text"] for choice in best["choices"]] == [one.text for one in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1] and best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 32


# --- where tokens came from, round by round -------------------------------------------------------------------------

DETAILS = {"origins": True, "rounds": True}


@matrix(path=["/v1/completions", "/v1/chat/completions"], stream=[False, True], mode=["ar", "sd", "ssd"])
def test_origins_and_rounds_agree_with_the_timings(pair: RunningServer, path: str, stream: bool, mode: str) -> None:
    fields = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": PLAIN_PROMPT}
    asked = {**fields, "max_tokens": 48, "temperature": 0.8, "seed": 2, "speculation": {**DETAILS, "mode": mode}}
    for _ in range(TRIES if mode == "sd" else 1):  # until a draft is in time
        received = events(pair, path, **asked) if stream else [post(pair, path, **asked).json()]
        if received[-1]["timings"]["draft_n_accepted"]:
            break
    choices = [choice for event in received for choice in event["choices"]]
    text = "".join(c.get("text") or (c.get("delta") or c.get("message", {})).get("content") or "" for c in choices)
    seen, times = [choice["speculation"] for choice in choices if "speculation" in choice], received[-1]["timings"]
    tokens = [token for one in seen for token in one.get("origins", ())]
    rounds = [record for one in seen for record in one.get("rounds", ())]
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) == times["predicted_n"] == sum(record["tokens"] for record in rounds) == 48
    drafted = sum(token["origin"] != "target" for token in tokens)
    assert drafted == times["draft_n_accepted"] == sum(record["accepted"] for record in rounds)
    assert [record["round"] for record in rounds] == list(range(times["rounds"]))
    assert sum(record["lookup"] in ("hit", "grown") for record in rounds) == times["cache_hits"]
    assert times["cache_hits"] == 0 or mode == "ssd"
    if mode != "ssd":  # SSD drafts only what it has time for
        assert (drafted > 0) == any(record["drafting"] for record in rounds) == (mode == "sd")


def test_times_of_rounds_are_on_one_clock(pair: RunningServer) -> None:
    """Verifies do not overlap, and a branch that hits was drafted before its verify began."""
    asked = {"prompt": PROMPT, "max_tokens": 48, "speculation": {**DETAILS, "mode": "ssd"}}

    def generate_rounds() -> list[Any]:
        found: list[Any] = post(pair, "/v1/completions", **asked).json()["choices"][0]["speculation"]["rounds"]
        return found

    rounds = generate_rounds()
    while not any(record["lookup"] == "hit" for record in rounds):  # nothing prepared came in time
        with throttled(pid_of(pair.client, "target")):
            rounds = generate_rounds()
    for before, after in pairwise(rounds):
        assert 0 <= ended(before["verify"]) <= after["verify"]["start_ms"]
    begun: dict[int, list[float]] = {}
    for work in (work for record in rounds for work in record["drafting"]):
        begun.setdefault(work["round"], []).append(work["start_ms"])
    hits = [record for record in rounds if record["lookup"] == "hit"]
    assert hits and all(min(begun[hit["round"] - 1]) < hit["verify"]["start_ms"] for hit in hits)


def ended(work: dict[str, float]) -> float:
    return work["start_ms"] + work["ms"]


def test_speculation_details_are_returned_only_on_request(pair: RunningServer) -> None:
    for asked in ({}, {"speculation": {"mode": "ssd"}}):
        answer = post(pair, "/v1/completions", prompt=PROMPT, max_tokens=4, **asked).json()
        assert "speculation" not in answer["choices"][0]


def test_each_choice_has_its_own_token_origins(pair: RunningServer) -> None:
    """A stop string is in no token's text; each of several choices has its own tokens and likeliest tokens."""
    whole = pair.client.generate(PROMPT, SamplingParams(max_tokens=24)).text
    asked: dict[str, Any] = {"max_tokens": 24, "speculation": {"origins": True}}
    stopped = post(pair, "/v1/completions", prompt=PROMPT, stop=[whole[9:12]], **asked).json()["choices"]
    two = post(pair, "/v1/completions", prompt=PROMPT, n=2, best_of=3, seed=1, temperature=1.0, **asked).json()[
        "choices"
    ]
    for choice in (*stopped, *two):
        assert "".join(token["text"] for token in choice["speculation"]["origins"]) == choice["text"]
        assert "rounds" not in choice["speculation"]
    assert two[0]["text"] != two[1]["text"]


# --- OpenAI's client ------------------------------------------------------------------------------------------------


def test_chat_uses_the_models_template(ai: openai.OpenAI, chat: RunningServer) -> None:
    answer = ai.chat.completions.create(model="chatty", messages=HELLO, max_completion_tokens=20)
    assert answer.choices[0].message.content == text_of(PLAIN) == chat.client.generate("hi").text
    assert answer.choices[0].finish_reason == "stop" and answer.model == "chatty"
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    again = ai.chat.completions.create(model="chatty", messages=parts)
    assert again.usage is not None and answer.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens == answer.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == again.model_extra["timings"]["cache_n"] > 0


def test_prompt_tokens_come_from_the_cache_or_are_written_to_it(chat: RunningServer) -> None:
    before = None
    for _ in range(2):
        usage = post(chat, "/v1/responses", input="what was read once is held").json()["usage"]
        details = usage["input_tokens_details"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]
        assert before is None or details["cached_tokens"] > before["cached_tokens"]
        before = details


def test_a_stream_ends_with_its_usage(ai: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(ai.chat.completions.create(model="chatty", messages=HELLO, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text_of(PLAIN)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_are_read(ai: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "chatty", "messages": HELLO, "tools": [TOOL]}
    if stream:
        chunks = list(ai.chat.completions.create(**asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        text, finish = "".join(delta.content or "" for delta in deltas), chunks[-1].choices[0].finish_reason
    else:
        answer = ai.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or ()
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", PARIS)
    assert text == "I look." and finish == "tool_calls"
    function = {"name": call.function.name, "arguments": call.function.arguments}
    called = {"role": "assistant", "content": text,
              "tool_calls": [{"id": call.id, "type": "function", "function": function}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": call.id, "content": "22 C"}
    answered = ai.chat.completions.create(model="chatty", messages=[*HELLO, called, result], tools=[TOOL])
    assert answered.choices[0].message.content == text_of(ANSWER)


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_tool_choice_forces_a_call(ai: openai.OpenAI, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    answer = ai.chat.completions.create(model="chatty", messages=HELLO, tools=[other, TOOL], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == PARIS and answer.choices[0].message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_answer_ending_with_its_first_tool_call_has_timings(chat: RunningServer, stream: bool) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}
    if stream:
        answer = events(chat, "/v1/chat/completions", **asked)[-1]
    else:
        answer = post(chat, "/v1/chat/completions", **asked).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["timings"]["predicted_n"] >= 6 and answer["outrider"]["mode"]


def test_tool_choice_none_calls_no_tool(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(model="chatty", messages=HELLO, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content == text_of(PLAIN) and answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [{"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}])
def test_chat_thinking_is_separate_from_the_content(chat: RunningServer, stream: bool, thinking: Any) -> None:
    asked = {"messages": HELLO, **thinking}
    if stream:
        deltas = [c["delta"] for e in events(chat, "/v1/chat/completions", **asked) for c in e["choices"]]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        text = "".join(delta.get("content", "") for delta in deltas)
    else:
        message = post(chat, "/v1/chat/completions", **asked).json()["choices"][0]["message"]
        thought, text = message["reasoning_content"], message["content"]
    assert (thought.strip(), text) == ("Hmm, let me see.", "It is four.")


def test_continue_final_message_continues_the_assistants_turn(chat: RunningServer) -> None:
    begun = {"role": "assistant", "content": "<|plain|>Hello there"}
    asked: dict[str, Any] = {"messages": [*HELLO, begun], "continue_final_message": True}
    for body in (asked, {"messages": [*HELLO, {**begun, "prefix": True}]}):
        answer = post(chat, "/v1/chat/completions", **body).json()
        assert answer["choices"][0]["message"]["content"] == ", dear friend!"


def test_responses_api_returns_text_and_function_calls(ai: openai.OpenAI) -> None:
    answer = ai.responses.create(model="chatty", input="hi", instructions="Be kind.", metadata={"job": "7"})
    assert answer.metadata == {"job": "7"}
    assert answer.output_text == text_of(PLAIN) and answer.status == "completed"
    tool: Any = {"type": "function", "strict": False, **WEATHER}
    called = ai.responses.create(model="chatty", input="hi", tools=[tool])
    call = called.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == PARIS
    talk: Any = [{"role": "user", "content": "hi"}, call.model_dump(),
                 {"type": "function_call_output", "call_id": call.call_id, "output": "22 C"}]  # fmt: skip
    assert ai.responses.create(model="chatty", input=talk, tools=[tool]).output_text == text_of(ANSWER)


def test_openai_client_assembles_a_streamed_response(ai: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False, **WEATHER}
    with ai.responses.stream(model="chatty", input="hi", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output_text == "I look." and final.usage is not None and final.usage.output_tokens == 7
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    cut = ai.responses.create(model="chatty", input="hi", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output_text == "Hello there"


def test_reasoning_returns_with_a_client_that_keeps_only_encrypted_content(chat: RunningServer, scripted: Path) -> None:
    """The AI SDK and LangChain send an earlier reasoning item back only if it has encrypted_content."""
    asked: dict[str, Any] = {"input": "hi", "chat_template_kwargs": {"enable_thinking": True}}
    assert "encrypted_content" not in post(chat, "/v1/responses", **asked).json()["output"][0]
    asked["include"] = ["reasoning.encrypted_content"]
    item = post(chat, "/v1/responses", **asked).json()["output"][0]
    received = events(chat, "/v1/responses", **asked)
    done = next(event["item"] for event in received if event["type"] == "response.output_item.done")
    sealed, content = item["encrypted_content"], item["content"]
    assert sealed and done["encrypted_content"] == received[-1]["response"]["output"][0]["encrypted_content"] == sealed
    model, thought = load_served_model("chatty", scripted, ("chatty",)), content[0]["text"]
    kept: list[tuple[dict[str, Any], str | None]] = [
        ({"encrypted_content": sealed}, thought),
        ({"content": content, "encrypted_content": sealed}, thought),
        ({"content": content}, thought),
        ({"encrypted_content": "another server's"}, None),
    ]
    for fields, expected in kept:
        items = [{"type": "reasoning", "id": "rs_1", "summary": [], **fields}, {"role": "assistant", "content": "4"}]
        talk = responses.to_conversation(model, ResponsesRequest.model_validate({"input": items}))
        assert talk.messages[0].get("reasoning_content") == expected


def test_requested_reasoning_summary_is_the_reasoning(ai: openai.OpenAI, scripted: Path) -> None:
    """Clients such as the AI SDK show summaries only. The reasoning is sent once, and is read back from the summary."""
    asked: Any = {"model": "chatty", "input": "hi", "reasoning": {"summary": "auto"}}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = ai.responses.create(**asked)
    with ai.responses.stream(**asked) as stream:
        received = list(stream)
        final = stream.get_final_response()
    thought = "".join(event.delta for event in received if event.type == "response.reasoning_summary_text.delta")
    assert thought.strip() == "Hmm, let me see."
    kinds = list(dict.fromkeys(event.type for event in received if getattr(event, "output_index", None) == 0))
    reasons = ["summary_part.added", "summary_text.delta", "summary_text.done", "summary_part.done"]
    inner = [f"response.reasoning_{name}" for name in reasons]
    assert kinds == ["response.output_item.added", *inner, "response.output_item.done"]
    added: Any = next(event for event in received if event.type == "response.output_item.added")
    assert added.item.to_dict().items() >= {"type": "reasoning", "summary": [], "content": []}.items()
    ended: Any = [event for event in received if event.type in (inner[2], inner[3])]
    assert [ended[0].text, ended[1].part.text] == [thought] * 2 and {event.summary_index for event in ended} == {0}
    model = load_served_model("chatty", scripted, ("chatty",))
    for answer in (whole, final):
        assert answer.output_text == "It is four." and answer.output[0].type == "reasoning"
        item = answer.output[0].to_dict()
        assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": thought}], [])
        back = [item, {"role": "assistant", "content": "4"}]
        talk = responses.to_conversation(model, ResponsesRequest.model_validate({"input": back}))
        assert talk.messages[0]["reasoning_content"] == thought


def test_response_repeats_the_tools_that_the_model_saw(chat: RunningServer) -> None:
    """Others lose fields that their types require, and a typed client could not read the response."""
    tools = [{"type": "mcp", "server_label": "x", "server_url": "http://x"}, {"type": "function", **WEATHER}]
    answer = post(chat, "/v1/responses", input="hi", tools=tools).json()
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather"]
    assert answer["outrider"]["notes"][0].startswith("tools: mcp ignored")


def test_only_the_last_item_of_a_cut_response_is_incomplete_and_never_a_call(ai: openai.OpenAI) -> None:
    """A call that was cut off is left out."""
    tool: Any = {"type": "function", "strict": False, **WEATHER}
    for most, statuses in ((2, ["incomplete"]), (6, ["completed", "completed"])):
        asked: Any = {"model": "chatty", "input": "hi", "tools": [tool], "max_output_tokens": most}
        whole = ai.responses.create(**asked)
        with ai.responses.stream(**asked) as stream:
            streamed = next(event.response for event in stream if event.type == "response.incomplete")
        for answer in (whole, streamed):
            assert answer.status == "incomplete"
            assert [item.to_dict()["status"] for item in answer.output] == statuses


# --- Anthropic's client ---------------------------------------------------------------------------------------------


def test_messages_api_answers_counts_tokens_and_stops(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="chatty", max_tokens=20, messages=HELLO, system="Be kind.")
    assert [block.text for block in answer.content if block.type == "text"] == [text_of(PLAIN)]
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens == 5
    counted = claude.messages.count_tokens(model="chatty", messages=HELLO, system="Be kind.")
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    turns: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    joined = claude.messages.count_tokens(model="chatty", messages=[{"role": "user", "content": "a\n\nb"}])
    assert claude.messages.count_tokens(model="chatty", messages=turns) == joined  # consecutive turns are one
    stopped = claude.messages.create(model="chatty", max_tokens=20, messages=HELLO, stop_sequences=["zzz", ", dear"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", dear")
    assert claude.messages.create(model="chatty", max_tokens=2, messages=HELLO).stop_reason == "max_tokens"


def test_anthropic_client_assembles_a_streamed_tool_use(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    with claude.messages.stream(model="chatty", max_tokens=40, messages=HELLO, tools=[tool]) as stream:
        final = stream.get_final_message()
    text, use = final.content
    assert text.type == "text" and text.text == "I look."
    assert use.type == "tool_use" and (use.name, use.input) == ("get_weather", PARIS)
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == 7
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "22 C"}]}
    talk: Any = [*HELLO, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(model="chatty", max_tokens=40, messages=talk, tools=[tool])
    assert [block.text for block in answer.content if block.type == "text"] == [text_of(ANSWER)]


def test_messages_api_returns_thinking_as_a_separate_block(claude: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(model="chatty", max_tokens=40, messages=HELLO, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_thinking_of_a_message_is_signed_and_counted(chat: RunningServer) -> None:
    """Strands, LangChain and others leave thinking without a signature out of the next request."""
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, "thinking": {"type": "adaptive"}}
    whole, received = post(chat, "/v1/messages", **asked).json(), events(chat, "/v1/messages", **asked)
    assert whole["content"][0]["signature"]
    begun = next(event["content_block"] for event in received if event["type"] == "content_block_start")
    deltas = [event["delta"] for event in received if event["type"] == "content_block_delta" and event["index"] == 0]
    assert begun["signature"] == "" and deltas[-1]["signature"] == whole["content"][0]["signature"]
    end = next(event for event in received if event["type"] == "message_delta")
    for usage in (whole["usage"], end["usage"]):
        assert usage["output_tokens_details"] == {"thinking_tokens": 4} and usage["output_tokens"] == 7
    plain = post(chat, "/v1/messages", messages=HELLO, max_tokens=40).json()
    assert plain["usage"]["output_tokens_details"] == {"thinking_tokens": 0}


def test_message_of_no_tokens_reads_the_prompt_into_the_cache(chat: RunningServer) -> None:
    talk = [{"role": "user", "content": "A question that is long enough to be kept in the prompt cache. " * 4}]
    first = post(chat, "/v1/messages", messages=talk, max_tokens=0).json()
    assert (first["content"], first["stop_reason"]) == ([], "max_tokens")
    assert first["usage"]["output_tokens"] == 0 == first["usage"]["cache_read_input_tokens"]
    later = post(chat, "/v1/messages", messages=talk, max_tokens=5).json()
    assert later["usage"]["cache_read_input_tokens"] > 0.9 * first["usage"]["input_tokens"]
    received = events(chat, "/v1/messages", messages=talk, max_tokens=0)
    assert [event["type"] for event in received if event["type"] != "ping"] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip


# --- clients that disconnect, read nothing, or send too much --------------------------------------------------------


def test_a_client_that_disconnects_cancels_its_request(chat: RunningServer) -> None:
    """Streamed or not: its slot is free again long before the text would have ended."""
    endless = {"messages": HELLO, "chat_template_kwargs": {"long": True}, "max_tokens": 1_000_000}
    for stream in (True, False):
        before = chat.client.stats().finished
        body = json.dumps({**endless, "stream": stream}).encode()
        with send_chat(chat, body) as connection:
            wait_until(lambda: chat.client.stats().active == 1)
            if stream:
                assert b"200" in connection.recv(100)
        wait_until(lambda: chat.client.stats().active == 0)
        assert chat.client.stats().finished == before + 1


def test_client_that_reads_nothing_does_not_delay_others(chat: RunningServer) -> None:
    endless = {"messages": HELLO, "chat_template_kwargs": {"long": True}, "max_tokens": 300, "stream": True}
    with send_chat(chat, json.dumps(endless).encode()):
        answers = [post(chat, "/v1/chat/completions", messages=HELLO).json() for _ in range(3)]
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {text_of(PLAIN)}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_answer_that_exceeds_its_timeout_fails_with_504(chat: RunningServer, path: str) -> None:
    fields: dict[str, Any] = {"input": "hi"} if path == "/v1/responses" else {"messages": HELLO}
    asked = {**fields, "max_tokens": 10**6, "chat_template_kwargs": {"long": True}, "timeout": 0.2}
    if path == "/v1/responses":
        asked["max_output_tokens"] = asked.pop("max_tokens")
    late = post(chat, path, **asked)
    assert late.status_code == 504 and "not complete after 0.2 s" in late.json()["error"]["message"]
    assert late.headers["x-should-retry"] == "false"  # otherwise OpenAI's and Anthropic's clients send it twice more
    received: list[Any] = []
    while not received:  # on a busy machine a stream may not have begun by then, and fails as a whole
        received = events(chat, path, **asked)
    last = received[-1]
    assert "not complete after 0.2 s" in (last.get("response") or last)["error"]["message"]
    if "response" in last:  # OpenAI's types allow no other code for it
        assert last["response"]["error"]["code"] == "server_error"
    else:
        assert last["request_id"].startswith("req_")
    wait_until(lambda: chat.client.stats().active == 0)


@pytest.mark.parametrize("n", [1, STREAMS])
def test_concurrent_answers_per_caller_are_limited(chat: RunningServer, ai: openai.OpenAI, n: int) -> None:
    body = json.dumps({"messages": HELLO, "chat_template_kwargs": {"long": True}, "stream": True, "n": n}).encode()
    with ExitStack() as stack:
        for _ in range(STREAMS // n):
            stack.enter_context(send_chat(chat, body))
        wait_until(lambda: chat.client.stats().active == STREAMS)
        refused = post(chat, "/v1/chat/completions", messages=HELLO)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "--max-streams-per-key" in refused.json()["error"]["message"]
        assert ai.chat.completions.create(model="chatty", messages=HELLO).choices[0].message.content  # has a key
    wait_until(lambda: chat.client.stats().active == 0)
    wait_until(lambda: post(chat, "/v1/chat/completions", messages=HELLO).status_code == 200)


def send_chat(server: RunningServer, body: bytes) -> socket.socket:
    """Sends a chat request and returns the connection, without reading the answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=200)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def wait_until(holds: Any, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not become true within {seconds:g} s")
        time.sleep(0.01)


# --- the small paths ------------------------------------------------------------------------------------------------


def test_models_tokenize_and_ready_endpoints_answer(
    ai: openai.OpenAI, claude: anthropic.Anthropic, chat: RunningServer, pair: RunningServer
) -> None:
    assert next(iter(ai.models.list())).id == "chatty" == ai.models.retrieve("chatty").id
    assert next(iter(claude.models.list())).id == "chatty"
    tokens = post(pair, "/tokenize", content=PROMPT).json()["tokens"]
    assert len(tokens) == pair.client.generate(PROMPT, SamplingParams(max_tokens=1)).prompt_tokens
    plain = post(pair, "/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert post(pair, "/detokenize", tokens=plain).json()["content"] == PROMPT
    talk = post(chat, "/tokenize", messages=HELLO).json()
    assert talk["count"] == post(chat, "/v1/chat/completions", messages=HELLO).json()["usage"]["prompt_tokens"]
    assert httpx.get(f"{chat.url}/ready").json()["workers"] == {"target-0": "ready", "draft-0": "ready"}


def test_orchestrator_refusal_has_its_http_status_with_and_without_stream(
    pair: RunningServer, ai: openai.OpenAI
) -> None:
    from openai import BadRequestError

    for stream in (False, True):
        refused = post(pair, "/v1/completions", prompt=[5] * 1024, stream=stream)
        # Claude Code, LangChain, litellm and CrewAI shorten a conversation at these words.
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(
            "the prompt is too long: 1024 tokens > 1023 maximum; this model's maximum context length is 1024 tokens"
        )
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(BadRequestError, match=r"speculation\.mode"):
        ai.chat.completions.create(model="chatty", messages=HELLO, extra_body={"speculation": {"mode": "fast"}})


def test_template_keyword_and_unknown_model_errors_are_returned(
    claude: anthropic.Anthropic, chat: RunningServer
) -> None:
    from anthropic import NotFoundError

    answer = post(chat, "/v1/chat/completions", messages=HELLO, chat_template_kwargs={"messages": []})
    assert answer.status_code == 400 and "the chat template keyword" in answer.json()["error"]["message"]
    with pytest.raises(NotFoundError, match="'other' is not served here"):
        claude.messages.create(model="other", max_tokens=5, messages=HELLO)


# --- the process ----------------------------------------------------------------------------------------------------


def test_lost_http_process_is_restarted_on_the_same_port(chat: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    process = chat.process
    assert process is not None
    before = process.pid
    process.drain()  # as after SIGTERM; the process that replaces it does not drain
    wait_until(lambda: httpx.get(f"{chat.url}/ready").json()["status"] == "ending")
    refused = post(chat, "/v1/chat/completions", messages=HELLO)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    monkeypatch.setattr(http_process, "MIN_UPTIME_SECONDS", math.inf)
    os.kill(before, signal.SIGKILL)
    ended = r"^the HTTP server ended with code -9(, most likely|$)"
    with pytest.raises(WorkerError, match=ended):  # a process that ended soon after its start is not restarted
        wait_until(lambda: process.check() is not None)
    monkeypatch.setattr(http_process, "MIN_UPTIME_SECONDS", 0.0)
    process.check()
    wait_until_up(chat.url, process)
    assert process.pid != before
    assert post(chat, "/v1/chat/completions", messages=HELLO).json()["choices"][0]["message"]["content"]


def test_a_port_in_use_is_refused_before_anything_is_loaded(chat: RunningServer) -> None:
    with pytest.raises(EndpointError, match=r"the port is in use; .* choose another port .*--no-http"):
        HttpListener(HttpSettings(port=int(chat.url.rpartition(":")[2])))


@pytest.mark.parametrize("host", ["a..b", "nosuchhost.invalid"])
def test_an_unknown_host_is_refused_in_plain_words(host: str) -> None:
    with pytest.raises(EndpointError, match=r"the host can't be found; check its name \(--host") as raised:
        HttpListener(HttpSettings(host=host, api_keys=("key",)))
    assert "[Errno" not in str(raised.value)


def test_ipv6_address_on_a_host_without_ipv6_is_an_endpoint_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.socket

    def refuse(family: int = socket.AF_INET, *rest: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *rest, **options)

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(EndpointError, match=r"Address family not supported by protocol \(--host"):
        HttpListener(HttpSettings(host="::1", port=0))
