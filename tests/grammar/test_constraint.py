"""The tokens that a grammar allows next, compared with those that its list of texts allows, in any order of queries."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, Tokenizer, decoders, models

from outrider.grammar import compiler
from outrider.grammar.compiler import GrammarCompiler, Vocabulary, check_grammar, get_vocabulary
from outrider.grammar.constraint import Constraint
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import Grammar, SamplingParams

COMPILER = GrammarCompiler(TINY_TARGET)
CODEC = load_codec(find_model(str(TINY_TARGET)))
BYTES = [CODEC.spelling.of(token) for token in range(4096)]
(END,) = CODEC.eos
TEXTS = [b"return None", b"return", b"return self.x", b"raise ValueError", "caf\u00e9".encode(), b"x" * 40]
CHOICE = Grammar("regex", "|".join(text.decode().replace(".", r"\.") for text in TEXTS))


def constraint(grammar: Grammar = CHOICE, start: int = 0, ends: Sequence[int] = (END,)) -> Constraint:
    found = COMPILER.constraint(grammar, ends, start)
    assert found is not None
    return found


def unpack_mask(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def expected_tokens(tokens: Sequence[int]) -> set[int]:
    """Returns the tokens that may follow, found by trying every token."""
    return expected_after(b"".join(BYTES[token] for token in tokens))


@cache
def expected_after(before: bytes) -> set[int]:
    found = {
        token
        for token, spelt in enumerate(BYTES)
        if spelt and token != END and any(text.startswith(before + spelt) for text in TEXTS)
    }
    return found | ({END} if before in TEXTS else set())


def is_correct(mask: np.ndarray, tokens: Sequence[int]) -> bool:
    """Whether the mask allows exactly the expected tokens.

    If the next byte is forced, llguidance may allow only the token that the tokenizer itself would use.
    """
    found, expected = unpack_mask(mask), expected_tokens(tokens)
    forced = len({BYTES[token][:1] for token in expected}) == 1
    return found == expected or (forced and len(found) == 1 and found < expected)


def random_prefixes(seed: int, count: int) -> list[list[int]]:
    """Returns all prefixes of `count` random texts of the grammar."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        tokens: list[int] = []
        while END not in tokens:
            found.append(list(tokens))
            tokens.append(rng.choice(sorted(expected_tokens(tokens))))
    return found


def test_only_tokens_that_lead_to_a_text_are_allowed() -> None:
    texts = random_prefixes(1, 8)
    assert len({tuple(text) for text in texts}) > 20
    for text, mask in zip(texts, constraint().allowed(texts), strict=True):
        assert is_correct(mask, text), CODEC.decode(tuple(text))


def test_allowed_tokens_do_not_depend_on_earlier_queries() -> None:
    texts = random_prefixes(2, 6)
    random.Random(3).shuffle(texts)
    one = constraint()
    invalid = [[5, 6], [*texts[0], 4095, 4095]]
    for text in texts:
        one.allowed([random.Random(len(text)).choice(invalid)])
        masks = one.allowed([text])
        assert is_correct(masks[0], text) and (masks == constraint().allowed([text])).all()


def test_tokens_before_the_start_are_ignored() -> None:
    prompt = list(CODEC.encode("raise Value, and no grammar", special=False))
    for text in random_prefixes(4, 2):
        assert is_correct(constraint(start=len(prompt)).allowed([prompt + text])[0], text)


def test_text_that_broke_the_grammar_is_unconstrained() -> None:
    one = constraint()
    assert (one.allowed([[CODEC.encode("print", special=False)[0], 7]]) == 0xFFFFFFFF).all()
    assert is_correct(one.allowed([[]])[0], [])


LIST = {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        (LIST, '[{"a":1,"b":[1,2]}]', True),
        (LIST, '[{"a": 1, "b": [1, 2]}]', True),
        (LIST, '[{"a":  1}]', False),
        (LIST, "[  1]", False),
        (LIST, "[1,\n2]", False),
        ({**LIST, "x-guidance": {"lenient": True}}, "[  1]", False),
        ({**LIST, "x-guidance": {"whitespace_flexible": True}}, '[\n  {"a":   1}\n]', True),
        ({**LIST, "x-guidance": {"whitespace_pattern": " {1,3}"}}, "[   1]", True),
        ({**LIST, "x-guidance": {"whitespace_pattern": " {1,3}"}}, "[    1]", False),
    ],
)
def test_json_has_at_most_one_space_unless_its_schema_allows_more(
    schema: dict[str, Any], text: str, is_allowed: bool
) -> None:
    """Otherwise a small model may fill its whole token budget with white space."""
    check_text(constraint(Grammar.json_schema(schema)), text, is_allowed)


