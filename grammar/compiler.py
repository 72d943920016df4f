"""Grammars to matchers of llguidance: compiled once each, over the tokens of one model's tokenizer.

Also says, without any model's tokens, whether a grammar can be compiled at all. Knows grammars; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.grammar import Grammar

TOKENIZER = "tokenizer.json"
KEPT = 32
# A fifth of the library's own: a few letters such as a{1000}{1000} must not hold anybody up for a second.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class Compiler:
    """The grammars over the tokens of the model in `folder`. Its tokenizer is read when first wanted."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: dict[tuple[Grammar, tuple[int, ...]], LLMatcher] = {}

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
        return Constraint(matcher, tokenizer, start)

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        if ends not in self._tokenizers:
            path = (self._folder or Path()) / TOKENIZER
            try:
                self._tokenizers[ends] = LLTokenizer(path.read_text(encoding="utf-8"), eos_token=list(ends))
            except (OSError, ValueError) as error:
                raise ModelError(f"{path} can't serve a grammar ({error}); this model has only free text") from None
        return self._tokenizers[ends]


@lru_cache(KEPT)
def check(grammar: Grammar) -> None:
    """Whether it can be compiled and something can begin by it, whatever the tokens.

    Raises:
        InvalidRequest: no; the message has the library's reason.
    """
    tokenizer = _bytes()
    constraint = Constraint(compiled(grammar, tokenizer), tokenizer, 0)
    constraint.allowed([()])
    constraint.check(())


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


def _described(grammar: Grammar) -> str:
    """In the library's own words."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes."""
    return LLTokenizer("byte")
