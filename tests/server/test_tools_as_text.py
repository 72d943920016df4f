"""Tools in the system prompt, for models with a template without tools; calls satisfy their schemas."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.server.mapping import ToolSelection, select_tools
from outrider.server.model.served import ServedModel, TemplateInput, ThinkingMode, Toolbox, load_served_model
from outrider.server.model.tool_format import SpanTags, find_thinking_tags, join_turns, tools_as_text
from outrider.server.problems import Problem
from outrider.server.schemas import Function
from tests.harness.scripted_model import ANSWER, PLAIN, text_of
from tests.server.running_server import RunningServer, serving

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": CITY}}
HELLO: Any = [{"role": "user", "content": "hi"}]
TALK: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "1", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "22 C"},
    {"role": "tool", "tool_call_id": "2", "content": "sunny"},
    {"role": "user", "content": "And?"},
]
BARE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if 'tool_response>\n' in messages[-1].content %}<|answer|>
{%- elif '<tools>' in messages[0].content %}<|tools|>{% else %}<|plain|>{% endif %}{% endif %}"""
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + BARE
SYSTEM_FIRST = (
    """{% for m in messages %}{% if not loop.first and m.role in ('system', loop.previtem.role) %}
{{- raise_exception('system must be first, and turns alternate') }}{% endif %}{% endfor %}"""
    + BARE
)
"""Like Qwen3.5's template, with the alternating turns that Gemma's and Mistral's require."""
OWN_CALLS = "{# <tool_call> tool_call.name #}"
"""The marks by which a template's format of calls is recognised."""


def folder_with(template: str | list[dict[str, str]], model: Path, to: Path) -> Path:
    """Returns a folder of the model with another template."""
    shutil.copytree(model, to)
    settings = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return to