def check_text(one: Constraint, text: str, is_allowed: bool) -> None:
    tokens = list(CODEC.encode(text, special=False))
    one.allowed([tokens])
    if is_allowed:
        one.check(tokens)
    else:
        with pytest.raises(InvalidRequest):
            one.check(tokens)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        (NAMED, '{"a": 1}', True),
        (NAMED, '{"a": 1, "b"', False),
        (NAMED, '{"b"', False),
        ({"$defs": {"named": NAMED}, "type": "array", "items": {"$ref": "#/$defs/named"}}, '[{"a": 1, "b"', False),
        ({**NAMED, "additionalProperties": True}, '{"a": 1, "b"', True),
        ({**NAMED, "required": ["b"]}, '{"a": 1, "b"', True),
        ({"allOf": [NAMED, {"required": ["b"]}]}, '{"a": 1, "b"', True),
        ({"type": "object"}, '{"b": 1}', True),
    ],
)
def test_object_has_only_the_listed_properties_unless_its_schema_allows_more(
    schema: dict[str, Any], text: str, is_allowed: bool
) -> None:
    """As in llama.cpp and vLLM; otherwise a small model may fill its whole token budget with invented properties."""
    parts = compiler.as_part(Grammar.json_schema(schema), "form")
    whole = {"grammars": [{"name": "answer", "lark_grammar": "start: @form"}, parts]}
    for one in (constraint(Grammar.json_schema(schema)), constraint(Grammar("llguidance", json.dumps(whole)))):
        check_text(one, text, is_allowed)


