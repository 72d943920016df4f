"""Chains of a head that drafts several tokens in one forward, which know nothing of each other at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from outrider.drafting.heads.head import BlockHead, MaskedHead
from outrider.drafting.heads.line import Line
from outrider.drafting.heads.links import FEW, Link
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.drafting.heads.pairs import PairFeed, Reader
from outrider.drafting.heads.walk import walk


class Slots(Reader, Protocol):
    """Texts behind which several tokens are drafted at once."""

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads them all, in the order of their rows; the hidden vectors of so many tokens behind each [sum, H]."""
        ...


class Blocks:
    """A `Way`: every chain in one forward, then a walk along it where its tokens are `link`ed."""

    def __init__(
        self, head: BlockHead | MaskedHead, texts: Slots, link: Link | None = None, numpy: NumpyHead | None = None
    ) -> None:
        """`numpy` makes its logits."""
        self._head, self._slots, self._link = head, texts, link
        self._logits = (numpy or head).logits

    @property
    def texts(self) -> Reader:
        return self._slots

    @property
    def depth(self) -> int:
        return self._head.depth

    def draft(self, lines: Sequence[Line], feeds: Sequence[PairFeed]) -> mx.array:
        hidden = self._slots.slots(feeds, [line.depth for line in lines])
        walk(lines, self._logits(hidden), hidden, self._link)
        return hidden

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        text, found = self._slots.open(), []
        for pair in range(tokens.shape[0]):
            feed = PairFeed(text, tokens[pair : pair + 1], features[pair : pair + 1])
            found.append(self._slots.slots([feed], [1]))
            text.roll_back(pair + 1)
        hidden = mx.concatenate(found)
        logits = self._logits(hidden)
        if self._link is None:
            return mx.argmax(logits, axis=-1)
        few = mx.argpartition(-logits, kth=FEW - 1, axis=-1)[:, :FEW]
        gains, _ = self._link(tokens, hidden, few, self._link.begin(tokens.shape[0]))
        best = mx.argmax(mx.take_along_axis(logits, few, axis=-1) + gains, axis=-1, keepdims=True)
        return mx.take_along_axis(few, best, axis=-1)[:, 0]
