"""Whether a grammar can be compiled at all, by a vocabulary's marks alone: no model's tokenizer is needed for it."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from outrider.grammar.compiler import compiled
from outrider.grammar.constraint import ByGrammar
from outrider.grammar.vocabulary import Vocabulary
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.grammar import Grammar

KEPT = 128
NO_MARKS = Vocabulary()


@lru_cache(KEPT)
def check(grammar: Grammar, vocabulary: Vocabulary = NO_MARKS) -> None:
    """Whether something can begin by it, and be taken back, as drafts are.

    Raises:
        InvalidRequest: it can't be compiled, or followed; the message has the library's reason.
    """
    tokenizer = _tokenizer(vocabulary)
    matcher = compiled(grammar, tokenizer)
    constraint = ByGrammar(matcher, tokenizer, 0)
    constraint.allowed([()])
    constraint.check(())
    if not _can_turn_back(matcher):
        raise InvalidRequest(
            f"the {grammar.name} can't be used: it has max_tokens= or stop=; expected a repetition, or suffix="
        )


def _can_turn_back(matcher: LLMatcher) -> bool:
    one = matcher.deep_copy()
    allowed = int.from_bytes(one.compute_bitmask(), "little")
    one.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
    return bool(one.rollback(1))


class _Bytes:
    """Single bytes, at places that no mark has, and the marks at their own. The last token is the end."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        marks = dict(vocabulary.marks)
        free = (place for place in range(vocabulary.size + 256) if place not in marks)
        self._places = [next(free) for _ in range(256)]
        self.eos_token_id = max(vocabulary.size, self._places[-1] + 1)
        self.tokens = [b""] * self.eos_token_id + [b"<end>"]
        for token, text in marks.items():
            self.tokens[token] = text.encode()
        for byte, place in enumerate(self._places):
            self.tokens[place] = bytes([byte])
        self.special_token_ids = [*marks, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self._places[byte] for byte in text]


@lru_cache(4)
def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(vocabulary)))