def test_min_tokens_forbids_an_end_unless_nothing_else_is_allowed() -> None:
    free = COMPILER.constraint(None, (END, 1), 2, min_tokens=3)
    assert free is not None
    for length in range(2, 8):
        allowed = unpack_mask(free.allowed([[7] * length])[0])
        assert ({END, 1} <= allowed) is (length >= 5) and {7, 4095} <= allowed
    choice = COMPILER.constraint(Grammar("regex", "x+|return"), (END,), 0, min_tokens=60)
    assert choice is not None
    short, complete = (list(CODEC.encode(text, special=False)) for text in ("xx", "return"))
    assert END not in unpack_mask(choice.allowed([short])[0]) and unpack_mask(choice.allowed([complete])[0]) == {END}
    assert COMPILER.constraint(None, (END,), 0) is None
    with pytest.raises(InvalidRequest, match="min_tokens is 5; expected at most max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_finished_text_allows_all_end_tokens_and_nothing_else() -> None:
    text = list(CODEC.encode("raise ValueError", special=False))
    assert unpack_mask(constraint(ends=(END, 1)).allowed([text])[0]) == {END, 1}
    assert unpack_mask(constraint(ends=(END, 1)).allowed([[]])[0]).isdisjoint({END, 1})


def test_a_grammar_is_compiled_once() -> None:
    own = GrammarCompiler(TINY_TARGET)
    for number in range(compiler.MAX_CACHED_GRAMMARS + 3):
        own.constraint(Grammar("regex", f"{number}x+"), (END,), 0)
        own.constraint(CHOICE, (END,), 0)
    kept = list(own._compiled)
    assert len(kept) == compiler.MAX_CACHED_GRAMMARS and (CHOICE, (END,)) in kept


# A JSON text that contains a grammar that contains a schema. Each of them may escape characters of the inner one.
AS_TEXT = r'{"grammars": [{"lark_grammar": "start: %json {\"m\\u0075ltipleO\u0066\": \n2001\u0031}"}]}'


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
        ("json_schema", "false", "schema is false"),
        ("regex", "a\n(", "expression can't be used: unclosed group$"),
        ("regex", "(?=a)b", "expression can't be used: look-around, .* is not supported$"),
        ("grammar", "start: a\na: /(/", r"(?s)at 2\(4\): .*unclosed group"),
        ("grammar", "start: nowhere", "unknown name"),
        ("json_schema", '{"$ref": "#"}', "can't be used: it allows no text$"),
        ("grammar", "start: start", "can't be used: it allows no text$"),
        ("grammar", 'root ::= "a" [', "can't be used"),
        ("grammar", "start: <nowhere>", "unknown special token"),
        ("grammar", "start: some\nsome[max_tokens=3]: /a*/", "not supported with max_tokens="),
        ("grammar", 'start: some "b"\nsome[stop="b"]: /a*/', "not supported with max_tokens="),
        ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "multipleOf is too large"),
        ("json_schema", '{"type": "integer", "multipleOf":            20011}', "multipleOf is too large"),
        ("json_schema", '{"type": "integer", "multiple\\u004ff": 20011}', "multipleOf is too large"),
        ("llguidance", AS_TEXT, "multipleOf is too large"),
        ("json_schema", '{"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}', "multipleOf is too large"),
        ("llguidance", '{"grammars": []}', "empty"),
        ("regex", "a?" * 1001, "regular expression has too many optional parts; expected at most 1000"),
        ("regex", ".{0,50}" * 1001, "too many optional parts"),
        ("regex", "(|a)" * 501 + "(b|)" * 500, "too many optional parts"),
        ("json_schema", '{"type": "string", "pattern": "' + "a?" * 1001 + '"}', "too many optional parts"),
        ("json_schema", '{"patternProperties": {"' + "a*" * 1001 + '": {}}}', "too many optional parts"),
        ("grammar", "start: /" + "a?" * 1001 + "/", "too many optional parts"),
    ],
)
def test_grammar_that_cannot_be_compiled_is_refused_with_a_reason(kind: str, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_grammar(Grammar(kind, text), Vocabulary())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("json_schema", "true"),
        ("regex", "[a-z]+ \u00e9*"),
        ("grammar", 'start: "a" start | "b"'),
        ("grammar", 'root ::= "a" root | "b" [0-9]+'),
        ("grammar", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(4000)) + 'a4000: "x"'),
        ("json_schema", '{"type": "integer", "multipleOf": 1048576}'),
        ("json_schema", '{"type": "number", "multipleOf": 0.05}'),
        ("regex", r"(?:a|\?)" * 1001),
        ("json_schema", '{"type": "string", "pattern": "^(' + r"\\?|" * 2000 + 'a)$"}'),
        ("grammar", "start: " + 'w "b"? ' * 1000 + "\nw: /a+/"),
    ],
)
def test_valid_grammar_is_accepted(kind: str, text: str) -> None:
    check_grammar(Grammar(kind, text), Vocabulary())
    assert unpack_mask(constraint(Grammar(kind, text)).allowed([[]])[0])


def test_escapes_are_searched_from_the_beginning_of_a_run_of_backslashes() -> None:
    """From each of its characters, 32,000 would take four seconds."""
    assert compiler._ESCAPED_ASCII.match(r"\\u0041") and not compiler._ESCAPED_ASCII.match(r"\\u0041", 1)


