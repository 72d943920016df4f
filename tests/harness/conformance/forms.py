"""Structured output: schemas, grammars, regular expressions, and invalid ones."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.harness.conformance.case import Cases, Servers, equal, expect, refused
from tests.harness.conformance.http_client import choices
from tests.harness.conformance.requests import (
    CHAT,
    FORM,
    HELLO,
    MESSAGES,
    PROMPT,
    RESPONSES,
    TEXT,
    THINKS,
    TOOL,
    content_of,
    schema_format,
)

cases = Cases("Structured output")
LLAMA, VLLM, TEXTS = "llama.cpp test_chat_completion", "vLLM test_chat", "vLLM test_completion"


def form(text: str) -> Any:
    """Parses the text as JSON that satisfies FORM. Raises ExpectationFailed."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    expect(isinstance(found, dict) and found.get("kind") in ("alpha", "beta"), f"the text is {text!r}")
    return found


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """response_format json_schema: the text matches the schema."""
    form(content_of(at.chat.json(CHAT, messages=HELLO, response_format=schema_format(FORM, strict=True))))


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A schema holds in a stream, at any temperature, with drafts."""
    asked = {
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": schema_format(FORM),
        "temperature": 1.0,
    }
    form("".join(c["delta"].get("content") or "" for c in choices(at.pair.stream(CHAT, **asked))))


@cases.add(f"{VLLM}; {LLAMA}")
def _(at: Servers) -> None:
    """response_format json_object: the text is an object."""
    grown = at.pair.json(TEXT, prompt=PROMPT, response_format={"type": "json_object"}, max_tokens=8)
    expect(grown["choices"][0]["text"].lstrip().startswith("{"), f"it is {grown['choices'][0]['text']!r}")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """json_object with llama.cpp's 'schema' follows the schema."""
    answer = at.chat.json(CHAT, messages=HELLO, response_format={"type": "json_object", "schema": {"const": "42"}})
    equal(content_of(answer), '"42"', "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """response_format text changes nothing."""
    at.chat.json(CHAT, messages=HELLO, response_format={"type": "text"})


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """An unknown response_format and invalid schemas are refused."""
    for wrong in (
        {"type": "sound"},
        *({"type": "json_object", "schema": s} for s in (123, {"type": 123}, {"type": "hiccup"})),
    ):
        refused(at.chat.post(CHAT, messages=HELLO, response_format=wrong), "response_format")


@cases.add("OpenAI's reference")
def _(at: Servers) -> None:
    """json_schema without a schema is refused."""
    refused(at.chat.post(CHAT, messages=HELLO, response_format={"type": "json_schema"}), "schema")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A top-level json_schema, llama.cpp's name, is followed."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO, json_schema={"const": "42"})), '"42"', "the text")


@cases.add(LLAMA)
def _(at: Servers) -> None:
    """A GBNF grammar is followed."""
    equal(content_of(at.chat.json(CHAT, messages=HELLO, grammar='root ::= "a"{5,5}')), "aaaaa", "the text")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """structured_outputs.json is followed, and so is guided_json, its older name."""
    form(content_of(at.chat.json(CHAT, messages=HELLO, structured_outputs={"json": FORM})))
    form(content_of(at.chat.json(CHAT, messages=HELLO, guided_json=json.dumps(FORM))))


@cases.add("vLLM's and llama.cpp's practice")
def _(at: Servers) -> None:
    """An object has no other properties than a schema lists, unless additionalProperties allows them."""
    inner = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    outer = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/inner"}}, "required": ["inner"]}
    schema = {**outer, "$defs": {"inner": inner}}
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": 2, "max_tokens": 64}
    for seed in range(8):
        for wanted in ({"response_format": schema_format(schema)}, {"guided_json": json.dumps(schema)}):
            found = json.loads(at.pair.json(TEXT, **asked, **wanted, seed=seed)["choices"][0]["text"])
            expect(set(found) == {"inner"} and set(found["inner"]) == {"sure"}, f"it is {found}")
    more = {"properties": {"more": {"const": 1}}, "required": ["more"]}
    both: list[dict[str, Any]] = [{**inner, "required": ["sure", "more"]}, {**inner, "anyOf": [more]}]
    for combined in (*both, {"allOf": [inner, more]}):
        text = at.pair.json(TEXT, **asked, guided_json=combined)["choices"][0]["text"]
        expect('"sure"' in text and '"more"' in text, f"it is {text!r}")
    asked["guided_json"] = {**inner, "required": 5}
    refused(at.pair.post(TEXT, **asked), "guided_json")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """structured_outputs.regex is followed."""
    address = r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)"
    text = at.pair.json(TEXT, prompt=PROMPT, structured_outputs={"regex": address}, max_tokens=20, temperature=1.0)
    found = text["choices"][0]["text"]
    expect(re.fullmatch(address, found), f"it is {found!r}")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """structured_outputs.choice is followed, and so is guided_choice, its older name."""
    ways = ["Python", "C++ (17)", "Rust"]
    for asked in ({"structured_outputs": {"choice": ways}}, {"guided_choice": ways}):
        text = content_of(at.chat.json(CHAT, messages=HELLO, **asked, temperature=0.7, max_tokens=20))
        expect(text in ways, f"it is {text!r}")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """structured_outputs.json_object is JSON of any kind."""
    asked = {"messages": HELLO, "structured_outputs": {"json_object": True}, "max_tokens": 6}
    expect(content_of(at.chat.json(CHAT, **asked)).lstrip().startswith("{"), "the text is not an object")


@cases.add(VLLM)
def _(at: Servers) -> None:
    """A regex that is an object is refused."""
    refused(at.chat.post(CHAT, messages=HELLO, structured_outputs={"regex": {"1": "Python"}}), "regex")


@cases.add(TEXTS)
def _(at: Servers) -> None:
    """An invalid schema, and a regex and a grammar that can't be compiled, are refused."""
    wrong = {"type": "object", "properties": {"foo": "bar"}}
    bad = 'root ::= select_statementinvalidsyntax\ncolumn ::= "col_1 "'
    for given in ({"json": wrong}, {"regex": "[.*"}, {"grammar": bad}):
        refused(at.pair.post(TEXT, prompt=PROMPT, structured_outputs=given), "structured_outputs")


@cases.add("vLLM test_structured_output")
def _(at: Servers) -> None:
    """text.format of a response is followed."""
    answer = at.chat.json(RESPONSES, input="hi", text={"format": {"type": "json_schema", "name": "f", "schema": FORM}})
    form(answer["output"][-1]["content"][0]["text"])


@cases.add("llama.cpp test_compat_oai_responses")
def _(at: Servers) -> None:
    """text.format json_schema without a schema is refused; text changes nothing."""
    refused(at.chat.post(RESPONSES, input="hi", text={"format": {"type": "json_schema", "name": "f"}}), "schema")
    at.chat.json(RESPONSES, input="hi", text={"format": {"type": "text"}})


@cases.add("Anthropic's reference")
def _(at: Servers) -> None:
    """output_config.format of a message is followed."""
    asked = {"messages": HELLO, "max_tokens": 64, "output_config": {"format": {"type": "json_schema", "schema": FORM}}}
    form(at.chat.json(MESSAGES, **asked)["content"][-1]["text"])


@cases.add("vLLM test_completion_with_function_calling")
def _(at: Servers) -> None:
    """With tools and a schema, the model calls a tool, or its answer matches the schema."""
    at.chat.json(CHAT, messages=HELLO, tools=[TOOL], response_format=schema_format(FORM))


@cases.add("vLLM test_structured_outputs_with_reasoning")
def _(at: Servers) -> None:
    """A model that thinks does so first; then its answer matches the schema."""
    asked = {"messages": HELLO, "response_format": schema_format(FORM), "chat_template_kwargs": THINKS}
    message = at.chat.json(CHAT, **asked)["choices"][0]["message"]
    form(message["content"])
    expect(message.get("reasoning_content"), "there is no thought")
