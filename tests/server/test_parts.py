"""A text is split into thinking, answer and calls by the model's tags, however it is chunked."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlx_lm.tokenizer_utils import _infer_structural_markers, _infer_thinking, _infer_tool_parser

from outrider.orchestrator.client.dialogue import Chunk, TokenLogprob
from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.choices import ChoiceState, PartUpdate, Splitter, TextPart, ThinkingPart
from outrider.server.mapping import parse_arguments, past_tool_call
from outrider.server.model.served import ThinkingMode, TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import (
    SpanTags,
    ToolCall,
    ToolFormat,
    find_thinking_tags,
    find_tool_format,
    infer_parser,
)

THINK = SpanTags("<think>", "</think>")
BOX = Toolbox(tools=({"type": "function", "function": {"name": "f", "parameters": {}}},))
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
TEXT = f"<think>\nI <see> it</think>\n\nWell, a < b. {CALL}\n{CALL}"
PARTS = [("T", "I <see> it"), ("S", "Well, a < b. "), ("C", '{"x": "<b>"}'), ("C", '{"x": "<b>"}')]
MARKS = (
    "<minimax:tool_call>", "<|tool_call>", "<tool_call|>", "<start_function_call>", "<longcat_tool_call>", "<arg_key>",
    "<|tool_list_start|>", "<|tool_call_start|>", "<tool_call>\\n<function=", "<tool_call>\n<function=",
    "<|tool_calls_section_begin|>", '<function name="', '<param name="', "[TOOL_CALLS]", "<atem:function_calls>",
    "<tool_call>", "tool_call.name",
)  # fmt: skip
TOKENS = (
    "<think>", "</think>", "<longcat_think>", "</longcat_think>", "<|think:start|>", "<|think:end|>", "<|channel>",
    "<channel|>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|tool_call_start|>", "<|tool_call_end|>",
)  # fmt: skip


def json_tools() -> ToolFormat:
    found = find_tool_format(None, (), "json_tools")
    assert found is not None
    return found


def joined(parts: list[Any]) -> list[tuple[str, str]]:
    """Joins adjacent parts of one kind; calls stay separate."""
    found: list[tuple[str, str]] = []
    for part in parts:
        kind = {TextPart: "S", ThinkingPart: "T", ToolCall: "C"}[type(part)]
        text = part.arguments if isinstance(part, ToolCall) else part.text
        if found and found[-1][0] == kind != "C":
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def test_parts_do_not_depend_on_how_the_text_is_chunked() -> None:
    random = Random(1)
    for _ in range(200):
        splitter, parts, at = Splitter(THINK, json_tools(), BOX), [], 0
        while at < len(TEXT):
            size = random.randint(1, 12)
            parts += splitter.feed(TEXT[at : at + size])
            at += size
        assert joined(parts + splitter.finish()) == PARTS


@pytest.mark.parametrize(
    ("text", "thinking_mode", "expected"),
    [
        ("it</think> yes", ThinkingMode.BEGUN, [("T", "it"), ("S", "yes")]),
        ("it never ends", ThinkingMode.BEGUN, [("T", "it never ends")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ThinkingMode.NONE, [("C", "{}")]),
        ('<tool_call>{"name": "f", "argu', ThinkingMode.NONE, [("S", '<tool_call>{"name": "f", "argu')]),
        ("<tool_call>nonsense</tool_call> so", ThinkingMode.NONE, [("S", "<tool_call>nonsense</tool_call>so")]),
        ("a <tool_", ThinkingMode.NONE, [("S", "a <tool_")]),
        ("</think> alone", ThinkingMode.OPTIONAL, [("S", "</think> alone")]),
    ],
)
def test_calls_that_are_cut_off_or_unreadable_are_kept_as_text(
    text: str, thinking_mode: ThinkingMode, expected: Any
) -> None:
    splitter = Splitter(THINK, json_tools(), BOX, thinking_mode)
    assert joined(splitter.feed(text) + splitter.finish()) == expected


@pytest.mark.parametrize("thinking_mode", [ThinkingMode.OPTIONAL, ThinkingMode.NONE])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_thinking_tag_inside_the_answer_is_text(thinking_mode: ThinkingMode, size: int) -> None:
    text = f"<think>Hm</think> Write <think> first, then </think>. {CALL}"
    splitter = Splitter(THINK, json_tools(), BOX, thinking_mode)
    parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
    expected = [("T", "Hm"), ("S", "Write <think> first, then </think>. "), ("C", '{"x": "<b>"}')]
    assert joined(parts + splitter.finish()) == expected


HARMONY = find_thinking_tags(("<|start|>", "<|channel|>", "<|message|>", "<|call|>"))
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
SOLAR = ("<|begin|>", "<|think|>", "<|content|>", "<|end|>")
MINIMAX_M3 = ("<mm:think>", "</mm:think>")
HARMONY_END = "<|end|><|start|>assistant<|channel|>"


@pytest.mark.parametrize("in_form", [False, True])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|channel|>analysis<|message|>Hm {HARMONY_END}final<|message|>Four", [("T", "Hm "), ("S", "Four")]),
        ("<|channel|>final<|message|>Four", [("S", "Four")]),
        (f"<|channel|>analysis<|message|>a{HARMONY_END}analysis<|message|>b", [("T", "ab")]),
    ],
)
def test_channels_are_split_into_thinking_and_answer(text: str, expected: Any, size: int, in_form: bool) -> None:
    splitter = Splitter(HARMONY, json_tools(), BOX, in_form=in_form)
    parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
    assert joined(parts + splitter.finish()) == expected


def test_text_between_two_channels_is_part_of_the_answer() -> None:
    text = f"<|channel|>commentary<|message|>I look. {HARMONY_END}analysis<|message|>Hm{HARMONY_END}final<|message|>So"
    splitter = Splitter(HARMONY, json_tools(), BOX)
    assert joined(splitter.feed(text) + splitter.finish()) == [("S", "I look. "), ("T", "Hm"), ("S", "So")]


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (("[THINK]", "[/THINK]"), "[THINK]Hm[/THINK]Four"),
        (("<seed:think>", "</seed:think>"), "<seed:think>Hm</seed:think>Four"),
        (COHERE, "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Four<|END_RESPONSE|>"),
        (("<|inner_prefix|>", "<|inner_suffix|>"), "<|inner_prefix|>Hm<|inner_suffix|>Four"),
        (SOLAR, "<|think|>Hm<|end|><|begin|>assistant<|content|>Four"),
        (MINIMAX_M3, "<mm:think>Hm</mm:think>Four"),
    ],
)
def test_reasoning_of_other_families_is_found(vocabulary: tuple[str, ...], text: str) -> None:
    """Those of Magistral, Seed-OSS, Command A, Apertus, Solar Open and MiniMax-M3."""
    splitter = Splitter(find_thinking_tags(vocabulary))
    assert joined(splitter.feed(text) + splitter.finish()) == [("T", "Hm"), ("S", "Four")]


@pytest.mark.parametrize(("vocabulary", "mark"), [(SOLAR, "<|content|>"), (MINIMAX_M3, "</mm:think>")])
def test_mark_of_an_answer_without_reasoning_is_not_text(vocabulary: tuple[str, ...], mark: str) -> None:
    splitter = Splitter(find_thinking_tags(vocabulary))
    assert joined(splitter.feed(f"{mark}Four") + splitter.finish()) == [("S", "Four")]


def test_marks_around_an_answer_of_kimi_k3_are_not_text() -> None:
    tags = find_thinking_tags(("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))
    splitter = Splitter(tags)
    text = "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Four<|close|>response<|sep|>"
    assert joined(splitter.feed(text) + splitter.finish()) == [("T", "Hm"), ("S", "Four")]


def test_half_a_surrogate_pair_in_a_call_is_replaced() -> None:
    """JSON can escape it, UTF-8 can't encode it; a model writes it, or a client sends it back."""
    splitter = Splitter(None, json_tools(), BOX)
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>'
    assert joined(splitter.feed(text) + splitter.finish()) == [("C", '{"x": "?"}')]
    assert parse_arguments('{"x": "\\ud83d"}') == {"x": "?"} and parse_arguments('{"x": "\\ud83d\\ude00"}') == {
        "x": "😀"
    }


