"""Calls constrained by a grammar: mlx-lm's parser reads each as a call that satisfies its schema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.grammar.compiler import GrammarCompiler, get_vocabulary
from outrider.protocol.sampling import Grammar
from outrider.server.answers.choices import Splitter, TextPart, ThinkingPart
from outrider.server.mapping import OutputFormat, build_answer_grammar, to_openai_tool
from outrider.server.model.served import ThinkingMode, TokenizedPrompt, Toolbox
from outrider.server.model.tool_format import SpanTags, ToolCall, find_thinking_tags, find_tool_format
from outrider.server.problems import Problem
from outrider.server.schemas import Function

END = "<|end|>"
THINK = SpanTags("<think>", "</think>")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5, "description": "where"},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
        "area": {"$ref": "#/$defs/area"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["tags"],
    "additionalProperties": False,
    "$defs": {"area": {"enum": [{"x": 1}, {"x": 2.5}, [True, None]]}},
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def function(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    return to_openai_tool(Function(name=name, description=description, parameters=parameters))


TOOLS = (function("flat", "words", FLAT), function("deep", "words", DEEP), function("none", "words", NONE))
SPECIAL = {
    "json_tools": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "mistral headed": ("[TOOL_CALLS]", "[ARGS]"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "laguna": ("<tool_call>", "</tool_call>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "muse_spark": (),
    "minicpm5": (),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
}  # fmt: skip
WITHOUT_DEEP = ("qwen3_coder", "minimax_m2", "minicpm5", "function_gemma", "gemma4")
every_format = pytest.mark.parametrize("name", SPECIAL)


def write_tokenizer(path: Path, marks: Sequence[str]) -> Tokenizer:
    """Saves a tokenizer of bytes and marks in `path`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (*marks, END)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


class Model:
    """A model that generates random text within the grammar."""

    def __init__(self, path: Path, name: str, marks: Sequence[str]) -> None:
        self.tokenizer = write_tokenizer(path, marks)
        self.compiler = GrammarCompiler(path)
        template = "[ARGS]" if name == "mistral headed" else ""
        self.served: Any = SimpleNamespace(
            vocabulary=get_vocabulary(self.tokenizer),
            tools=find_tool_format(template, (), name.split()[0]),
            thinking=THINK,
            codec=SimpleNamespace(eos={self.tokenizer.token_to_id(END)}),
        )
        tags = self.served.tools.tags
        self.frequent = [mark for mark in (tags.start, tags.end, THINK.start, THINK.end, END) if mark]

    def text(self, grammar: Grammar, seed: int) -> str:
        """Generates a text, with marks more frequently than by chance."""
        end, rng = self.tokenizer.token_to_id(END), random.Random(seed)
        constraint = self.compiler.constraint(grammar, [end], 0)
        assert constraint is not None
        frequent = [self.tokenizer.encode(mark, add_special_tokens=False).ids for mark in self.frequent]
        tokens, pending = [], iter([])
        while end not in tokens:
            bits = np.unpackbits(constraint.allowed([tokens]).view(np.uint8), bitorder="little")
            constraint.check(tokens)
            if (wanted := next(pending, None)) is None or not bits[wanted]:
                pending = iter(rng.choice(frequent) if rng.random() < (0.2 if tokens else 0.8) else [])
                wanted = next(pending, None)
            if wanted is None or not bits[wanted]:
                allowed = np.flatnonzero(bits)
                wanted = int(allowed[rng.randrange(len(allowed))])
            tokens.append(wanted)
            assert len(tokens) < 5000
        return self.tokenizer.decode(tokens[:-1], skip_special_tokens=False)

    def parts(self, text: str, box: Toolbox, prompt: TokenizedPrompt, in_form: bool = False) -> list[Any]:
        """Returns the parts of a text that is fed one character at a time."""
        found = Splitter(THINK, self.served.tools, box, prompt.thinking_mode, in_form, by_grammar=True)
        return [part for letter in text for part in found.feed(letter)] + found.finish()


@cache
def validator(schema: str) -> jsonschema.Draft202012Validator:
    """Cached, because `jsonschema.validate` checks the schema itself each time, which takes longer."""
    return jsonschema.Draft202012Validator(json.loads(schema))


