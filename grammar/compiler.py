"""Compiles grammars to llguidance matchers over a model's tokens. This module knows grammars, not requests."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from outrider.grammar.constraint import Constraint, error_text
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.messages import Open
from outrider.protocol.sampling import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_CACHED_GRAMMARS = 32
# Allows at most one space between JSON tokens, because weak models fill their budget with white space. Without a
# pattern, the library forces all text that is certain, and allows only one tokenization of it.
JSON_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": " "}
_WHITESPACE_KEYS = {"whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator"}
ANNOTATION_KEYS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
_CLOSABLE_KEYS = ANNOTATION_KEYS | {"type", "properties", "required", "$defs", "definitions", "x-guidance"}
_SUBSCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LITERAL_KEYS = {"enum", "const", "required"}
_COMBINED = re.compile('"(?:allOf|not|if|dependentSchemas)":')
# The library computes forever what `start: /z+/ "z"` forces, which no text ends. The last directive of its kind counts.
_WITHOUT_FORCING = '\n%llguidance {"no_forcing": true}\n'
# A fifth of the library's default, because a short grammar such as a{1000}{1000} must not take a second.
PARSER_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
MAX_CACHED_CHECKS = 128
COMPILE_STACK_BYTES = 2**28  # the library recurses along chains of rules, and a stack overflow would end the process
_STACK_SIZE_LOCK = threading.Lock()  # the size for new threads is the whole process's
# The library makes a state for each remainder: 9,973 take 0.1 s, and a million 20 s or more, in every process.
MAX_REMAINDERS = 20_000
_MULTIPLE = re.compile(r"multipleOf(?:\W|(?<=\\)[nrt])*([\d.]{1,400})")
_ESCAPED_ASCII = re.compile(r"(?<!\\)\\+u00([0-7][0-9A-Fa-f])")  # several: a schema in a grammar in a JSON text
# The library's time and memory grow with the square of their number: 32,000 take ten seconds and 2 GB in every process.
MAX_OPTIONAL_PARTS = 1000
_OPTIONAL_PART = re.compile(r"(?<![\\(])[?*+]|\{\d|\(\||\|[|)]")
_EXPRESSIONS = {"regex": "(?s).+", "json_schema": r'"(?:[^"\\]|\\.)*', "grammar": r"/(?:[^/\\]|\\.)*"}
# ASCII, as in the patterns of a JSON schema and in vLLM. The library's own classes have the digits of all scripts.
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


class GrammarCompiler:
    """Compiles grammars over the tokens of the model in `folder`. Its tokenizer is read when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: dict[tuple[Grammar, tuple[int, ...]], LLMatcher] = {}

    def constraint(
        self, grammar: Grammar | None, ends: Iterable[int], start: int, min_tokens: int = 0
    ) -> Constraint | None:
        """Returns a text's constraint from token number `start` on, or None. `ends` are the end tokens; the text has at
        least `min_tokens`.

        Raises:
            InvalidRequest: the grammar can't be compiled.
            ModelError: the model's tokenizer can't be used for grammars.
        """
        if grammar is None:
            return Constraint(ends, start, min_tokens) if min_tokens else None
        key = grammar, tuple(sorted(ends))
        tokenizer = self._load_tokenizer(key[1])
        matcher = self._compiled.pop(key, None)
        if matcher is None or _is_spent(matcher):
            matcher = compile_grammar(grammar, tokenizer)
        self._compiled[key] = matcher  # the newest comes last
        if len(self._compiled) > MAX_CACHED_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return Constraint(key[1], start, min_tokens, matcher, tokenizer.vocab_size)

    def constraint_of(self, opened: Open) -> Constraint | None:
        """Returns the constraint of the text that OPEN begins or continues, or None. Raises as `constraint`."""
        sampling = opened.sampling
        return self.constraint(sampling.grammar, opened.eos, opened.prompt_len, sampling.min_tokens)

    def _load_tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        if ends not in self._tokenizers:
            path = (self._folder or Path()) / TOKENIZER_FILE
            try:
                self._tokenizers[ends] = LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(ends))
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"{path} can't be used for grammars ({error}); leave out the grammar, or choose another model"
                ) from None
        return self._tokenizers[ends]


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Compiles a grammar, on a thread with a large stack. Raises InvalidRequest if it can't be compiled."""
    text = _ESCAPED_ASCII.sub(lambda found: chr(int(found[1], 16)), grammar.text)
    multiples = [int(digits.replace(".", "") or 0) for digits in _MULTIPLE.findall(text)]
    if math.lcm(*(number // math.gcd(number, 10**64) for number in multiples if number)) > MAX_REMAINDERS:
        raise InvalidRequest(f"the {grammar.name} can't be used: its multipleOf is too large; leave it out")
    expressions = re.findall(_EXPRESSIONS.get(grammar.kind, "$^"), grammar.text)
    if any(len(_OPTIONAL_PART.findall(one)) > MAX_OPTIONAL_PARTS for one in expressions):
        raise InvalidRequest(f"the {grammar.name} has too many optional parts; expected at most {MAX_OPTIONAL_PARTS}")
    try:
        with ThreadPoolExecutor(1) as pool, _STACK_SIZE_LOCK:  # the lock ends first, then the compilation
            usual = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                future = pool.submit(LLMatcher, tokenizer, _to_llguidance(grammar), log_level=0, limits=PARSER_LIMITS)
            finally:
                threading.stack_size(usual)
        matcher = future.result()
    except Exception as error:  # the GBNF converter raises plain Exception
        raise InvalidRequest(f"the {grammar.name} can't be used: {error}") from None
    if matcher.is_error():
        reason = error_text(matcher)
        short = reason.rpartition("\nerror: ")[2].partition("\n")[0]  # without the grammar around the expression
        raise InvalidRequest(f"the {grammar.name} can't be used: {short if grammar.kind == 'regex' else reason}")
    return matcher


def _is_spent(matcher: LLMatcher) -> bool:
    """Returns whether the matcher has reached the library's limits. All copies then fail, because they share state."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return bool(copy.is_error())


def as_part(grammar: Grammar, name: str) -> dict[str, Any]:
    """Returns a schema, a grammar or a regular expression as part `name` of an "llguidance" grammar."""
    text = _to_llguidance(grammar)
    if grammar.kind == "grammar":
        return {"name": name, "lark_grammar": text}
    (part,) = json.loads(text)["grammars"]
    return {**part, "name": name}


def close_objects(schema: Any) -> Any:
    """Excludes properties that an object does not list, unless the schema says otherwise. A schema that combines
    others, which may list them, is returned unchanged."""
    return schema if _COMBINED.search(json.dumps(schema)) else prune(schema, lambda *_: False, closes=True)


def prune(schema: Any, unwanted: Callable[[str, Any], bool], closes: bool = False) -> Any:
    """Returns a schema without the keywords that are `unwanted`, by name and value; a pattern that names properties
    counts as a `pattern`. `closes`: plain objects have only the properties that they list."""
    if isinstance(schema, list):
        return [prune(one, unwanted, closes) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found, inside = dict[str, Any](), closes and "properties" not in schema
    for key, value in schema.items():
        if key in _SUBSCHEMA_MAPS and isinstance(value, dict):
            kept = [name for name in value if key != "patternProperties" or not unwanted("pattern", name)]
            found[key] = {name: prune(value[name], unwanted, closes) for name in kept}
        elif not unwanted(key, value):
            found[key] = value if key in _LITERAL_KEYS else prune(value, unwanted, inside)
    return close_object(found) if closes else found


def close_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Excludes the properties that a plain object does not list, unless it requires one of them."""
    listed, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(needed, list) or set(schema) - _CLOSABLE_KEYS:
        return schema
    return {**schema, "additionalProperties": False} if {*map(str, needed)} <= {*listed} else schema


def _to_llguidance(grammar: Grammar) -> str:
    """Converts the grammar to llguidance's own format. The GBNF converter raises plain Exception on errors."""
    match grammar.kind:
        case "json_schema":
            schema = close_objects(json.loads(grammar.text))
            own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
            space = JSON_WHITESPACE if isinstance(own, dict) and _WHITESPACE_KEYS.isdisjoint(own) else None
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), space)
        case "regex":
            text = re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), grammar.text, flags=re.DOTALL)
            return LLMatcher.grammar_from_regex(text)
        case "llguidance":
            return grammar.text
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text) + _WITHOUT_FORCING)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size`: the number of tokens; `marks`: those that a grammar can't match by their bytes, such as <think>, each
    with its text. By llguidance's rule, marks are added tokens that are special or look like a tag."""

    size: int = 0
    marks: tuple[tuple[int, str], ...] = ()


def get_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Returns the vocabulary of a tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    named = [(token, entry.content, entry.special) for token, entry in sorted(added.items()) if entry.content]
    marks = tuple((token, text) for token, text, special in named if special or (text[0], text[-1]) == ("<", ">"))
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), marks)


@lru_cache(MAX_CACHED_CHECKS)
def check_grammar(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Checks that a text can begin with this grammar and can be rolled back, which drafts require. Needs no tokenizer.

    Raises:
        InvalidRequest: the grammar can't be compiled or followed; the message has the library's reason.
    """
    matcher = compile_grammar(grammar, _create_byte_tokenizer(vocabulary))
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not matcher.is_error():
        matcher.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
    if not matcher.is_error():
        matcher.rollback(1)
    if why := error_text(matcher):
        raise InvalidRequest(f"the {grammar.name} can't be used: {why}")


class _ByteTokenizer:
    """A tokenizer whose tokens are the marks, at their own ids, and single bytes. The last token ends the text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        marks = dict(vocabulary.marks)
        free = (place for place in range(vocabulary.size + 256) if place not in marks)
        self._byte_ids = [next(free) for _ in range(256)]
        self.eos_token_id = max(vocabulary.size, self._byte_ids[-1] + 1)
        self.tokens = [b""] * self.eos_token_id + [b"<end>"]
        for token, text in marks.items():
            self.tokens[token] = text.encode()
        for byte, place in enumerate(self._byte_ids):
            self.tokens[place] = bytes([byte])
        self.special_token_ids = [*marks, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in text]


@lru_cache(4)
def _create_byte_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer(vocabulary)))