@pytest.mark.parametrize("arguments", ['{"x": ', "two words", "[1]", "null", "[" * 10**5])
def test_past_arguments_that_are_not_an_object_are_wrapped_in_one(arguments: str) -> None:
    """Most templates iterate over the arguments of a call, and fail on anything else."""
    parsed = {"[1]": [1], "null": None}.get(arguments, arguments)
    assert past_tool_call("f", arguments, None)["function"] == {"name": "f", "arguments": {"arguments": parsed}}


def test_unexpected_tags_are_kept_as_text() -> None:
    splitter = Splitter(None, json_tools(), Toolbox())
    assert joined(splitter.feed(TEXT) + splitter.finish()) == [("S", TEXT)]


def test_format_without_an_end_tag_extends_to_the_end_of_the_text() -> None:
    splitter = Splitter(None, find_tool_format(None, (), "mistral"), BOX)
    parts = splitter.feed('So [TOOL_CALLS]f[ARGS]{"x": 1}f[ARGS]{}')
    assert joined(parts + splitter.finish()) == [("S", "So "), ("C", '{"x": 1}'), ("C", "{}")]


@pytest.mark.parametrize("before", ["[CALL_ID]abcdefgh1[ARGS]", "<SPECIAL_32>", "<SPECIAL_33>abcdefgh1<SPECIAL_32>"])
@pytest.mark.parametrize("size", [1, 100])
def test_call_id_and_unnamed_tokens_are_not_part_of_the_function_name(size: int, before: str) -> None:
    """As in Mistral Small 3.2, and in its copies with the tokenizer of 3.1."""
    splitter = Splitter(None, find_tool_format(None, (), "mistral"), BOX)
    text = f'So [TOOL_CALLS]f{before}{{"x": "[CALL_ID]"}}[TOOL_CALLS]g[ARGS]{{}}'
    parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
    calls = [part for part in parts + splitter.finish() if isinstance(part, ToolCall)]
    assert calls == [ToolCall("f", '{"x": "[CALL_ID]"}'), ToolCall("g", "{}")]


