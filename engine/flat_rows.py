"""The rows of flat buffers, one a text: opened, closed, copied; what is fed into them is another's.

Those in use stand in front, so that a forward sees a block of rows. Knows rows and lengths; nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine import flat
from outrider.engine.buffers import EARLY
from outrider.engine.cache import window_of
from outrider.engine.flat import FlatCache, Frame
from outrider.engine.prompt_cache import Saved, Start

Layers = tuple[tuple[mx.array, mx.array], ...]


class FlatText:
    """A row of the flat buffers."""

    exact = True

    def __init__(self, row: int, caches: Sequence[FlatCache], rows: FlatRows) -> None:
        self.row, self.length, self._caches, self._rows = row, 0, caches, rows

    @property
    def marks_freely(self) -> bool:
        """Not where a step that is begun is made at once, as by numpy."""
        return self._rows.is_lazy

    def mark(self) -> None:
        """Any length can be returned to."""

    def roll_back(self, length: int) -> None:
        """What lies behind is overwritten by the next forward."""
        self.length = min(length, self.length)

    def keep(self, length: int, columns: Sequence[int]) -> None:
        """Behind the first `length` tokens these columns (ascending) stay, and nothing else."""
        for cache in self._caches:
            cache.gather(self.row, length, np.array(columns, np.int32))
        self.length = length + len(columns)


class FlatRows:
    """One buffer a layer of `model`, for all its texts. `is_lazy`: forwards are made when they are waited for."""

    def __init__(self, model: nn.Module) -> None:
        flat.install(model)
        self._frame = Frame()
        made = make_prompt_cache(model)
        self._caches = [
            FlatCache(self._frame, window_of(cache), EARLY * number // len(made)) for number, cache in enumerate(made)
        ]
        self._texts: list[FlatText] = []
        self.is_lazy = True

    def open(self) -> FlatText:
        self._texts.append(FlatText(len(self._texts), self._caches, self))
        return self._texts[-1]

    def close(self, text: FlatText) -> None:
        """The last row moves into the gap; buffers that nobody uses are given back."""
        last = self._texts.pop()
        if last is not text:
            for cache in self._caches:
                cache.move(last.row, text.row, last.length)
            last.row = text.row
            self._texts[text.row] = last
        if not self._texts:
            for cache in self._caches:
                cache.clear()

    def save(self, text: FlatText, length: int) -> Saved:
        saved = Saved(length, tuple(cache.saved(text.row, length) for cache in self._caches))
        mx.eval(saved.layers)
        return saved

    def adopt(self, text: FlatText, start: Start) -> None:
        self.extend(text, tuple(start.saved.columns(start.length)), start.length)

    def extend(self, text: FlatText, layers: Layers, count: int) -> None:
        """A text goes on with what another has read of it: keys and values [1, H, count, D] of each layer."""
        for cache, (keys, values) in zip(self._caches, layers, strict=True):
            cache.adopt(text.row, keys, values, text.length)
        text.length += count
        mx.eval(self.state())

    def piece(self, text: FlatText, start: int, end: int) -> Layers:
        """Copies of what is remembered of a text's tokens from `start` to `end`, as `extend` takes them; evaluated."""
        layers = tuple(cache.saved(text.row, end, start) for cache in self._caches)
        mx.eval(layers)
        return layers

    def state(self) -> list[Any]:
        return [cache.state for cache in self._caches]