def read(parts: list[Any], tools: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of calls, which must satisfy their schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for call in calls:
        validator(json.dumps(schemas[call.name])).validate(json.loads(call.arguments))
    return [call.name for call in calls]


def tools_of(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(tool for tool in TOOLS if tool["function"]["name"] != "deep" or name not in WITHOUT_DEEP)


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "bytes"])
@every_format
def test_required_call_is_generated_in_every_format(tmp_path: Path, name: str, special: bool) -> None:
    model, tools = Model(tmp_path, name, SPECIAL[name] if special else ()), tools_of(name)
    box = Toolbox(tools, required=True, strict=frozenset(["flat", "deep", "none"]))
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), box, None)
    assert grammar is not None
    found = []
    every = {tool["function"]["name"] for tool in tools}
    for seed in range(50):
        text = model.text(grammar, seed)
        parts = model.parts(text, box, TokenizedPrompt(()))
        names = read(parts, tools)
        assert names and not any(isinstance(part, TextPart) for part in parts), text
        found.append(names)
        if seed >= 6 and every == {name for names in found for name in names}:
            break
    assert every == {name for names in found for name in names}
    assert max(map(len, found)) > 1


@pytest.mark.parametrize("name", ["json_tools", "mistral", "kimi_k2", "glm47"])
def test_calls_can_be_limited_to_one(tmp_path: Path, name: str) -> None:
    model, box = Model(tmp_path, name, SPECIAL[name]), Toolbox(TOOLS, required=True, single=True)
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), box, None)
    assert grammar is not None
    for seed in range(10):
        assert len(read(model.parts(model.text(grammar, seed), box, TokenizedPrompt(())), TOOLS)) == 1


@pytest.mark.parametrize(
    ("special", "thinking_mode"),
    [*((True, one) for one in ThinkingMode), (False, ThinkingMode.NONE), (False, ThinkingMode.BEGUN)],
)
@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder"])
def test_strict_tools_constrain_only_the_calls(
    tmp_path: Path, name: str, special: bool, thinking_mode: ThinkingMode
) -> None:
    """Each start tag begins a call that can be parsed."""
    marks = (*SPECIAL[name], "<think>", "</think>") if special else ()
    model, tools, prompt = Model(tmp_path, name, marks), tools_of(name), TokenizedPrompt((), thinking_mode)
    box, seen = Toolbox(tools, strict=frozenset(["flat"])), set[type]()
    grammar = build_answer_grammar(model.served, prompt, box, None)
    assert grammar is not None
    answer = "<think>a <tool_call> b</think>\n\nI look." if thinking_mode is not ThinkingMode.NONE else "I look."
    answer = answer.removeprefix("<think>") if thinking_mode is ThinkingMode.BEGUN else answer
    assert accepts(model, grammar, answer) and not accepts(model, grammar, f"{answer}<tool_call>x")
    for seed in range(10):
        text = model.text(grammar, seed)
        parts = model.parts(text, box, prompt)
        thought = thinking_mode is ThinkingMode.BEGUN or text.startswith("<think>")
        assert len(read(parts, tools)) == (text.partition("</think>")[2] if thought else text).count("<tool_call>")
        seen |= {type(part) for part in parts}
    assert ToolCall in seen and TextPart in seen and (thinking_mode is ThinkingMode.NONE or ThinkingPart in seen)


FORMS = {
    "json_schema": OutputFormat(
        Grammar.json_schema({"type": "object", "maxProperties": 1, **COMPACT}), "response_format"
    ),
    "regex": OutputFormat(Grammar("regex", "[a-z <]{4}/"), "guided_regex"),
    "grammar": OutputFormat(Grammar("grammar", 'root ::= "<tool" [0-9]+ "</think>"'), "grammar"),
}


@pytest.mark.parametrize("thinking_mode", ThinkingMode)
@pytest.mark.parametrize("kind", FORMS)
def test_response_format_with_tools_allows_a_call_or_the_format(
    tmp_path: Path, kind: str, thinking_mode: ThinkingMode
) -> None:
    model, prompt = (
        Model(tmp_path, "json_tools", (*SPECIAL["json_tools"], "<think>", "</think>")),
        TokenizedPrompt((), thinking_mode),
    )
    box, form = Toolbox(TOOLS), FORMS[kind]
    both, alone = (
        build_answer_grammar(model.served, prompt, box, form),
        build_answer_grammar(model.served, prompt, Toolbox(), form),
    )
    assert both is not None and alone is not None and (alone == form.grammar) == (thinking_mode is ThinkingMode.NONE)
    seen = set[type]()
    for seed in range(12):
        for grammar, tools in ((both, box), (alone, Toolbox())):
            parts = model.parts(model.text(grammar, seed), tools, prompt, in_form=True)
            kinds = {type(part) for part in parts} - {ThinkingPart}
            seen |= {type(part) for part in parts}
            assert len(kinds) == 1 and (tools is box or kinds == {TextPart})
            answer = "".join(part.text for part in parts if isinstance(part, TextPart))
            if kinds == {ToolCall}:
                assert read(parts, TOOLS)
            elif kind == "json_schema":
                assert len(json.loads(answer)) <= 1
            else:
                assert re.fullmatch("[a-z <]{4}/" if kind == "regex" else r"<tool\d+</think>", answer)
    assert seen == {TextPart, ToolCall, *(() if thinking_mode is ThinkingMode.NONE else (ThinkingPart,))}


