"""Computes the tokens that may come next in a text: a pure function of the tokens since its grammar began.

Target and drafter therefore get the same result, in any order of calls. A matcher has a position in the text, and is
rolled back or advanced by tokens. This module knows tokens, not logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from outrider.protocol.errors import InvalidRequest

MAX_FAULTS = 256  # more than the rows of two forwards
MAX_VOCABULARY_SIZE = 2**19
"""The largest supported vocabulary, in tokens."""
TokenBitmask = np.ndarray[Any, np.dtype[np.uint32]]
"""One bit per token, set if the token is allowed; token v is bit v % 32 of word v // 32."""


class Constraint(Protocol):
    """Determines the tokens allowed in one text. `width`: the number of 32-bit words per row."""

    width: int

    def allowed(self, texts: Sequence[Sequence[int]]) -> TokenBitmask:
        """Returns the tokens that may follow each of these texts, [N, W]."""

    def check(self, text: Sequence[int]) -> None:
        """Raises InvalidRequest if a recent call of `allowed` found that this text breaks the grammar."""


class GrammarConstraint:
    """Allows the tokens that continue a text by a grammar. The grammar begins at token number `start`."""

    def __init__(self, compiled: LLMatcher, tokenizer: LLTokenizer, start: int) -> None:
        """Copies `compiled`, a matcher over the tokens of `tokenizer`."""
        self._compiled, self._start = compiled, start
        self.width, self._ends = -(-tokenizer.vocab_size // 32), frozenset(tokenizer.eos_tokens)
        self._matcher = compiled.deep_copy()
        self._consumed: list[int] = []
        self._faults: dict[tuple[int, ...], str] = {}

    def allowed(self, texts: Sequence[Sequence[int]]) -> TokenBitmask:
        """Returns the tokens that may follow each of these texts, [N, W].

        All tokens are allowed after a text that has ended or breaks the grammar, since that row is not used, and if
        the library fails, which `check` reports.
        """
        words = np.full((len(texts), self.width), 0xFFFFFFFF, np.uint32)
        for row, text in zip(words, texts, strict=True):
            wanted = list(text[self._start :])
            if not self._ends.isdisjoint(wanted):
                continue
            if self._advance_to(wanted):
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error() or len(self._consumed) < len(wanted):
                self._faults[tuple(wanted)] = error_text(self._matcher) or "a token is not allowed"
                row[:] = 0xFFFFFFFF
        while len(self._faults) > MAX_FAULTS:
            del self._faults[next(iter(self._faults))]
        return words

    def check(self, text: Sequence[int]) -> None:
        """See `Constraint.check`.

        Raises:
            InvalidRequest: the text breaks the grammar, or the grammar became too complex there.
        """
        why = self._faults.get(tuple(text[self._start :]))
        if why is not None:
            raise InvalidRequest(f"the grammar can't be followed after {len(text) - self._start} tokens: {why}")

    def _advance_to(self, wanted: list[int]) -> bool:
        """Moves the matcher to the end of these tokens. If they break the grammar, stops there and returns False."""
        if self._matcher.is_error():
            self._matcher, self._consumed = self._compiled.deep_copy(), []
        kept = min(len(self._consumed), len(wanted))
        while self._consumed[:kept] != wanted[:kept]:
            kept -= 1
        if kept < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - kept)
            del self._consumed[kept:]
        took = self._matcher.try_consume_tokens(wanted[kept:])
        self._consumed += wanted[kept : kept + took]
        return len(self._consumed) == len(wanted)


def error_text(matcher: LLMatcher) -> str:
    """Returns the reason of the library's error; empty without one."""
    text = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    return "it allows no text" if text == "NoExtensionBias" else text


class MinTokensConstraint:
    """Excludes end tokens from the first tokens of a text, unless `inner` allows nothing else."""

    def __init__(self, inner: Constraint | None, ends: Iterable[int], start: int, min_tokens: int) -> None:
        """Excludes `ends` among the first `min_tokens` tokens from token number `start` on."""
        self._inner, self._min_length = inner, start + min_tokens
        self.width = inner.width if inner is not None else MAX_VOCABULARY_SIZE // 32
        self._without_ends = np.full(self.width, 0xFFFFFFFF, np.uint32)
        for end in ends:
            if end // 32 < self.width:
                self._without_ends[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))

    def allowed(self, texts: Sequence[Sequence[int]]) -> TokenBitmask:
        if self._inner is not None:
            words = self._inner.allowed(texts)
        else:
            words = np.full((len(texts), self.width), 0xFFFFFFFF, np.uint32)
        for row, text in zip(words, texts, strict=True):
            if len(text) < self._min_length and (row & self._without_ends).any():
                row &= self._without_ends
        return words

    def check(self, text: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.check(text)