@pytest.fixture(scope="module")
def bare(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(BARE, scripted, tmp_path_factory.mktemp("bare") / "bare")


@pytest.fixture(scope="module")
def model(bare: Path) -> ServedModel:
    return load_served_model("bare", bare, ("bare",))


@pytest.fixture(scope="module")
def server(chat: RunningServer, bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the same cluster with the other template."""
    with serving(chat.client.endpoint, bare, tmp_path_factory.mktemp("words")) as found:
        yield found


def test_tools_calls_and_results_become_text_of_the_messages() -> None:
    rendered = tools_as_text(TALK, (TOOL,))
    assert [one["role"] for one in rendered] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOL["function"]) in rendered[0]["content"] and "<tools>" in rendered[0]["content"]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert rendered[2]["content"] == f"I look.\n{call}" and "tool_calls" not in rendered[2]
    results = "".join(f"<tool_response>\n{one}\n</tool_response>\n" for one in ("22 C", "sunny"))
    assert rendered[3]["content"] == f"{results}And?"
    own = tools_as_text([{"role": "system", "content": "Be brief."}, *HELLO], (TOOL,))
    assert [one["role"] for one in own] == ["system", "user"] and own[0]["content"].startswith("Be brief.\n\n")
    assert tools_as_text(HELLO, ()) == HELLO


def test_tools_precede_the_first_user_message_if_system_is_refused(scripted: Path, tmp_path: Path) -> None:
    stern = load_served_model("stern", folder_with(WITHOUT_SYSTEM, scripted, tmp_path / "stern"), ())
    text = stern.codec.decode(stern.tokenize_conversation(TemplateInput(HELLO, Toolbox((TOOL,)))).tokens)
    assert text.startswith("<|im_start|>user\n") and "<tools>" in text and "\n\nhi<|im_end|>" in text
    own = stern.tokenize_conversation(TemplateInput([{"role": "system", "content": "Be kind."}, *HELLO])).tokens
    assert stern.codec.decode(own).startswith("<|im_start|>user\nBe kind.\n\nhi<|im_end|>")


def test_later_system_messages_become_user_text_where_a_template_refuses_them(scripted: Path, tmp_path: Path) -> None:
    """Codex begins with two, and Claude Code sends one after the user's first message."""
    strict = load_served_model("strict", folder_with(SYSTEM_FIRST, scripted, tmp_path / "strict"), ())

    def text(*messages: tuple[str, str], tools: tuple[Any, ...] = ()) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return strict.codec.decode(strict.tokenize_conversation(TemplateInput(turns, Toolbox(tools))).tokens)

    begin, end = "<|im_start|>", "<|im_end|>\n"
    found = text(("system", "Be kind."), ("system", "Be brief."), ("user", "hi"), ("user", "you"), ("system", "Today"))
    expected = f"{begin}system\nBe kind.\n\nBe brief.{end}{begin}user\nhi\n\nyou\n\nToday{end}"
    assert found == f"{expected}{begin}assistant\n<|plain|>"
    with_tools = text(("user", "hi"), ("system", "Today"), tools=(TOOL,))
    assert with_tools.startswith(f"{begin}system\n") and f"{begin}user\nhi\n\nToday{end}" in with_tools
    refusing = load_served_model(
        "none", folder_with("{{ raise_exception('no words') }}", scripted, tmp_path / "no"), ()
    )
    with pytest.raises(ModelError, match="no words"):
        refusing.tokenize_conversation(TemplateInput(HELLO))


def test_answers_in_a_row_are_joined_where_a_template_refuses_them(scripted: Path, tmp_path: Path) -> None:
    """Clients send a text and the calls that follow it as two messages."""
    strict = load_served_model("strict", folder_with(SYSTEM_FIRST, scripted, tmp_path / "strict"), ())
    answers = ({"role": "assistant", "content": one} for one in ("a", "", "b"))
    talk: Any = [*HELLO, *answers, {"role": "user", "content": "go"}]
    text = strict.codec.decode(strict.tokenize_conversation(TemplateInput(talk)).tokens)
    assert "<|im_start|>assistant\na\n\nb<|im_end|>\n<|im_start|>user\ngo<|im_end|>" in text
    split = [talk[0], {"role": "assistant", "content": "I look."}, {**TALK[1], "content": ""}, *TALK[2:]]
    assert join_turns(split) == join_turns(TALK)


def test_user_text_after_results_joins_the_last_where_a_template_refuses_it(scripted: Path, tmp_path: Path) -> None:
    """Such as Mistral's. Claude Code sends a reminder after results, and users may write there, too."""
    alternating = """{%- set turns = messages | rejectattr('tool_calls') | rejectattr('role', 'eq', 'tool') | list %}
{%- for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}{% endif %}
{%- endfor %}"""
    strict = load_served_model("strict", folder_with(alternating + OWN_CALLS + BARE, scripted, tmp_path / "strict"), ())
    assert not strict.tools_as_text
    text = strict.codec.decode(strict.tokenize_conversation(TemplateInput(TALK, Toolbox((TOOL,)))).tokens)
    assert "tool\n22 C<|im_end|>\n<|im_start|>tool\nsunny\n\nAnd?<|im_end|>\n<|im_start|>assistant" in text


def test_template_that_shows_only_text_has_earlier_calls_in_it(scripted: Path, tmp_path: Path) -> None:
    """Such as LFM2's: a model that does not see its calls repeats them."""
    lfm2 = load_served_model("lfm2", folder_with("{# <|tool_list_start|> #}" + BARE, scripted, tmp_path / "lfm2"), ())
    assert lfm2.tools is not None and not lfm2.tools_as_text
    arguments = {"city": 'Pa"ris', "days": 2, "near": True, "of": ["a", None]}
    call = {"id": "1", "function": {"name": "get_weather", "arguments": arguments}}
    talk: Any = [*HELLO, {"role": "assistant", "content": "I look.", "tool_calls": [call, call]}, *TALK[2:3]]
    text = lfm2.codec.decode(lfm2.tokenize_conversation(TemplateInput(talk, Toolbox((TOOL,)))).tokens)
    written = text.partition("assistant\nI look.<|tool_call_start|>")[2].partition("<|tool_call_end|><|im_end|>")[0]
    assert [json.loads(one.arguments) for one in lfm2.tools.calls(written, (TOOL,))] == [arguments, arguments]


def test_template_named_tool_use_renders_conversations_with_tools(scripted: Path, tmp_path: Path) -> None:
    """As in transformers: models such as Hermes have it beside the default one, which has no tools."""
    own = "{{ messages[0].content }}: {{ tools | map(attribute='function.name') | join }}" + OWN_CALLS
    named = [{"name": "default", "template": BARE}, {"name": "tool_use", "template": own}]
    hermes = load_served_model("hermes", folder_with(named, scripted, tmp_path / "hermes"), ())
    assert hermes.tools is not None and not hermes.tools_as_text

    def prompt(box: Toolbox) -> str:
        return hermes.codec.decode(hermes.tokenize_conversation(TemplateInput(HELLO, box)).tokens)

    assert prompt(Toolbox((TOOL,))).strip() == "hi: get_weather"
    assert prompt(Toolbox()).startswith("<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize("begun", ["<", "e", "im", "|", "end", "A <|im_end|> b", "two  words "])
def test_continued_message_ends_with_its_own_text(model: ServedModel, begun: str) -> None:
    source = TemplateInput([*HELLO, {"role": "assistant", "content": begun}], continue_final=True)
    text = model.codec.decode(model.tokenize_conversation(source).tokens)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begun}"


def test_continued_message_needs_text(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match="its text is empty"):
        model.tokenize_conversation(TemplateInput([{"role": "assistant", "content": " "}], continue_final=True))


def test_tag_in_a_message_begins_no_thinking(model: ServedModel) -> None:
    thinks = replace(model, thinking=SpanTags("<think>", "</think>"))
    asked: Any = [{"role": "user", "content": "What does the <think> tag do?"}]
    assert thinks.tokenize_conversation(TemplateInput(asked)).thinking_mode is ThinkingMode.OPTIONAL
    opening = replace(thinks, template=f"{BARE}<think>\n")
    assert opening.tokenize_conversation(TemplateInput(asked)).thinking_mode is ThinkingMode.BEGUN
    begun = TemplateInput([*HELLO, {"role": "assistant", "content": "<think>Hm"}], continue_final=True)
    assert thinks.tokenize_conversation(begun).thinking_mode is ThinkingMode.BEGUN


def test_thinking_in_channels_is_optional_after_the_prompt_and_can_be_switched_off(model: ServedModel) -> None:
    """gpt-oss's prompts end like its thinking: with the header of a message."""
    tags = find_thinking_tags(("<|start|>", "<|channel|>", "<|message|>", "<|call|>"))
    channels = replace(model, thinking=tags, template="{{ messages[0].content }}<|end|><|start|>assistant")
    assert channels.tokenize_conversation(TemplateInput(HELLO)).thinking_mode is ThinkingMode.OPTIONAL
    off = channels.tokenize_conversation(TemplateInput(HELLO, keywords={"enable_thinking": False}))
    assert off.thinking_mode is ThinkingMode.NONE
    assert model.codec.decode(off.tokens) == "hi<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, "-"),
        ({"enable_thinking": True}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "low"}, "True"),
        ({"enable_thinking": True, "thinking": False}, "False"),
    ],
)
def test_templates_read_whether_to_think_under_both_names(
    model: ServedModel, keywords: dict[str, Any], expected: str
) -> None:
    """Granite's, Kimi's and the first of DeepSeek V3.1 read `thinking`, others `enable_thinking`."""
    reads = replace(model, template="{{ thinking if thinking is defined else '-' }}")
    tokens = reads.tokenize_conversation(TemplateInput(HELLO, keywords=keywords)).tokens
    assert model.codec.decode(tokens) == expected


