"""Hidden rows off an unmodified mlx-lm model: what chosen layers put out, and what goes into and comes out of its norm.

Layers are counted from 0 and meant by their output. `Taps` lets the chosen layers and the final norm of a model tell
what passes them; they tell nobody unless a forward asks, and nothing is kept behind one. Knows rows of tokens; nothing
of texts, chains or who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.engine.blocks import Floats
from outrider.engine.listening import listen
from outrider.engine.parts import backbone_of, final_norm
from outrider.protocol.errors import ModelError

BEFORE_NORM, AFTER_NORM = "before", "after"
Takes = Callable[[mx.array], None]
"""Is given the hidden rows of a part's tokens, [N, W], lazy."""


@dataclass(frozen=True, slots=True)
class TapPoints:
    """Where rows are tapped; they stand side by side in this order: layers' outputs, before the norm, after it."""

    layers: tuple[int, ...] = ()
    before_norm: bool = False
    after_norm: bool = False

    @property
    def count(self) -> int:
        return len(self.layers) + self.before_norm + self.after_norm

    @property
    def keys(self) -> tuple[object, ...]:
        """What tells them apart, in the order in which their rows stand."""
        return (*self.layers, *[BEFORE_NORM] * self.before_norm, *[AFTER_NORM] * self.after_norm)


class Taps:
    """The taps of one model. `fuse` makes what readers get, [N, W], of the tapped rows [N, points * D]."""

    def __init__(self, model: nn.Module, points: TapPoints, fuse: Callable[[mx.array], mx.array] | None = None) -> None:
        """Raises ModelError: the model has no such layer, no norm behind them, or its layers give no row a token."""
        self._points, self._fuse = points, fuse
        self._seen: dict[object, mx.array] | None = None
        backbone, layers = backbone_of(model)
        for number in points.layers:
            if not 0 <= number < len(layers):
                raise ModelError(f"there is no layer {number}: the model has {len(layers)}, counted from 0")
            listen(layers[number], "taps", partial(self._note_layer, number))
        if points.before_norm or points.after_norm:
            listen(final_norm(backbone), "taps", self._note_norm)
        self._try(model)

    def forward(self, call: Callable[[], mx.array], parts: Sequence[tuple[int, Takes | None]]) -> mx.array:
        """`call`'s forward over one row of parts of so many tokens each; who takes a part's hidden rows gets them."""
        if not any(takes for _, takes in parts):
            return call()
        with self._open() as seen:
            logits = call()
        flat = mx.concatenate([seen[key] for key in self._points.keys], axis=-1)[0]
        if not all(takes for _, takes in parts):
            flat = mx.take(flat, mx.array(_wanted(parts), mx.int32), axis=0)
        hidden, begin = flat if self._fuse is None else self._fuse(flat), 0
        for count, takes in parts:
            if takes is not None:
                takes(hidden[begin : begin + count])
                begin += count
        return logits

    @contextmanager
    def _open(self) -> Iterator[dict[object, mx.array]]:
        """What passes meanwhile; the model's own references are gone afterwards, so that buffers can be used again."""
        seen = self._seen = {}
        try:
            yield seen
        finally:
            self._seen = None

    def hears(self, key: object) -> bool:
        """Whether a forward that is not the model's own is to tell what passes there."""
        return self._seen is not None and key in self._points.keys

    def told(self, key: object, rows: Floats) -> None:
        """Such a forward tells rows [T, D] of its tokens."""
        if self._seen is not None and key in self._points.keys:
            self._seen[key] = mx.array(rows)[None]

    def _note(self, key: object, out: Any) -> None:
        if self._seen is not None:
            self._seen[key] = out[0] if isinstance(out, tuple) else out

    def _note_layer(self, number: int, _: Any, out: Any) -> None:
        self._note(number, out)

    def _note_norm(self, x: Any, out: Any) -> None:
        self._note(BEFORE_NORM, x)
        self._note(AFTER_NORM, out)

    def _try(self, model: nn.Module) -> None:
        """Builds a forward and evaluates none of it: only the shapes are looked at."""
        with self._open() as seen:
            model(mx.array([[0, 0]]))
        shapes = {key: seen[key].shape if key in seen else None for key in self._points.keys}
        for key, shape in shapes.items():
            if shape is None or shape[:-1] != (1, 2):
                raise ModelError(f"the model gives no hidden row a token at {key!r} ({shape}); it can't be tapped")


def _wanted(parts: Sequence[tuple[int, Takes | None]]) -> list[int]:
    """The places in the flat row of the parts that somebody takes."""
    rows: list[int] = []
    begin = 0
    for count, takes in parts:
        rows += range(begin, begin + count) if takes is not None else ()
        begin += count
    return rows