def test_format_follows_the_mark_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with gpt-oss: without the mark, the model would write the format in place of a channel's name."""
    monkeypatch.setattr(f"{__name__}.END", "<|return|>")
    marks = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>")
    model = Model(tmp_path, "json_tools", (*SPECIAL["json_tools"], *marks))
    model.served.thinking = find_thinking_tags(marks)
    prompt, thought = (
        TokenizedPrompt((), ThinkingMode.OPTIONAL),
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant",
    )
    form = build_answer_grammar(model.served, prompt, Toolbox(), FORMS["regex"])
    tools = build_answer_grammar(model.served, prompt, Toolbox(TOOLS, guided=True), None)
    assert form is not None and tools is not None
    for grammar, answer in (
        (form, "abcd/"),
        (tools, "So"),
        (tools, '<tool_call>{"name": "none", "arguments": {}}</tool_call>'),
    ):
        for before in ("", thought):
            assert accepts(model, grammar, f"{before}<|channel|>final<|message|>{answer}")
            assert not accepts(model, grammar, f"{before}{answer}")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"x": {"type": "nonsense"}}}, "f: the JSON schema .* nonsense"),
        ({"type": "array"}, "f: .*arguments"),
        ({"type": "object", "properties": {"x": False}, "required": ["x"]}, "f: .*Unsatisfiable"),
    ],
)
def test_unsatisfiable_tool_schema_error_names_the_tool(tmp_path: Path, parameters: dict[str, Any], words: str) -> None:
    model = Model(tmp_path, "json_tools", SPECIAL["json_tools"])
    with pytest.raises(Problem, match=words) as refused:
        build_answer_grammar(
            model.served, TokenizedPrompt(()), Toolbox((function("f", None, parameters),), required=True), None
        )
    assert refused.value.param == "tools"


def test_a_call_may_require_an_argument_that_its_schema_does_not_list(tmp_path: Path) -> None:
    model = Model(tmp_path, "json_tools", SPECIAL["json_tools"])
    box = Toolbox((function("f", None, {"properties": {"x": {"type": "boolean"}}, "required": ["y"]}),), required=True)
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), box, None)
    assert grammar is not None
    for arguments, is_allowed in (('{"x": true, "y": 1}', True), ('{"y": 1}', True), ('{"x": true}', False)):
        call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert accepts(model, grammar, call) is is_allowed


@every_format
def test_a_schema_of_wrong_types_is_refused_or_ignored(tmp_path: Path, name: str) -> None:
    model = Model(tmp_path, name, SPECIAL[name])
    odd = [True, None, 5, [], {"type": None}, {"type": "string", "enum": 5}]
    of_argument = [*odd, {"anyOf": [True, {"type": "null"}]}, {"anyOf": 5}, {"const": ["x"]}, {"minLength": "x"}]
    schemas = [{"type": "object", "properties": {"x": inner}} for inner in of_argument]
    for schema in (*schemas, {"type": None}, {"type": "objects"}, {"properties": None}, {"x-guidance": 5}):
        box = Toolbox((function("f", None, schema),), required=True)
        with suppress(Problem):
            build_answer_grammar(model.served, TokenizedPrompt(()), box, None)


def test_a_strict_tool_enforces_its_whole_schema(tmp_path: Path) -> None:
    """Other tools' schemas lose what the library does not support."""
    model = Model(tmp_path, "json_tools", SPECIAL["json_tools"])
    tools = (function("f", None, {"type": "object", "properties": {"x": {"type": "string", "format": "odd"}}}),)
    assert build_answer_grammar(model.served, TokenizedPrompt(()), Toolbox(tools, required=True), None) is not None
    with pytest.raises(Problem, match=r"f: .*odd"):
        build_answer_grammar(
            model.served, TokenizedPrompt(()), Toolbox(tools, required=True, strict=frozenset(["f"])), None
        )