def test_mistral_templates_receive_ids_of_nine_characters(scripted: Path, tmp_path: Path) -> None:
    """Equal ids stay equal, so that the template can match calls and results."""
    picky = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}
    {{- raise_exception('nine') }}{% endif %}[{{ c.id }}]{% endfor %}
    {%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"""
    folder = folder_with(picky, scripted, tmp_path / "picky")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tool_parser_type": "mistral"}))
    mistral = load_served_model("picky", folder, ())
    call: Any = {"id": "call_0123456789abcdef", "function": {"name": "get_weather", "arguments": {}}}
    kept: Any = {**call, "id": "abcdefgh9"}
    talk: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, kept]},
        {"role": "tool", "tool_call_id": call["id"], "content": "22 C"},
    ]
    text = mistral.codec.decode(mistral.tokenize_conversation(TemplateInput(talk, Toolbox((TOOL,)))).tokens)
    assert (found := re.fullmatch(r"\[([0-9a-f]{9})\]\[abcdefgh9\]\((.{9})\)", text)) and found[1] == found[2]


def test_tools_are_refused_when_the_fallback_is_disabled(bare: Path) -> None:
    off = load_served_model("bare", bare, ("bare",), tool_fallback=False)
    assert off.tools is None and not off.tools_as_text
    with pytest.raises(Problem, match="leave tools out"):
        select_tools(off, [Function(**TOOL["function"])], ToolSelection())


def test_model_description_mentions_the_tool_fallback(server: RunningServer, chat: RunningServer) -> None:
    entry = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert "described in the system prompt" in entry["description"] and "--no-tool-fallback" in entry["description"]
    assert "description" not in httpx.get(f"{chat.url}/v1/models").json()["data"][0]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tool_call_and_its_result_work_through_the_system_prompt(server: RunningServer, choice: Any) -> None:
    """The scripted model leaves out `days`, which the schema requires: only the grammar can enforce it."""
    asked = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=200).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    assert answer["finish_reason"] == "tool_calls"
    talk = [*HELLO, answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "22 C"}]
    body = {"messages": talk, "tools": [TOOL]}
    answered = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=200).json()
    assert answered["choices"][0]["message"]["content"] == text_of(ANSWER)
    free = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO}, timeout=200).json()
    assert free["choices"][0]["message"]["content"] == text_of(PLAIN)
