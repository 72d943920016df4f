"""Compiles grammars to matchers of llguidance, over a model's tokens. Knows grammars; knows nothing of requests.

`check` tries whether a grammar can be compiled at all. It needs no tokenizer, only a `Vocabulary` with its marks:
tokens such as <think> that no bytes match in a grammar. By llguidance's rule, marks are added tokens that are special
or look like a tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from outrider.grammar.constraint import ByGrammar, Constraint, NoEndYet
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import Grammar, SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from tokenizers import AddedToken, Tokenizer


TOKENIZER = "tokenizer.json"
KEPT = 32
# At most one space between two tokens of JSON, because weak models fill their budget with white space. Without a
# pattern the library forces the tokens of everything that is certain, in only one spelling.
SPACE: JsonCompileOptions = {"whitespace_pattern": " "}
_OWN_SPACE = {"whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator"}
# A fifth of the library's default, because a short grammar such as a{1000}{1000} must not take a second.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class Compiler:
    """Compiles grammars over the tokens of the model in `folder`. Its tokenizer is read when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: dict[tuple[Grammar, tuple[int, ...]], LLMatcher] = {}

    def constraint_for(self, sampling: SamplingParams, ends: Iterable[int], start: int) -> Constraint | None:
        """Returns a request's constraint from token number `start` on; `ends` end the text. None: no constraint.

        Raises:
            InvalidRequest, ModelError: as `constraint`.
        """
        by_grammar = self.constraint(sampling.grammar, ends, start)
        return NoEndYet(by_grammar, ends, start, sampling.min_tokens) if sampling.min_tokens else by_grammar

    def constraint(self, grammar: Grammar | None, ends: Iterable[int], start: int) -> Constraint | None:
        """Returns the constraint of `grammar` from token number `start` on; `ends` end the text. None for None.

        Raises:
            InvalidRequest: the grammar can't be compiled.
            ModelError: the model's tokenizer can't be used for grammars.
        """
        if grammar is None:
            return None
        key = grammar, tuple(sorted(ends))
        tokenizer = self._tokenizer(key[1])
        matcher = self._compiled.pop(key, None)
        if matcher is None or _is_spent(matcher):
            matcher = compiled(grammar, tokenizer)
        self._compiled[key] = matcher  # the newest comes last
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return ByGrammar(matcher, tokenizer, start)

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        if ends not in self._tokenizers:
            path = (self._folder or Path()) / TOKENIZER
            try:
                self._tokenizers[ends] = LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(ends))
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"{path} can't be used for grammars ({error}); leave out the grammar, or choose another model"
                ) from None
        return self._tokenizers[ends]


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Compiles a grammar. Raises InvalidRequest if it can't be compiled."""
    try:
        matcher = LLMatcher(tokenizer, _described(grammar), log_level=0, limits=LIMITS)
    except Exception as error:  # the converter of GBNF raises no narrower class
        raise InvalidRequest(f"the {grammar.name} can't be used: {error}") from None
    if matcher.is_error():
        raise InvalidRequest(f"the {grammar.name} can't be used: {matcher.get_error().strip()}")
    return matcher


def _is_spent(matcher: LLMatcher) -> bool:
    """Returns whether a copy has reached the library's limits; then all copies fail, because they share state."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return bool(copy.is_error())


def as_part(grammar: Grammar, name: str) -> dict[str, Any]:
    """Returns a schema, a grammar or a regular expression as part `name` of an "llguidance" grammar."""
    if grammar.kind == "grammar":
        return {"name": name, "lark_grammar": any_to_lark(grammar.text)}
    (part,) = json.loads(_described(grammar))["grammars"]
    return {**part, "name": name}


def _space(schema: str) -> JsonCompileOptions | None:
    """Returns the options for white space: `SPACE`, or None if the schema's `x-guidance` sets them."""
    try:
        parsed = json.loads(schema)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    own = parsed.get("x-guidance", {})
    return SPACE if isinstance(own, dict) and _OWN_SPACE.isdisjoint(own) else None


def _described(grammar: Grammar) -> str:
    """Converts the grammar to the library's own language. GBNF's converter raises no narrower class than Exception."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, _space(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "llguidance":
            return grammar.text
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size`: the number of tokens; `marks`: the special ones, each with its text."""

    size: int = 0
    marks: tuple[tuple[int, str], ...] = ()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Returns the vocabulary of a tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    marks = tuple((token, entry.content) for token, entry in sorted(added.items()) if _is_mark(entry))
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), marks)


def _is_mark(token: AddedToken) -> bool:
    return bool(token.content) and (token.special or (token.content.startswith("<") and token.content.endswith(">")))


CHECKS_KEPT = 128
NO_MARKS = Vocabulary()


@lru_cache(CHECKS_KEPT)
def check(grammar: Grammar, vocabulary: Vocabulary = NO_MARKS) -> None:
    """Checks that a text can begin with this grammar and be rolled back, as drafts are.

    Raises:
        InvalidRequest: the grammar can't be compiled or followed; the message has the library's reason.
    """
    tokenizer = _tokenizer(vocabulary)
    matcher = compiled(grammar, tokenizer)
    constraint = ByGrammar(matcher, tokenizer, 0)
    constraint.allowed([()])
    constraint.check(())
    if not _can_roll_back(matcher):
        raise InvalidRequest(
            f"the {grammar.name} can't be used: it has max_tokens= or stop=; expected a repetition, or suffix="
        )


def _can_roll_back(matcher: LLMatcher) -> bool:
    copy = matcher.deep_copy()
    allowed = int.from_bytes(copy.compute_bitmask(), "little")
    copy.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
    return bool(copy.rollback(1))


class _Bytes:
    """A tokenizer of marks at their own ids, and of single bytes at other ids. The last token ends the text."""

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
def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(vocabulary)))
