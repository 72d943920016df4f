"""Computes the tokens that may come next in a text: a pure function of the tokens since its grammar began.

Target and drafter therefore get the same result, in any order of calls. A matcher has a position in the text, and is
rolled back or advanced by tokens. This module knows tokens, not logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from outrider.protocol.errors import InvalidRequest

MAX_FAULTS = 256  # more than the rows of two forwards
MAX_VOCABULARY_SIZE = 2**19
"""The largest supported vocabulary, in tokens."""
TokenBitmask = np.ndarray[Any, np.dtype[np.uint32]]
"""One bit per token, set if the token is allowed; token v is bit v % 32 of word v // 32."""


class Constraint:
    """Determines the tokens allowed in one text: those that continue it by its grammar, if it has one, and no end token
    among the first ones, unless the grammar allows nothing else. `width`: the number of 32-bit words per row."""

    def __init__(
        self,
        ends: Iterable[int],
        start: int,
        min_tokens: int = 0,
        compiled: LLMatcher | None = None,
        vocabulary_size: int = MAX_VOCABULARY_SIZE,
    ) -> None:
        """`compiled`, the grammar, begins at token number `start`; the `min_tokens` tokens from there on are none of
        `ends`."""
        self.width = -(-vocabulary_size // 32)
        self._compiled, self._ends, self._start, self._min_length = compiled, frozenset(ends), start, start + min_tokens
        self._without_ends = np.full(self.width, 0xFFFFFFFF, np.uint32)
        for end in self._ends:
            if end // 32 < self.width:
                self._without_ends[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._faults: dict[tuple[int, ...], str] = {}

    def allowed(self, texts: Sequence[Sequence[int]]) -> TokenBitmask:
        """Returns the tokens that may follow each of these texts, [N, W].

        The grammar allows all tokens after a text that has ended or breaks it, since that row is not used, and if the
        library fails, which `check` reports.
        """
        words = np.full((len(texts), self.width), 0xFFFFFFFF, np.uint32)
        for row, text in zip(words, texts, strict=True):
            if self._compiled is not None:
                self._follow_grammar(self._compiled, list(text[self._start :]), row)
            if len(text) < self._min_length and (row & self._without_ends).any():
                row &= self._without_ends
        while len(self._faults) > MAX_FAULTS:
            del self._faults[next(iter(self._faults))]
        return words

    def check(self, text: Sequence[int]) -> None:
        """Raises InvalidRequest if a recent call of `allowed` found that this text breaks the grammar, or that the
        grammar became too complex there."""
        if (why := self._faults.get(tuple(text[self._start :]))) is not None:
            raise InvalidRequest(f"the grammar can't be followed after {len(text) - self._start} tokens: {why}")

    def _follow_grammar(self, compiled: LLMatcher, wanted: list[int], row: TokenBitmask) -> None:
        """Moves the matcher to the end of these tokens, and sets `row` to those that may follow."""
        if not self._ends.isdisjoint(wanted):
            return
        if self._matcher is None or self._matcher.is_error():
            self._matcher, self._consumed = compiled.deep_copy(), []
        matcher, kept = self._matcher, min(len(self._consumed), len(wanted))
        while self._consumed[:kept] != wanted[:kept]:
            kept -= 1
        if kept < len(self._consumed):
            matcher.rollback(len(self._consumed) - kept)
            del self._consumed[kept:]
        took = matcher.try_consume_tokens(wanted[kept:])
        self._consumed += wanted[kept : kept + took]
        if len(self._consumed) == len(wanted):
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error() or len(self._consumed) < len(wanted):
            self._faults[tuple(wanted)] = error_text(matcher) or "a token is not allowed"
            row[:] = 0xFFFFFFFF


def error_text(matcher: LLMatcher) -> str:
    """Returns the reason of the library's error; empty without one."""
    text = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    return "it allows no text" if text == "NoExtensionBias" else text
