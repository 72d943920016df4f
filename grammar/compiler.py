"""Grammars to matchers of llguidance: compiled once each, over the tokens of one model's tokenizer.

Knows grammars; nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from outrider.grammar.constraint import ByGrammar, Constraint, NoEndYet
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.grammar import Grammar
from outrider.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

TOKENIZER = "tokenizer.json"
KEPT = 32
# Between two words of JSON one space or none: weak models fill their budget with white space. Without any pattern the
# library forces the tokens of all that is certain, one spelling of it alone.
SPACE: JsonCompileOptions = {"whitespace_pattern": " "}
_OWN_SPACE = {"whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator"}
# A fifth of the library's own: a few letters such as a{1000}{1000} must not hold anybody up for a second.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class Compiler:
    """The grammars over the tokens of the model in `folder`. Its tokenizer is read when first wanted."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: dict[tuple[Grammar, tuple[int, ...]], LLMatcher] = {}

    def asked(self, sampling: SamplingParams, ends: Iterable[int], start: int) -> Constraint | None:
        """What a request allows from the `start`th token of a text on, which one of `ends` ends; None: everything.

        Raises:
            InvalidRequest, ModelError: as `constraint`.
        """
        by_grammar = self.constraint(sampling.grammar, ends, start)
        return NoEndYet(by_grammar, ends, start, sampling.min_tokens) if sampling.min_tokens else by_grammar

    def constraint(self, grammar: Grammar | None, ends: Iterable[int], start: int) -> Constraint | None:
        """What `grammar` allows from the `start`th token of a text on, which one of `ends` ends. None for None.

        Raises:
            InvalidRequest: it can't be compiled.
            ModelError: the model's tokenizer can't be used for this.
        """
        if grammar is None:
            return None
        key = grammar, tuple(sorted(ends))
        tokenizer = self._tokenizer(key[1])
        matcher = self._compiled.pop(key, None)
        if matcher is None or _is_spent(matcher):
            matcher = compiled(grammar, tokenizer)
        self._compiled[key] = matcher  # the newest stand last
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
                    f"{path} can't be used for grammars ({error}); this model can only generate free text"
                ) from None
        return self._tokenizers[ends]


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises InvalidRequest when it can't be."""
    try:
        matcher = LLMatcher(tokenizer, _described(grammar), log_level=0, limits=LIMITS)
    except Exception as error:  # the converter of GBNF raises nothing narrower
        raise InvalidRequest(f"the {grammar.name} can't be used: {error}") from None
    if matcher.is_error():
        raise InvalidRequest(f"the {grammar.name} can't be used: {matcher.get_error().strip()}")
    return matcher


def _is_spent(matcher: LLMatcher) -> bool:
    """Where one copy came to the library's limits no other goes on: they share what they learn."""
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return bool(copy.is_error())


def as_part(grammar: Grammar, name: str) -> dict[str, Any]:
    """A schema, a grammar or a regular expression as one of several in "llguidance", which others call `name`."""
    if grammar.kind == "grammar":
        return {"name": name, "lark_grammar": any_to_lark(grammar.text)}
    (part,) = json.loads(_described(grammar))["grammars"]
    return {**part, "name": name}


def _space(schema: str) -> JsonCompileOptions | None:
    """White space as here, unless the schema says in `x-guidance` what there may be."""
    try:
        told = json.loads(schema)
    except ValueError:
        return None
    if not isinstance(told, dict):
        return None
    own = told.get("x-guidance", {})
    return SPACE if isinstance(own, dict) and _OWN_SPACE.isdisjoint(own) else None


def _described(grammar: Grammar) -> str:
    """In the library's own words. What GBNF's converter raises is nothing narrower than Exception."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, _space(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "llguidance":
            return grammar.text
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