def test_unsupported_schema_constrains_only_the_start_of_a_call(tmp_path: Path) -> None:
    model, name = Model(tmp_path, "qwen3_coder", SPECIAL["qwen3_coder"]), "qwen3_coder"
    assert name in WITHOUT_DEEP
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), Toolbox(TOOLS, required=True), None)
    assert grammar is not None
    assert accepts(model, grammar, "<tool_call>whatever <tool_call>") and not accepts(model, grammar, "no")
    assert (
        build_answer_grammar(model.served, TokenizedPrompt(()), Toolbox(TOOLS, strict=frozenset(["deep"])), None)
        is None
    )


def accepts(model: Model, grammar: Grammar, text: str) -> bool:
    end = model.tokenizer.token_to_id(END)
    constraint = model.compiler.constraint(grammar, [end], 0)
    assert constraint is not None
    tokens = [*model.tokenizer.encode(text, add_special_tokens=False).ids, end]
    for length in range(len(tokens)):
        words = constraint.allowed([tokens[:length]])[0]
        if not words[tokens[length] // 32] >> (tokens[length] % 32) & 1:
            return False
    return True


QWEN = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"
MINIMAX = '<minimax:tool_call><invoke name="f"><parameter name="x">{}</parameter></invoke></minimax:tool_call>'
MINICPM = '<function name="f"><param name="x">{}</param></function>'
FUNCTION_GEMMA = "<start_function_call>call:f{{x:<escape>{}<escape>}}<end_function_call>"
GEMMA = '<|tool_call>call:f{{x:<|"|>{}<|"|>}}<tool_call|>'
TEXT: dict[str, Any] = {"type": "string"}
MAYBE: dict[str, Any] = {"anyOf": [TEXT, {"type": "null"}]}
STRINGS = [
    ("qwen3_coder", QWEN, TEXT, ("Paris", "\n two\nlines ", "none", "[1]"), ("Null", "a</parameter>b")),
    ("qwen3_coder", QWEN, MAYBE, ("Paris", "none"), (" [1]", '{"a": 1}')),
    ("glm47", GLM, TEXT, ("7", "null", "a < b"), (" Paris", "Paris\t")),
    ("minimax_m2", MINIMAX, TEXT, ("true", "None"), ("null", "Paris\n", "a</parameter>")),
    ("minimax_m2", MINIMAX, MAYBE, ("true",), ("None", "nil")),
    ("minicpm5", MINICPM, TEXT, ("a > b",), ("<![CDATA[a]]>", " a")),
    ("function_gemma", FUNCTION_GEMMA, TEXT, ("a, b:c", "a{b"), ("a}b",)),
    ("gemma4", GEMMA, TEXT, ('"a", {b:', "a}"), ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "schema", "known", "unknown"), STRINGS)
def test_allowed_string_spellings_are_those_read_back_unchanged(
    tmp_path: Path, name: str, text: str, schema: dict[str, Any], known: tuple[str, ...], unknown: tuple[str, ...]
) -> None:
    """An allowed spelling is read as the same string; one that is not allowed is read as another."""
    model = Model(tmp_path, name, SPECIAL[name])
    box = Toolbox((function("f", None, {"properties": {"x": schema}, "required": ["x"]}),), required=True)
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), box, None)
    assert grammar is not None
    for value in known + unknown:
        whole = text.format(value)
        assert accepts(model, grammar, whole) == (value in known), value
        calls = [part for part in model.parts(whole, box, TokenizedPrompt(())) if isinstance(part, ToolCall)]
        assert ([json.loads(call.arguments) for call in calls] == [{"x": value}]) == (value in known), value


def test_end_tag_inside_a_value_does_not_end_the_call(tmp_path: Path) -> None:
    """If the tags are plain bytes instead of special tokens, a string may contain them."""
    model = Model(tmp_path, "json_tools", ())
    box = Toolbox((function("f", None, {"properties": {"x": TEXT}}),), required=True)
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), box, None)
    assert grammar is not None
    text = '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>b"}}</tool_call>'
    assert accepts(model, grammar, text)
    (call,) = model.parts(text, box, TokenizedPrompt(()))
    assert json.loads(call.arguments) == {"x": "a</tool_call>b"}


def test_a_space_before_the_list_of_calls_is_optional(tmp_path: Path) -> None:
    """Mistral's 7B writes one, Nemo does not. A model must not be forced to write what it has never seen."""
    model = Model(tmp_path, "mistral", SPECIAL["mistral"])
    grammar = build_answer_grammar(model.served, TokenizedPrompt(()), Toolbox(TOOLS, required=True), None)
    assert grammar is not None
    for space in ("", " "):
        assert accepts(model, grammar, f'[TOOL_CALLS]{space}[{{"name": "none", "arguments": {{}}}}]')
