"""Required calls, and calls or thinking together with a format, in every API: constrained by a grammar, and drafted."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from outrider.server.app import MIN_COMPRESSED_BYTES
from tests.server.running_server import TRIES, RunningServer

if TYPE_CHECKING:
    import anthropic
    import openai

HELLO: Any = [{"role": "user", "content": "hi"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
WEATHER = {"name": "get_weather", "parameters": CITY}
TOOL: Any = {"type": "function", "function": WEATHER}
OTHER: Any = {"type": "function", "function": {"name": "other"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FORM = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
IN_FORM: Any = {
    "type": "json_schema",
    "json_schema": {"schema": {**FORM, "x-guidance": {"whitespace_flexible": False}}},
}
CHAT = "/v1/chat/completions"


def post(server: RunningServer, path: str = CHAT, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"max_tokens": 400, **body}, timeout=200)


def message(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def calls(answer: httpx.Response) -> list[tuple[str, Any]]:
    made = [call["function"] for call in message(answer).get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


@pytest.mark.parametrize("stream", [False, True])
def test_required_call_satisfies_its_schema_in_every_mode(chat: RunningServer, stream: bool) -> None:
    """Only the grammar enforces it: the scripted model leaves `days` out. Drafts obey the grammar and are accepted."""
    found = set()
    for mode in ("ar", "sd", "ssd"):
        asked: dict[str, Any] = {
            "messages": HELLO, "tools": [OTHER, TOOL], "tool_choice": NAMED, "temperature": 0.9, "seed": 3,
            "speculation": {"mode": mode}, "max_tokens": 400, "stream": stream,
        }  # fmt: skip
        for _ in range(TRIES if mode != "ar" else 1):  # until a draft is in time
            text = httpx.post(f"{chat.url}{CHAT}", json=asked, timeout=200).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            last = events[-1] if stream else json.loads(text)
            if last["timings"]["draft_n_accepted"]:
                break
        made = [c for one in events for c in one["choices"][0]["delta"].get("tool_calls", ())]
        made = made or last["choices"][0]["message"]["tool_calls"]
        for call in made:
            jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
        assert last["choices"][0]["finish_reason"] == "tool_calls"
        assert (last["timings"]["draft_n_accepted"] > 0) == (mode != "ar")
        found.add(tuple((call["function"]["name"], call["function"]["arguments"]) for call in made))
    assert len(found) == 1 and {name for one in found for name, _ in one} == {"get_weather"}


def test_required_choice_without_parallel_calls_makes_one_call(chat: RunningServer) -> None:
    for seed in range(4):
        asked: dict[str, Any] = {"messages": HELLO, "tools": [OTHER, TOOL], "tool_choice": "required", "seed": seed}
        found = calls(post(chat, **asked, temperature=1.5, parallel_tool_calls=False))
        assert len(found) == 1 and found[0][0] in ("other", "get_weather")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_after_the_only_call_are_not_counted(chat: RunningServer, stream: bool) -> None:
    """Also if they become final in the same round as the call's end."""
    asked: dict[str, Any] = {
        "messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False, "min_tokens": 60, "max_tokens": 60,
        "logprobs": True, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    found: dict[str, set[tuple[int, int]]] = {"ar": set(), "sd": set()}
    for mode in (*["sd"] * 5, "ar"):
        how = {"mode": mode, "num_draft_tokens": 8, "origins": mode == "ar"}
        text = httpx.post(f"{chat.url}{CHAT}", json={**asked, "speculation": how}, timeout=200).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if "{" in line]
        rows = [row for one in events for c in one["choices"] for row in (c["logprobs"] or {}).get("content", ())]
        found[mode].add((events[-1]["usage"]["completion_tokens"], len(rows)))
    assert found["sd"] == found["ar"] == {(6, 6)}


