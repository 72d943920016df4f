"""The marks of a vocabulary: tokens such as <think> that stand for themselves, for no bytes spell them in a grammar.

Which they are is llguidance's rule: added tokens that are special, or that look like a tag. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Added(Protocol):
    """An added token, as the tokenizers library has it."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """What is asked of the tokenizers library's own."""

    def get_vocab_size(self, with_added_tokens: bool) -> int: ...

    def get_added_tokens_decoder(self) -> Mapping[int, Added]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` tokens; `marks` are the special ones among them, each with its text."""

    size: int = 0
    marks: tuple[tuple[int, str], ...] = ()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """That of a tokenizer of the tokenizers library."""
    added = tokenizer.get_added_tokens_decoder()
    marks = tuple((token, one.content) for token, one in sorted(added.items()) if _is_mark(one))
    return Vocabulary(tokenizer.get_vocab_size(with_added_tokens=True), marks)


def _is_mark(one: Added) -> bool:
    return bool(one.content) and (one.special or (one.content.startswith("<") and one.content.endswith(">")))
