"""`Columns` of a small dense model on the CPU, computed with numpy: for drafters whose forwards are shorter than MLX's
bookkeeping for them.

`engine.numpy_net` says which models; the check at load (`engine.selfcheck`) holds its logits to the model's own.
Nothing here is lazy: a forward returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from outrider.engine.blocks import Floats
from outrider.engine.columns import Ints, KeysValues, NewColumns
from outrider.engine.loading import LoadedModel
from outrider.engine.numpy_net import Span, hidden, net_of
from outrider.engine.prompt_cache import Saved, Start

_STEP = 256
_PREFILL = 128  # as quick a token as 512, and others wait less


class NumpyRow:
    """`Columns` (see engine.columns) of one request; the weights are shared by all requests of a model."""

    lazy = False
    whole = False

    def __init__(self, model: LoadedModel) -> None:
        """
        Raises:
            ModelError: the model is not of these families, too large, or not in float32 on a CPU.
        """
        self.net = net_of(model)
        layers = self.net.layers
        # Keys lie in memory as scores multiply them, a dimension after the other: two thirds of the time.
        self._keys = [np.zeros((layer.kv_heads, layer.width, _STEP), np.float32).transpose(0, 2, 1) for layer in layers]
        self._values = [np.zeros((layer.kv_heads, _STEP, layer.width), np.float32) for layer in layers]

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        for first in range(start, len(tokens), _PREFILL):
            chunk = tokens[first : first + _PREFILL]
            positions = np.arange(first + len(chunk), dtype=np.int32)
            _forward([self], [NewColumns(chunk, first, positions, positions <= positions[first:, None], ())])
            if progress is not None and len(tokens) > _PREFILL:
                progress(min(first + _PREFILL, len(tokens)), total)

    def adopt(self, start: int, read: KeysValues) -> None:
        """See `engine.reading.OpenColumns`."""
        end = start + read.count
        for index, (keys, values) in enumerate(zip(read.keys, read.values, strict=True)):
            self._keys[index] = _with_room(self._keys[index], end)
            self._values[index] = _with_room(self._values[index], end)
            self._keys[index][:, start:end], self._values[index][:, start:end] = keys, values

    @staticmethod
    def forward(texts: Sequence[NumpyRow], new: Sequence[NewColumns]) -> mx.array:
        return texts[0].net.logits(_forward(texts, new))

    def keep(self, prefix: int, columns: Ints) -> None:
        end = prefix + len(columns)
        for buffer in (*self._keys, *self._values):
            buffer[:, prefix:end] = buffer[:, columns]

    def save(self, count: int) -> Saved:
        pairs = zip(self._keys, self._values, strict=True)
        return Saved(count, tuple((keys[:, :count].copy(), values[:, :count].copy()) for keys, values in pairs))

    def restore(self, start: Start) -> None:
        for index, (keys, values) in enumerate(start.saved.columns(start.length)):
            self._keys[index] = _with_room(self._keys[index], start.length)
            self._values[index] = _with_room(self._values[index], start.length)
            self._keys[index][:, : start.length], self._values[index][:, : start.length] = keys, values

    def spans(self, new: NewColumns, begin: int) -> Iterator[Span]:
        """Where each layer's attention finds this text, whose new tokens are the rows from `begin` on."""
        masked = hidden(new.seen)
        rows = slice(begin, begin + len(new.tokens))
        for index in range(len(self.net.layers)):
            self._keys[index] = _with_room(self._keys[index], new.end)
            self._values[index] = _with_room(self._values[index], new.end)
            yield Span(rows, self._keys[index], self._values[index], slice(new.start, new.end), new.end, masked)


def _forward(texts: Sequence[NumpyRow], new: Sequence[NewColumns]) -> Floats:
    """The last layer's output for all texts' tokens, [all R, H]."""
    tokens = np.concatenate([np.array(one.tokens) for one in new])
    positions = np.concatenate([one.positions[one.start :] for one in new])
    begins = np.cumsum([0, *(len(one.tokens) for one in new)]).tolist()
    spans = zip(*(text.spans(one, begin) for text, one, begin in zip(texts, new, begins, strict=False)), strict=True)
    return texts[0].net.rows(tokens, positions, spans)


def _with_room(buffer: Floats, end: int) -> Floats:
    """`buffer` [heads, columns, D] with `end` columns at least, in the same order in memory."""
    if end <= buffer.shape[1]:
        return buffer
    columns = -(-(end + end // 2) // _STEP) * _STEP
    grown = np.zeros_like(buffer, shape=(buffer.shape[0], columns, buffer.shape[2]))
    grown[:, : buffer.shape[1]] = buffer
    return grown