def test_responses_and_messages_apis_support_required_calls(ai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    other: dict[str, Any] = {"name": "other", "parameters": None}
    tools: Any = [{"type": "function", "strict": True, **WEATHER}, {"type": "function", "strict": False, **other}]
    choices: Any = [
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ]
    for choice in choices:
        answer = ai.responses.create(model="chatty", input="hi", tools=tools, tool_choice=choice, max_output_tokens=400)
        assert answer.output and {item.type for item in answer.output} == {"function_call"}
        assert {item.name for item in answer.output if item.type == "function_call"} == {"get_weather"}
        assert answer.to_dict()["tool_choice"] == choice
    nothing: dict[str, Any] = {"type": "object", "properties": {}}
    theirs: Any = [{"name": "get_weather", "input_schema": CITY}, {"name": "other", "input_schema": nothing}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        how: Any = {**choice, "disable_parallel_tool_use": True}
        answer = claude.messages.create(model="chatty", max_tokens=400, messages=HELLO, tools=theirs, tool_choice=how)
        (use,) = answer.content
        assert use.type == "tool_use" and answer.stop_reason == "tool_use"
        jsonschema.validate(use.input, CITY if use.name == "get_weather" else {})


def test_tool_named_in_the_tool_choice_is_called_once(
    chat: RunningServer, ai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """The scripted model repeats the call if it can; the grammar ends after one."""
    asked: dict[str, Any] = {"messages": HELLO, "temperature": 1.5, "max_tokens": 2000}
    for seed, stream in ((1, False), (2, False), (3, True)):
        body = {**asked, "tools": [OTHER, TOOL], "tool_choice": NAMED, "seed": seed, "stream": stream}
        text = httpx.post(f"{chat.url}{CHAT}", json=body, timeout=200).text
        assert text.count('"name":"get_weather"') == 1 and '"finish_reason":"tool_calls"' in text
    tools: Any = [{"type": "function", "strict": False, **WEATHER}]
    named: Any = {"type": "function", "name": "get_weather"}
    answer = ai.responses.create(model="chatty", input="hi", tools=tools, tool_choice=named, temperature=1.5)
    assert [item.type for item in answer.output if item.type != "reasoning"] == ["function_call"]
    assert answer.parallel_tool_calls
    theirs: Any = [{"name": "get_weather", "input_schema": CITY}]
    how: Any = {"type": "tool", "name": "get_weather"}
    answer = claude.messages.create(model="chatty", max_tokens=2000, messages=HELLO, tools=theirs, tool_choice=how)
    assert [block.type for block in answer.content] == ["tool_use"] and answer.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_returned(chat: RunningServer, stream: bool) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "seed": 1, "stream": stream}
    for most in (1, 3, 9):
        text = httpx.post(f"{chat.url}{CHAT}", json={**asked, "max_tokens": most}, timeout=200).text
        assert '"finish_reason":"length"' in text and "tool_call>" not in text and "get_weather" not in text


def test_only_allowed_tools_are_called(chat: RunningServer) -> None:
    name = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [name]}}
    found = calls(post(chat, messages=HELLO, tools=[OTHER, TOOL], tool_choice=allowed))
    assert {name for name, _ in found} == {"other"}
    wrong = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    refused = post(chat, messages=HELLO, tools=[OTHER], tool_choice=wrong)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_call_of_a_strict_tool_satisfies_its_schema(chat: RunningServer) -> None:
    strict = {"type": "function", "function": {**WEATHER, "strict": True}}
    free = message(post(chat, messages=HELLO, tools=[TOOL]))
    constrained = message(post(chat, messages=HELLO, tools=[strict]))
    assert constrained["content"] == free["content"] == "I look."
    assert json.loads(free["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    jsonschema.validate(json.loads(constrained["tool_calls"][0]["function"]["arguments"]), CITY)


def test_response_format_with_tools_yields_a_call_or_the_format(chat: RunningServer) -> None:
    mark = httpx.post(f"{chat.url}/tokenize", json={"content": "<tool_call>"}, timeout=200).json()["tokens"][0]
    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "response_format": IN_FORM}
    formatted = message(post(chat, **asked, logit_bias={str(mark): -9.0}))
    jsonschema.validate(json.loads(formatted["content"]), FORM)
    assert "tool_calls" not in formatted
    called = message(post(chat, **asked, logit_bias={str(mark): 9.0}))
    jsonschema.validate(json.loads(called["tool_calls"][0]["function"]["arguments"]), CITY)
    assert called["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_precedes_the_formatted_answer(chat: RunningServer, stream: bool) -> None:
    texts = set()
    for mode in ("ar", "ssd"):
        asked: dict[str, Any] = {
            "messages": HELLO, "response_format": IN_FORM, "max_tokens": 400, "stream": stream,
            "speculation": {"mode": mode}, "chat_template_kwargs": {"enable_thinking": True},
        }  # fmt: skip
        text = httpx.post(f"{chat.url}{CHAT}", json=asked, timeout=200).text
        if stream:
            deltas = [
                json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line[:7] == "data: {"
            ]
            thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
            words = "".join(delta.get("content", "") for delta in deltas)
        else:
            answer = json.loads(text)["choices"][0]["message"]
            thought, words = answer["reasoning_content"], answer["content"]
        assert thought.strip() == "Hmm, let me see."
        jsonschema.validate(json.loads(words), FORM)
        texts.add(words)
    assert len(texts) == 1


def test_disabled_thinking_is_skipped(chat: RunningServer) -> None:
    """If the template begins a thought nevertheless, the prompt ends it."""
    begun = [*HELLO, {"role": "user", "content": "<|im_start|>assistant\n<think>"}]
    asked: dict[str, Any] = {"messages": begun, "response_format": IN_FORM, "add_generation_prompt": False}
    assert message(post(chat, **asked))["reasoning_content"]
    answer = message(post(chat, **asked, chat_template_kwargs={"enable_thinking": False}))
    assert "reasoning_content" not in answer and json.loads(answer["content"])


def test_a_text_has_at_least_min_tokens_in_every_mode(chat: RunningServer) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 40, "seed": 5, "temperature": 0.8}
    assert post(chat, **asked).json()["usage"]["completion_tokens"] <= 6
    texts = set()
    for mode in ("ar", "sd", "ssd"):
        answer = post(chat, **asked, min_tokens=12, speculation={"mode": mode}).json()
        assert answer["usage"]["completion_tokens"] >= 12
        texts.add(answer["choices"][0]["message"]["content"])
    assert len(texts) == 1
    refused = post(chat, messages=HELLO, max_tokens=4, min_tokens=5)
    assert refused.status_code == 400 and "expected at most max_tokens" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_compressed_and_a_stream_is_not(chat: RunningServer, stream: bool) -> None:
    asked = {"prompt": "<|long|>", "max_tokens": 100, "logprobs": 20, "stream": stream, "ignore_eos": True}
    found = {}
    for coding in ("gzip", "identity", "deflate, gzip;q=0"):
        answer = httpx.post(f"{chat.url}/v1/completions", json=asked, headers={"accept-encoding": coding}, timeout=200)
        assert ("content-encoding" in answer.headers) is (coding == "gzip" and not stream)
        assert len(answer.text) > MIN_COMPRESSED_BYTES
        found[coding] = answer.text if stream else answer.json()["choices"]
    assert stream or found["gzip"] == found["identity"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ones", [1, 2])
def test_constraints_outside_the_grammar_are_checked_afterwards_unless_strict(
    chat: RunningServer, ones: int, stream: bool
) -> None:
    """The schema demands a list of `ones` equal but unique items; the grammar does not enforce `uniqueItems`."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": ones, "maxItems": ones, "uniqueItems": True}
    form: dict[str, Any] = {"name": "s", "schema": schema}
    body = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": form}, "stream": stream}
    text = post(chat, **body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    notes = " ".join(events[-1]["outrider"]["notes"])
    assert ("response_format: choice 0 does not satisfy its schema" in notes) is (ones == 2)
    strict = {**body, "response_format": {"type": "json_schema", "json_schema": {**form, "strict": True}}}
    refused = post(chat, **strict)
    assert refused.status_code == 400 and "uniqueItems" in refused.text
    asked = {"input": "hi", "text": {"format": {"type": "json_schema", **form}}}
    answer = httpx.post(f"{chat.url}/v1/responses", json=asked, timeout=200).json()
    assert any("text.format: choice 0" in note for note in answer["outrider"]["notes"]) is (ones == 2)


def test_pattern_that_no_grammar_can_enforce_is_left_out_unless_strict(chat: RunningServer) -> None:
    """JSON Schema allows look-around, and clients' libraries write it; the grammar's library rejects it.

    The complete text is checked.
    """
    city = {"type": "string", "maxLength": 8, "pattern": "^(?!x).*$"}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    form: dict[str, Any] = {"name": "s", "schema": schema}
    body: dict[str, Any] = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": form}}
    for pattern, is_met in (("(?=%)%%", False), ("^(?!x).*$", True)):
        city["pattern"] = pattern
        answer = post(chat, **body)
        assert set(json.loads(message(answer)["content"])) == {"city"}
        assert ("choice 0 does not satisfy its schema" in answer.text) is not is_met
    function = {"name": "get_weather", "parameters": schema}
    for tool in ({**function}, {**function, "strict": True}):
        asked = {"messages": HELLO, "tools": [{"type": "function", "function": tool}], "tool_choice": NAMED}
        answer = post(chat, **asked)
        if tool.get("strict"):
            assert answer.status_code == 400 and "look-around" in answer.text
        else:
            assert set(calls(answer)[0][1]) == {"city"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("city", ["Paris", "Rome"])
def test_unconstrained_tool_arguments_are_validated_afterwards(chat: RunningServer, city: str, strict: bool) -> None:
    """The scripted model writes Paris, unless a strict tool's grammar forbids it."""
    schema = {"type": "object", "properties": {"city": {"const": city}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": strict}}
    answer = post(chat, messages=HELLO, tools=[tool])
    assert len(calls(answer)) == 1
    notes = answer.json().get("outrider", {}).get("notes") or []
    found = [note for note in notes if note.startswith("tools: the arguments of a call of get_weather do not satisfy")]
    assert len(found) == (city == "Rome" and not strict)


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [TOOL, TOOL]}, "tools", "two have the same name"),
        ({"tools": [tool_of({"type": "array"})]}, "tools", "f: the arguments have type 'array'"),
        ({"tools": [tool_of({"properties": {"x": {"type": "odd"}}})]}, "tools", "f: the JSON schema .*odd"),
        ({"tools": [TOOL], "grammar": "start: <nothing>"}, "grammar", "unknown special token"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "function": {"name": "g"}}}, "tool_choice", "not among"),
    ],
)
def test_unenforceable_constraint_error_names_its_field(
    chat: RunningServer, body: dict[str, Any], param: str, words: str
) -> None:
    refused = post(chat, messages=HELLO, **{"tool_choice": "required", **body})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert re.search(words, refused.json()["error"]["message"])