def test_arguments_may_be_named_parameters() -> None:
    """As in Llama's format, which many models have learned."""
    splitter = Splitter(None, json_tools(), BOX)
    text = '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>'
    assert splitter.feed(text) == [ToolCall("f", '{"x": 1}')]


def test_tool_formats_and_thinking_tags_are_inferred_as_by_mlx_lm() -> None:
    random = Random(2)
    for _ in range(2000):
        template = " ".join(random.sample(MARKS, random.randint(0, 3)))
        vocabulary = {token: i for i, token in enumerate(random.sample(TOKENS, random.randint(0, 9)))}
        theirs = SimpleNamespace(
            chat_template=template, get_vocab=lambda found=vocabulary: found, encode=lambda *a, **b: []
        )
        assert infer_parser(template, vocabulary) == _infer_tool_parser(theirs)
        start, end, *_ = _infer_thinking(theirs)
        tags = find_thinking_tags(vocabulary)
        assert (tags.start, tags.end) == (start, end) if tags is not None else start is None
        assert tags is None or tags.marks in ((), _infer_structural_markers(theirs))


def test_calls_of_minimax_m3_are_not_taken_for_json() -> None:
    """Each of its tags follows a mark, and arguments have tags of their own. mlx-lm has no parser for them."""
    template = "{% set mark = ']<]minimax[>[' %}{{ mark ~ '<tool_call>' ~ mark ~ '<invoke name=\"' ~ tool_call.name }}"
    for named in (None, "json_tools"):  # in a copy that mlx-lm has converted
        assert find_tool_format(template, ("<mm:think>",), named) is None


@pytest.mark.parametrize("rest", ["<tool_call>", '<tool_call>\n{"name": "f", "argu', "<tool_ca"])
def test_incomplete_call_is_dropped_when_the_text_was_cut(rest: str) -> None:
    for cut, words in ((True, []), (False, [("S", rest)])):
        splitter = Splitter(THINK, json_tools(), BOX)
        parts = splitter.feed(f"Well. {CALL}") + splitter.feed(rest) + splitter.finish(cut)
        assert joined(parts) == [("S", "Well. "), ("C", '{"x": "<b>"}'), *words]
    words_alone = Splitter(THINK, json_tools(), BOX)
    assert joined(words_alone.feed("1 <") + words_alone.finish(cut=True)) == [("S", "1 <")]


def test_tokens_of_a_chunk_become_one_update_for_each_kind_of_part() -> None:
    words = ("<think>", "a", "b", "</think>", "c", "d", CALL, "e")
    spelled = SimpleNamespace(feed=lambda tokens: SimpleNamespace(text=words[tokens[0]]))
    choice = ChoiceState(
        0, TokenizedPrompt(()), SamplingParams(), Splitter(THINK, json_tools(), BOX), detokenizer=cast("Any", spelled)
    )
    assert choice.add(Chunk(words[0], (0,), (TokenLogprob(0, 0.0),))) == []
    tokens = tuple(range(1, len(words)))
    thought, text, call, rest = choice.add(Chunk("", tokens, tuple(TokenLogprob(token, 0.0) for token in tokens)))
    assert isinstance(thought, PartUpdate) and thought.part == ThinkingPart("ab")
    assert [token for chunk in thought.chunks for token in chunk.token_ids] == list(range(len(words)))
    assert isinstance(call, PartUpdate) and isinstance(call.part, ToolCall)
    assert (text, rest) == (PartUpdate(choice, TextPart("cd")), PartUpdate(choice, TextPart("e")))


def test_a_finished_choice_joins_text_and_thinking_and_keeps_each_call() -> None:
    choice = ChoiceState(0, TokenizedPrompt(()), SamplingParams(), Splitter(THINK, json_tools(), BOX))
    for character in TEXT:
        choice.add(Chunk(character, (1,)))
    assert [type(part) for part in choice.parts] == [ThinkingPart, TextPart, ToolCall, ToolCall]
    assert joined(choice.parts) == PARTS and choice.text == "Well, a < b. "
