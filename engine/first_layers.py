"""The first layers of an unmodified mlx-lm model alone: its own forward runs as far as a layer, and ends there.

So embedding, positions and masks are the model's own, and of the caches those of the layers before are written. Knows
layers; nothing of texts, or of what is made of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.engine.listening import listen
from outrider.engine.parts import backbone_of
from outrider.protocol.errors import ModelError


class FirstLayers:
    """The first `count` layers of `model`."""

    def __init__(self, model: nn.Module, count: int) -> None:
        """Raises ModelError: the model has no so many."""
        _, layers = backbone_of(model)
        if not 0 < count <= len(layers):
            raise ModelError(f"the model has {len(layers)} layers, so none can be left after {count}")
        self._ends = False
        listen(layers[count - 1], self, self._end)

    def rows(self, call: Callable[[], Any]) -> mx.array:
        """What they make of what `call` feeds to the model, [1, T, D]. Lazy."""
        self._ends = True
        try:
            call()
        except _End as end:
            return end.rows
        finally:
            self._ends = False
        raise ModelError("the model's forward never came to the layer that was to end it")

    def _end(self, _: Any, out: Any) -> None:
        if self._ends:
            raise _End(out[0] if isinstance(out, tuple) else out)


class _End(Exception):  # no error: the layer has been reached
    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self.rows = rows
