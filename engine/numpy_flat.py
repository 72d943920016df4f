"""Forwards of few tokens by numpy, over the buffers of `engine.flat`: quicker on a CPU than MLX's.

Chains of unlike length pad nothing here: attention goes text by text. Keys and values are written where MLX keeps them,
so that a long piece of a prompt, rollback and the prompt cache are `engine.flat`'s as ever. Not lazy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import mlx.core as mx
import numpy as np

from outrider.engine.flat import FlatCache
from outrider.engine.numpy_net import Layer, Span, hidden
from outrider.engine.piece import Piece

MOST_ROWS = 256  # beyond, MLX is as quick


def spans(layers: Sequence[Layer], pieces: Sequence[Piece], caches: Sequence[FlatCache]) -> Iterator[list[Span]]:
    """Where each layer's attention finds its texts."""
    ends = np.cumsum([piece.count for piece in pieces]).tolist()
    reach = max(piece.row for piece in pieces) + 1, max(piece.end for piece in pieces)
    masks = [hidden(piece.seen(piece.end, None)) for piece in pieces]
    for layer, own in zip(layers, caches, strict=True):
        keys, values = own.on_host(*reach, _like(layer.kv_heads, layer.width))
        yield [
            Span(
                slice(end - piece.count, end),
                keys[piece.row],
                values[piece.row],
                slice(piece.start, piece.end),
                piece.end,
                mask,
            )
            for piece, end, mask in zip(pieces, ends, masks, strict=True)
        ]


@cache
def _like(kv_heads: int, width: int) -> mx.array:
    """Keys of one column, for what buffers are to be like."""
    return mx.zeros((1, kv_heads, 1, width))