@pytest.mark.parametrize(
    ("pattern", "text", "is_allowed"),
    [
        (r"\d{2}", "42", True),
        (r"\d{2}", "\uff14\uff12", False),
        (r"[\d.-]+", "4.-", True),
        (r"[\d.]+", "\uff14", False),
        (r"\w+", "a_1", True),
        (r"[^\W]+", "\u00e9", False),
        (r"\D\W", "\u00e9\u00e9", True),
        (r"\\d", r"\d", True),
        (r"\\d", r"\4", False),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(pattern: str, text: str, is_allowed: bool) -> None:
    """As in a JSON schema's `pattern`. Some digits of other scripts share their first bytes with emoji."""
    tokens = list(CODEC.encode(text, special=False))
    allowed = unpack_mask(constraint(Grammar("regex", pattern)).allowed([tokens])[0])
    assert END in allowed and (len(allowed) < len(BYTES)) == is_allowed  # after an invalid text, all are allowed


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("yaml", "a", "grammar kind is 'yaml'"),
        ("regex", " ", "the regular expression is empty"),
        ("json_schema", "{", "can't be read"),
        ("json_schema", "[" * 30_000, "can't be read"),
        ("llguidance", "start: /a/", "the grammar can't be read"),
        ("regex", "a" * 70_000, "70000 characters; expected at most 65536"),
    ],
)
def test_invalid_grammar_is_refused_when_constructed(kind: str, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Grammar(kind, text)


def test_exhausted_limits_are_an_error_and_a_new_text_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PARSER_LIMITS", LLParserLimits(step_lexer_fuel=300, verbose_errors=False))
    hard, own = Grammar("regex", "go ((a|b)*a(a|b){12}|c{3,900}d)+"), GrammarCompiler(TINY_TARGET)
    for _ in range(2):
        one = own.constraint(hard, (END,), 0)
        assert one is not None
        easy, costly = [], list(CODEC.encode("go aba", special=False))
        masks = one.allowed([easy, costly])
        assert (masks[1] == 0xFFFFFFFF).all() and not (masks[0] == 0xFFFFFFFF).all()
        one.check(easy)
        with pytest.raises(InvalidRequest, match="can't be followed after 3 tokens"):
            one.check(costly)
        one.allowed([costly])
        with pytest.raises(InvalidRequest, match="can't be followed"):
            one.check(costly)


@pytest.mark.parametrize("text", ['start: /z+/ "z"', 'start: a b\na: "x" | "y"\nb: /z+/ /z+/', 'root ::= "a" root'])
@pytest.mark.parametrize("as_part", [False, True])
def test_grammar_that_no_text_ends_can_be_followed(text: str, as_part: bool) -> None:
    """What it forces never ends either. In a process of its own, because a hang of the library can't be interrupted."""
    program = f"""
import json
from outrider.grammar.compiler import GrammarCompiler, Vocabulary, as_part, check_grammar
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.sampling import Grammar
grammar = Grammar("grammar", {text!r})
if {as_part}:
    parts = [{{"name": "answer", "lark_grammar": 'start: "y" @form'}}, as_part(grammar, "form")]
    grammar = Grammar("llguidance", json.dumps({{"grammars": parts}}))
check_grammar(grammar, Vocabulary())
constraint = GrammarCompiler(TINY_TARGET).constraint(grammar, [0], 0)
tokens = []
for _ in range(40):
    allowed = int.from_bytes(constraint.allowed([tokens])[0].tobytes(), "little")
    tokens.append((allowed & -allowed).bit_length() - 1)
    constraint.check(tokens)
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)


def test_text_after_its_end_is_unconstrained() -> None:
    text = [*CODEC.encode("raise ValueError", special=False), END]
    one = constraint()
    for after in (text, [*text, 7, 8], [*text, END]):
        assert (one.allowed([after]) == 0xFFFFFFFF).all()
        one.check(after)


def test_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be used for grammars"):
        GrammarCompiler(tmp_path).constraint(CHOICE, (END,), 0)


MARKS = Vocabulary(4096, ((7, "<think>"), (8, "</think>"), (3, "[CALL]")))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", "start: <think> /a*/ </think>"),
        ("grammar", "start: <[3]> /a+/ <[7-8]> | <think>"),
        ("grammar", "start: <[4095]> | <[*]>"),
        ("llguidance", '{"grammars": [{"lark_grammar": "start: <think> @form"}, {"name": "form", "json_schema": {}}]}'),
    ],
)
def test_grammar_may_name_special_tokens_of_the_model(kind: str, text: str) -> None:
    check_grammar(Grammar(kind, text), MARKS)
    for other in (Vocabulary(), Vocabulary(4096, MARKS.marks[2:])) if "think" in text else ():
        with pytest.raises(InvalidRequest, match="unknown special token"):
            check_grammar(Grammar(kind, text), other)


def test_marks_are_added_tokens_that_are_special_or_look_like_tags(tmp_path: Path) -> None:
    """llguidance classifies them in the same way: a grammar over bytes allows all tokens except for these."""
    added = [("<a>", False), ("[B]", True), ("plain", False), ("<open", False)]
    tokenizer = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(26)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = get_vocabulary(tokenizer)
    assert found == Vocabulary(30, ((26, "<a>"), (27, "[B]")))
    anything = GrammarCompiler(tmp_path).constraint(Grammar("regex", "(?s:.*)"), [27], 0)
    assert anything is not None
    assert unpack_mask(anything.allowed([[]])) == {*range(26), 28, 29, 27}  # 27 ends the text