def test_grammar_can_contain_the_models_special_tokens(chat: RunningServer) -> None:
    grammar = 'start: "a" <tool_call> /[0-9]{2}/ </tool_call>'
    answer = post(chat, "/v1/completions", prompt="x", grammar=grammar).json()
    text = answer["choices"][0]["text"]
    assert text.startswith("a<tool_call>") and text.endswith("</tool_call>") and len(text) == 26
    assert answer["usage"]["completion_tokens"] == 6


# --- log-probabilities of responses ---------------------------------------------------------------------------------


def check_rows(rows: list[Any], expected: list[Any]) -> None:
    """Checks that tokens and order are equal, and values equal within rounding."""
    flat, same = ([one for row in many for one in (row, *row["top_logprobs"])] for many in (rows, expected))
    assert [(one["token"], one["bytes"]) for one in flat] == [(one["token"], one["bytes"]) for one in same]
    assert [one["logprob"] for one in flat] == pytest.approx([one["logprob"] for one in same], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [{}, {"schema": {"const": "\u00e9\U0001f600\u20ac"}}])
def test_responses_logprobs_equal_those_of_chat(ai: openai.OpenAI, form: dict[str, Any], stream: bool) -> None:
    """Also where a character is several tokens, of which the first ones complete no text."""
    spelled = {"name": "spelled", **form}
    in_chat: Any = {"response_format": {"type": "json_schema", "json_schema": spelled}} if form else {}
    chat = ai.chat.completions.create(model="chatty", messages=HELLO, logprobs=True, top_logprobs=3, **in_chat)
    assert chat.choices[0].logprobs is not None
    expected = [row.model_dump() for row in chat.choices[0].logprobs.content or ()]
    asked: Any = {"model": "chatty", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    asked |= {"text": {"format": {"type": "json_schema", **spelled}}} if form else {}
    if stream:
        events = list(ai.responses.create(**asked, stream=True))
        final = next(event.response for event in events if event.type == "response.completed")
        deltas = [
            row.to_dict() for event in events if event.type == "response.output_text.delta" for row in event.logprobs
        ]
        check_rows(deltas, expected)
    else:
        final = ai.responses.create(**asked)
    (item,) = final.output
    assert item.type == "message" and item.content[0].type == "output_text"
    check_rows([row.to_dict() for row in item.content[0].logprobs or ()], expected)
    assert bytes(byte for row in expected for byte in row["bytes"]).decode() == final.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_answers_text_has_logprobs(ai: openai.OpenAI, stream: bool) -> None:
    """The thought before it and the call after it have none."""
    asked: Any = {"model": "chatty", "input": "hi", "include": ["message.output_text.logprobs"]}
    tools: Any = [{"type": "function", "strict": False, **WEATHER}]
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    for more, words in ((thinks, ["\n\nIt is", " four."]), ({"tools": tools}, ["I look."])):
        if stream:
            events = list(ai.responses.create(**asked, **more, stream=True))
            final = next(event.response for event in events if event.type == "response.completed")
        else:
            final = ai.responses.create(**asked, **more)
        (item,) = [item for item in final.output if item.type == "message"]
        assert item.content[0].type == "output_text"
        assert [row.token for row in item.content[0].logprobs or ()] == words


def test_top_logprobs_requires_logprobs(chat: RunningServer) -> None:
    refused = httpx.post(f"{chat.url}/v1/responses", json={"input": "hi", "top_logprobs": 3}, timeout=200)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"
