"""Chains by the target's first layers, where it remembers its texts: what they write there the verify writes again.

Stands where `Follower` and `Steps` stand for heads that read what the target thought.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from outrider.drafting.heads.early_exit import EarlyExit
from outrider.drafting.heads.line import Line
from outrider.drafting.heads.pairs import PairFeed
from outrider.drafting.heads.steps import grow
from outrider.engine.first_layers import FirstLayers
from outrider.engine.flat_rows import FlatText
from outrider.engine.sampling import Sampler
from outrider.engine.texts import Feed, FlatTexts


class Exits:
    """A `Way`, with `texts` of the target once these are known."""

    depth = sys.maxsize

    def __init__(self, exit: EarlyExit, layers: FirstLayers) -> None:
        self._exit, self._layers = exit, layers
        self.texts: Any = None

    def beside(self, texts: FlatTexts) -> None:
        self.texts = texts

    def draft(self, lines: Sequence[Line], feeds: Sequence[PairFeed]) -> mx.array:
        return grow(lines, feeds, self._rows, self._exit.logits, lambda hidden: hidden[:, :0])

    def _rows(self, feeds: Sequence[PairFeed]) -> mx.array:
        rows: mx.array = self.texts.first(self._layers, [Feed(feed.text, feed.tokens, feed.count) for feed in feeds])
        return rows


class ExitFollower:
    """A text of the target, fed but for its last token. `sampler` chooses what is drafted for it."""

    def __init__(self, text: FlatText, sampler: Sampler) -> None:
        self.text, self.sampler = text, sampler
        self._closed = False

    @property
    def length(self) -> int:
        return self.text.length

    def is_up_to(self, tokens: Sequence[int]) -> bool:
        return not self._closed and self.length == len(tokens) - 1

    def catch_up(self, tokens: Sequence[int]) -> PairFeed:
        """The last token; what its keys and values are the verify finds anew."""
        return PairFeed(self.text, mx.array(list(tokens[-1:]), mx.int32), mx.zeros((1, 0)), stays=False)

    def has_read(self) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """It drafts no more; the text is the target's."""
        self._closed = True
