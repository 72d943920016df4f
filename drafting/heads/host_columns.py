"""The columns of a head's tree by numpy: what grows, and short pieces of text; long ones are MLX's, over the same
buffers. Nothing here is lazy: a forward returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.columns import NO_NUMBERS, PairColumns, Part, made
from outrider.drafting.heads.head import GuessingHead
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.engine.blocks import Floats
from outrider.engine.buffers import with_room
from outrider.engine.columns import Ints
from outrider.engine.numpy_flat import MOST_ROWS
from outrider.engine.numpy_net import Span, hidden
from outrider.protocol.guard import ModelFault


class HostColumns(PairColumns):
    """`PairColumns` of a head in float32 on a CPU."""

    lazy = False

    def __init__(self, head: GuessingHead, numpy: NumpyHead) -> None:
        super().__init__(head)
        self._numpy = numpy
        if self._missing is not None:
            self._missing = np.array(self._missing[0]), 0

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        end, before = len(tokens), self.origin + start - 1
        if not 0 < end - start <= MOST_ROWS:
            super().prefill(tokens, progress, total, start)
            return
        positions = np.arange(start, end, dtype=np.int32)
        masked = hidden(positions[:, None] >= np.arange(end))
        spans = ([Span(slice(0, end - start), *own, slice(start, end), end, masked)] for own in self.buffers(end))
        features = self.heard.between(before, before + end - start)
        if not np.isfinite(self._numpy.rows(np.array(tokens[start:]), features, positions, spans)).all():
            raise ModelFault(NO_NUMBERS)

    def hidden(self, parts: Sequence[Part]) -> Any:
        tokens = np.concatenate([np.array(part.new.tokens)[part.rows] for part in parts])
        features = np.stack([array[index] for part in parts for array, index in part.features()])
        places, own = np.concatenate([part.places for part in parts]), list(map(_spans, parts))
        found = self._numpy.rows(tokens, features, places, zip(*own, strict=True))
        if self._missing is None:
            made(parts, self._numpy.stands_in(found))
        return found

    def logits(self, found: Sequence[Any], back: Sequence[int]) -> mx.array:
        rows = found[0] if len(found) == 1 else np.concatenate(found)[list(back)]
        return mx.array(self._numpy.scores(rows))

    def keep(self, prefix: int, columns: Ints) -> None:
        for buffers in self.buffers(0):
            for buffer in buffers:
                buffer[:, prefix : prefix + len(columns)] = buffer[:, columns]
        self.renumber(prefix, columns)

    def buffers(self, end: int) -> Iterator[tuple[Floats, Floats]]:
        """Each layer's keys and values [kv heads, columns, D] themselves, with room for so many columns."""
        for leaf, layer in zip(self.leaves, self._numpy.layers, strict=True):
            like = mx.zeros((1, layer.kv_heads, 1, layer.width))
            leaf.keys, leaf.values = with_room(leaf.keys, 1, end, like), with_room(leaf.values, 1, end, like)
            mx.eval(leaf.keys, leaf.values)
            yield np.array(leaf.keys, copy=False)[0], np.array(leaf.values, copy=False)[0]


def _spans(part: Part) -> Iterator[Span]:
    """Where each layer's attention finds this part's text."""
    masked = hidden(part.new.seen[part.rows])
    for keys, values in part.text.buffers(part.new.end):  # type: ignore[attr-defined]
        yield Span(part.span, keys, values, part.place, part.new.end, masked)
