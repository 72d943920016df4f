"""Forwards over the buffers of `engine.flat`: rollback, copies and the prompt cache stay that module's. Not lazy.

On the quantised path a token's logits are the same bits however it is fed: alone, in a chain, in a prompt's piece, with
others in company. So chains and neighbours cannot change a text; trees, whose side branches are added up in another
order, are not taken there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import FlatCache
from outrider.engine.ort.forward import Forward, Part, room
from outrider.engine.ort.graph import Array, norm_of
from outrider.engine.piece import Piece
from outrider.engine.positions import Ints
from outrider.engine.taps import AFTER_NORM, BEFORE_NORM


class Ear(Protocol):
    """Who listens to what passes places of a model (`engine.taps`)."""

    def hears(self, key: object) -> bool:
        """Whether rows of this place are wanted."""
        ...

    def told(self, key: object, rows: Array) -> None:
        """What passes there, [T, H]; what is not wanted is dropped."""
        ...


class OrtFlat:
    """The forwards of one target. `norm`: its last."""

    def __init__(self, forward: Forward, norm: nn.Module) -> None:
        self._forward = forward
        self._factors, self._eps = norm_of(norm)

    @property
    def trees(self) -> bool:
        """Whether a tree's nodes get what they would get as chains, but for the rounding of float32."""
        return not self._forward.quantised

    def forward(
        self,
        tokens: Ints,
        pieces: Sequence[Piece],
        caches: Sequence[FlatCache],
        wanted: Sequence[int] | None,
        ear: Ear | None = None,
    ) -> mx.array:
        """Feeds tokens [T], piece after piece; logits of the `wanted`, or of all: [R, V]. `ear` hears hidden rows."""
        places = np.arange(len(tokens)) if wanted is None else np.array(wanted, np.int64)
        logits = np.empty((len(places), self._forward.vocab_size), np.float32)
        heard = self._heard(ear)
        rows = {layer: np.empty((len(tokens), self._forward.width), np.float32) for layer in heard}
        for first, own in _runs(pieces):
            end = first + sum(piece.count for piece in own)
            here = np.flatnonzero((places >= first) & (places < end))
            found = self._run(tokens[first:end], [_part(piece) for piece in own], caches, places[here] - first, heard)
            logits[here] = found["logits"]
            for layer in heard:
                rows[layer][first:end] = found[f"layer{layer}"]
        if ear is not None:
            self._tell(ear, rows)
        return mx.array(logits)

    def _run(
        self, tokens: Ints, parts: Sequence[Part], caches: Sequence[FlatCache], wanted: Ints, heard: Sequence[int]
    ) -> dict[str, Array]:
        reach = room(parts)
        layers = [
            own.on_host(*reach, _like(shape.kv_heads, shape.width))
            for own, shape in zip(caches, self._forward.shapes, strict=True)
        ]
        return self._forward(tokens, parts, layers, wanted, heard)

    def _heard(self, ear: Ear | None) -> list[int]:
        """The layers whose outputs somebody wants."""
        if ear is None:
            return []
        last = len(self._forward.shapes) - 1
        of_norm = ear.hears(BEFORE_NORM) or ear.hears(AFTER_NORM)
        return [layer for layer in range(last + 1) if ear.hears(layer) or (layer == last and of_norm)]

    def _tell(self, ear: Ear, rows: dict[int, Array]) -> None:
        for layer, own in rows.items():
            ear.told(layer, own)
        last = rows.get(len(self._forward.shapes) - 1)
        if last is not None:
            ear.told(BEFORE_NORM, last)
            if ear.hears(AFTER_NORM):
                size = np.sqrt(np.square(last).mean(axis=-1, keepdims=True) + np.float32(self._eps))
                ear.told(AFTER_NORM, last / size * self._factors)


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """What goes together, and its first token: all short pieces; a long one would pad the others, so it goes alone."""
    begin, short = 0, 0
    while short < len(pieces) and not pieces[short].long:
        short += 1
    for own in ([list(pieces[:short])] if short else []) + [[piece] for piece in pieces[short:]]:
        yield begin, own
        begin += sum(piece.count for piece in own)


def _part(piece: Piece) -> Part:
    is_apart = bool(piece.parents) or piece.whole
    return Part(piece.row, piece.start, piece.positions, partial(piece.seen, piece.end) if is_apart else None)


@cache
def _like(kv_heads: int, width: int) -> mx.array:
    """Keys of one column, for what buffers are to be like."""
    return mx.zeros((1, kv_heads, 1, width))
