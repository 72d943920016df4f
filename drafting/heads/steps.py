"""Chains of a head that drafts one token after another, its own vectors for features."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import mlx.core as mx

from outrider.drafting.heads.head import StepHead
from outrider.drafting.heads.line import Line, choose
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.drafting.heads.pairs import PairFeed, Pairs


class Steps:
    """A `Way`: one token of every chain a forward."""

    depth = sys.maxsize

    def __init__(self, head: StepHead, numpy: NumpyHead | None = None) -> None:
        self._head, self.texts = numpy or head, Pairs(head, numpy)

    def draft(self, lines: Sequence[Line], feeds: Sequence[PairFeed]) -> mx.array:
        return grow(lines, feeds, self.texts.forward, self._head.logits, self._head.onward)

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        hidden = self.texts.hidden([PairFeed(self.texts.open(), tokens, features)])
        return mx.argmax(self._head.logits(hidden), axis=-1)


def grow(
    lines: Sequence[Line],
    feeds: Sequence[PairFeed],
    forward: Callable[[Sequence[PairFeed]], mx.array],
    logits: Callable[[mx.array], mx.array],
    onward: Callable[[mx.array], mx.array],
) -> mx.array:
    """Each line's chain behind its feed, one token of all a forward; what came of the feeds themselves, [R, H].

    `forward` gives the hidden vector behind each feed, `onward` the features that stand in for those to come.
    """
    hidden = read = forward(feeds)
    while True:
        chosen = choose(lines, logits(hidden))
        rows = [row for row, line in enumerate(lines) if len(line.picks) < line.depth]
        if not rows:
            return read
        if len(rows) < len(lines):
            lines, places = [lines[row] for row in rows], mx.array(rows, mx.int32)
            hidden, chosen = mx.take(hidden, places, axis=0), mx.take(chosen, places, axis=0)
        features = onward(hidden)
        hidden = forward(
            [
                PairFeed(line.follower.text, chosen[row : row + 1], features[row : row + 1])
                for row, line in enumerate(lines)
            ]
        )
