"""Chains of a head that drafts one token after another, its own vectors for features."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mlx.core as mx

from outrider.drafting.heads.head import StepHead
from outrider.drafting.heads.line import Line, choose
from outrider.drafting.heads.pairs import PairFeed, Pairs


class Steps:
    """A `Way`: one token of every chain a forward."""

    depth = sys.maxsize

    def __init__(self, head: StepHead) -> None:
        self._head, self.texts = head, Pairs(head)

    def draft(self, lines: Sequence[Line], feeds: Sequence[PairFeed]) -> mx.array:
        hidden = read = self.texts.forward(feeds)
        while True:
            chosen = choose(lines, self._head.logits(hidden))
            for row, line in enumerate(lines):
                line.picks.append((chosen, row))
            rows = [row for row, line in enumerate(lines) if len(line.picks) < line.depth]
            if not rows:
                return read
            if len(rows) < len(lines):
                lines, places = [lines[row] for row in rows], mx.array(rows, mx.int32)
                hidden, chosen = mx.take(hidden, places, axis=0), mx.take(chosen, places, axis=0)
            features = self._head.onward(hidden)
            hidden = self.texts.forward(
                [
                    PairFeed(line.follower.text, chosen[row : row + 1], features[row : row + 1])
                    for row, line in enumerate(lines)
                ]
            )

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        hidden = self.texts.hidden([PairFeed(self.texts.open(), tokens, features)])
        return mx.argmax(self._head.logits(hidden), axis=-1)
