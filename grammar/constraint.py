"""The tokens that may come next in one text: a pure function of the tokens since its grammar began.

So target and drafter get the same result, in whatever order they ask. A matcher has a position in the text, and is
rolled back or advanced by tokens. Knows tokens; knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from outrider.protocol.errors import InvalidRequest

FAULTS_KEPT = 256  # more than the rows of two forwards
WIDEST = 2**19
"""The most tokens of a vocabulary."""
Words = np.ndarray[Any, np.dtype[np.uint32]]
"""A bit for each token, set if it is allowed; token v is bit v % 32 of word v // 32."""


class Constraint(Protocol):
    """The tokens allowed in one text. `width`: the number of words of a row."""

    width: int

    def allowed(self, texts: Sequence[Sequence[int]]) -> Words:
        """Returns the tokens that may follow each of these texts, [N, W]."""

    def check(self, text: Sequence[int]) -> None:
        """Raises InvalidRequest if a recent call of `allowed` found that this text breaks the grammar."""


class ByGrammar:
    """The tokens that a grammar allows in one text. The grammar begins at token number `start`."""

    def __init__(self, compiled: LLMatcher, tokenizer: LLTokenizer, start: int) -> None:
        """`compiled`, over the tokens of `tokenizer`, is copied."""
        self._compiled, self._start = compiled, start
        self.width, self._ends = -(-tokenizer.vocab_size // 32), frozenset(tokenizer.eos_tokens)
        self._matcher = compiled.deep_copy()
        self._taken: list[int] = []
        self._faults: dict[tuple[int, ...], str] = {}

    def allowed(self, texts: Sequence[Sequence[int]]) -> Words:
        """Returns the tokens that may follow each of these texts, [N, W].

        All tokens may follow a text that has ended or breaks the grammar, since that row is not used. The same if the
        library fails, which `check` reports.
        """
        words = np.full((len(texts), self.width), 0xFFFFFFFF, np.uint32)
        for row, text in zip(words, texts, strict=True):
            wanted = list(text[self._start :])
            if not self._ends.isdisjoint(wanted):
                continue
            if self._go(wanted):
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error() or len(self._taken) < len(wanted):
                self._faults[tuple(wanted)] = self._matcher.get_error().strip() or "a token is not allowed"
                row[:] = 0xFFFFFFFF
        while len(self._faults) > FAULTS_KEPT:
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

    def _go(self, wanted: list[int]) -> bool:
        """Moves the matcher after these tokens. Returns False, with it further back, if they break the grammar."""
        if self._matcher.is_error():
            self._matcher, self._taken = self._compiled.deep_copy(), []
        kept = min(len(self._taken), len(wanted))
        while self._taken[:kept] != wanted[:kept]:
            kept -= 1
        if kept < len(self._taken):
            self._matcher.rollback(len(self._taken) - kept)
            del self._taken[kept:]
        took = self._matcher.try_consume_tokens(wanted[kept:])
        self._taken += wanted[kept : kept + took]
        return len(self._taken) == len(wanted)


class NoEndYet:
    """Allows no end token among the first tokens of a text, unless `inner` allows nothing else."""

    def __init__(self, inner: Constraint | None, ends: Iterable[int], start: int, least: int) -> None:
        """Excludes `ends` among the first `least` tokens from token number `start` on."""
        self._inner, self._until = inner, start + least
        self.width = inner.width if inner is not None else WIDEST // 32
        self._others = np.full(self.width, 0xFFFFFFFF, np.uint32)
        for end in ends:
            if end // 32 < self.width:
                self._others[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))

    def allowed(self, texts: Sequence[Sequence[int]]) -> Words:
        if self._inner is not None:
            words = self._inner.allowed(texts)
        else:
            words = np.full((len(texts), self.width), 0xFFFFFFFF, np.uint32)
        for row, text in zip(words, texts, strict=True):
            if len(text) < self._until and (row & self._others).any():
                row &= self._others
        return words

    def check(self, text: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.check(text)
