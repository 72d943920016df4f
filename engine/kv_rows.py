"""The keys and values of token trees: one row of columns for each tree, the committed prefix first, then the nodes.

mlx-lm models run unmodified. Their cache objects supply the columns, the mask by which a node sees only its ancestors,
and a position for each token (`engine.positions`). Knows columns and positions; knows nothing of nodes or sampling.

`KVRows` has a form for each kind of model: `OrtKVRows` if ONNX Runtime computes, else `JointKVRows`, whose trees share
a forward like the target's texts (`engine.flat`), else `DenseKVRows`, with one tree per forward, and `RecurrentKVRows`
(`engine.recurrent_rows`) for recurrent layers. `engine.load_checks` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import create_attention_mask, make_prompt_cache

from outrider.engine.cache import LayerCache, leaves_of, narrowed, stand_in, window_of, with_room
from outrider.engine.flat import Bools, Floats, Ints, NodeSegment, Segment, WindowMask, install
from outrider.engine.kv_transfer import FillableKVRows, KeysValues
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import ModelError

_PREFILL = 512


@dataclass(frozen=True, slots=True)
class NewRows:
    """Tokens [R] to feed to one tree.

    `start`: the first token's column; the others follow. `positions`: the absolute positions of all columns, [start +
    R]. `seen`: the columns that each token attends to, including its own, [R, start + R]. `parents`: the column of the
    token before each token; `start` or more if it is one of these tokens.
    """

    tokens: Sequence[int] | mx.array
    start: int
    positions: Ints
    seen: Bools
    parents: Sequence[int]

    @property
    def end(self) -> int:
        return len(self.positions)

    def lazy_tokens(self) -> mx.array:
        """Returns the tokens as an MLX array, int32 [R]."""
        return self.tokens if isinstance(self.tokens, mx.array) else mx.array(list(self.tokens), dtype=mx.int32)


class KVRows(Protocol):
    """A tree's columns. A forward writes the columns from `start` on and, if `lazy`, never waits."""

    @property
    def lazy(self) -> bool: ...

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        """Feeds tokens as columns from 0 on, evaluated, in chunks; calls `progress(done, total)` if there are several.

        Columns before `start` are already filled.
        """
        ...

    @staticmethod
    def forward(texts: Sequence[Any], new: Sequence[NewRows]) -> mx.array:
        """Feeds each of `texts`, rows of this form and one model, its tokens. Lazy.

        Uses one forward if the form can. A forward that fails may have written after every text's columns, nowhere
        else.

        Returns:
            Logits [all R, V], text after text.
        """
        ...

    def keep(self, prefix: int, columns: Ints) -> None:
        """Moves column `columns[i]` (ascending, from `prefix` on) to column `prefix` + i, and drops the others."""
        ...

    @property
    def whole(self) -> bool:
        """True if there is other state besides the columns, so that only all columns can be saved."""
        ...

    def save(self, count: int) -> SavedPrefix:
        """Returns a copy of the first `count` columns, evaluated; with `whole`, of all committed columns."""
        ...

    def restore(self, start: CachedPrefix) -> None:
        """Fills the first columns, which are empty."""
        ...


class TreeAttentionMetadata:
    """The columns and positions of one forward's tokens, for the caches of all layers of a tree."""

    def __init__(self) -> None:
        self.start, self.end = 0, 0
        self.offset: int | mx.array = 0
        self._positions: Ints | None = None
        self._seen: Bools | None = None
        self._masks: dict[int | None, mx.array | None] = {}

    def plain(self, start: int, count: int) -> None:
        """Prepares a forward of ordinary text."""
        self.start, self.end, self.offset, self._seen = start, start + count, start, None

    def tree(self, start: int, positions: Ints, seen: Bools, *, rows: bool = False) -> None:
        """Prepares a forward of nodes; with `rows` they are a batch of rows of one token each."""
        self.start, self.end, self.offset = start, len(positions), mx.array(positions[start:])
        self._positions, self._seen, self._masks = positions, seen[:, None, None, :] if rows else seen, {}

    def mask(self, n: int, return_array: bool, window: int | None) -> Any:
        """Returns the mask of layers with this window (None: all columns), computed once for each forward."""
        if self._seen is None or self._positions is None:
            window = narrowed(window, self.start + n)
            return create_attention_mask(n, offset=self.start, return_array=return_array, window_size=window)
        if window not in self._masks:
            seen = self._seen
            if window is not None:
                near = self._positions[self.start :, None] - self._positions < window
                seen = seen & near.reshape(seen.shape)
            self._masks[window] = None if seen.all() and not return_array else mx.array(seen)
        return self._masks[window]


class KVRowCache(LayerCache):
    """One attention layer's columns: a buffer [1, H, capacity, D], written in place; replaces a `KVCache`.

    `window`: the columns that the layer sees if it passes no window.
    """

    def __init__(self, frame: TreeAttentionMetadata, window: int | None = None) -> None:
        super().__init__()
        self.frame, self.window = frame, window

    @property
    def offset(self) -> int | mx.array:
        return self.frame.offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.frame.mask(n, return_array, window_size or self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, end = self.frame.start, self.frame.end
        self.keys, self.values = with_room(self.keys, 1, end, keys), with_room(self.values, 1, end, values)
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns the columns in use, also for layers that share them."""
        if self.keys is None or self.values is None:
            raise AttributeError("nothing has been fed yet")
        end = self.frame.end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def move(self, start: int, columns: mx.array) -> None:
        if self.keys is not None and self.values is not None:
            end = start + columns.shape[0]
            self.keys[..., start:end, :] = mx.take(self.keys, columns, axis=2)
            self.values[..., start:end, :] = mx.take(self.values, columns, axis=2)


class DenseKVRows(FillableKVRows):
    """`KVRows` of a model with attention layers only, with one tree per forward."""

    lazy = True
    whole = False

    def __init__(self, model: LoadedModel) -> None:
        self.model = model.model
        self.frame = TreeAttentionMetadata()
        made = make_prompt_cache(model.model)
        self.caches = [stand_in(cache, lambda leaf: KVRowCache(self.frame, window_of(leaf))) for cache in made]
        self.leaves = [leaf for cache in self.caches for leaf in leaves_of(cache)]
        self._dtype: mx.Dtype | None = None  # of the model's own keys

    def _prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int
    ) -> None:
        prefill(self.model, self.frame, self.caches, tokens, progress, total, start)

    def adopt(self, start: int, read: KeysValues) -> None:
        if self._dtype is None:
            self._dtype = _dtype_of_keys(self.model)
        self.frame.plain(start, read.count)
        for cache, keys, values in zip(self.leaves, read.keys, read.values, strict=True):
            cache.update_and_fetch(mx.array(keys[None], self._dtype), mx.array(values[None], self._dtype))
        mx.eval([cache.state for cache in self.caches])

    @staticmethod
    def forward(texts: Sequence[DenseKVRows], new: Sequence[NewRows]) -> mx.array:
        logits = [text._alone(rows) for text, rows in zip(texts, new, strict=True)]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _alone(self, new: NewRows) -> mx.array:
        self.frame.tree(new.start, new.positions, new.seen)
        logits: mx.array = self.model(new.lazy_tokens()[None], cache=self.caches)
        return logits[0]

    def keep(self, prefix: int, columns: Ints) -> None:
        gather(self.leaves, prefix, columns)

    def save(self, count: int) -> SavedPrefix:
        return saved(self.leaves, count)

    def restore(self, start: CachedPrefix) -> None:
        restore(self.frame, self.leaves, start)


def prefill(
    model: Any,
    frame: TreeAttentionMetadata,
    caches: Sequence[Any],
    tokens: Sequence[int],
    progress: Callable[[int, int], None] | None,
    total: int,
    first: int = 0,
) -> None:
    """Does `KVRows.prefill`."""
    for start in range(first, len(tokens), _PREFILL):
        chunk = mx.array(list(tokens[start : start + _PREFILL]), dtype=mx.int32)
        frame.plain(start, chunk.shape[0])
        model(chunk[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        if progress is not None and len(tokens) > _PREFILL:
            progress(start + chunk.shape[0], total)


def _dtype_of_keys(model: Any) -> mx.Dtype:
    """Returns the number format of the model's keys; computes nothing."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    dtype: mx.Dtype = leaves_of(caches[0])[0].keys.dtype
    return dtype


def gather(caches: Sequence[Any], prefix: int, columns: Ints) -> None:
    """Does `KVRows.keep`, without touching columns that stay in place."""
    moved = np.flatnonzero(columns != np.arange(prefix, prefix + len(columns)))
    if len(moved):
        index = mx.array(columns[moved[0] :])
        for cache in caches:
            if isinstance(cache, KVRowCache):
                cache.move(prefix + int(moved[0]), index)


def saved(caches: Sequence[Any], count: int, states: tuple[Any, ...] = ()) -> SavedPrefix:
    """Does `KVRows.save`; `states`: the other state after these columns."""
    layers = tuple(cache.saved(count) for cache in caches if isinstance(cache, KVRowCache))
    mx.eval(layers, states)
    return SavedPrefix(count, layers, states)


def restore(frame: TreeAttentionMetadata, caches: Sequence[Any], start: CachedPrefix) -> None:
    """Does `KVRows.restore`."""
    frame.plain(0, start.length)
    attention = [cache for cache in caches if isinstance(cache, KVRowCache)]
    for cache, (keys, values) in zip(attention, start.saved.columns(start.length), strict=True):
        cache.update_and_fetch(keys, values)
    mx.eval([cache.state for cache in attention])


class JointKVRows(DenseKVRows):
    """`KVRows` of a model with mlx-lm's common attention (`engine.load_checks` tries it): all trees in one forward."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model)
        install(model.model)

    @staticmethod
    def forward(texts: Sequence[DenseKVRows], new: Sequence[NewRows]) -> mx.array:
        if len(texts) == 1:
            return DenseKVRows.forward(texts, new)
        ends = np.cumsum([len(rows.parents) for rows in new]).tolist()
        spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        places = mx.array(np.concatenate([rows.positions[rows.start :] for rows in new]))
        for text, rows in zip(texts, new, strict=True):
            text.frame.tree(rows.start, rows.positions, rows.seen)
        numbers = count()

        def joint(_: Any) -> JointKVRowCache:
            number = next(numbers)
            return JointKVRowCache([text.leaves[number] for text in texts], spans, places)

        caches = [stand_in(cache, joint) for cache in texts[0].caches]
        tokens = mx.concatenate([rows.lazy_tokens() for rows in new])
        logits: mx.array = texts[0].model(tokens[None], cache=caches)
        return logits[0]


class JointKVRowCache:
    """One attention layer's columns of several trees in one forward; `spans`: each tree's tokens in the forward."""

    def __init__(self, caches: Sequence[KVRowCache], spans: Sequence[slice], places: mx.array) -> None:
        self._caches, self._spans = caches, spans
        self.offset = places

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> WindowMask:
        return WindowMask(window_size or self._caches[0].window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes keys and values [1, H, T, D], each tree's into its own columns. The returned value is not used."""
        for cache, span in zip(self._caches, self._spans, strict=True):
            cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        return keys, values

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: Any) -> mx.array:
        """Computes the attention of flat queries [1, H, T, D], each over its own tree."""
        outputs = []
        for cache, span in zip(self._caches, self._spans, strict=True):
            keys, values = cache.keys_and_values()
            mask = cache.frame.mask(span.stop - span.start, False, window)
            own = queries[:, :, span]
            outputs.append(mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=mask, sinks=sinks))
        return mx.concatenate(outputs, axis=2)


_STEP = 256  # buffers grow by multiples of so many columns
_ORT_PREFILL = 128  # tokens of a chunk: as fast per token as 512, and other requests wait less


class _Store:
    """The rows of all trees of a model; free rows are reused."""

    def __init__(self, forward: OrtForward) -> None:
        self.forward = forward
        self.layers: list[tuple[Floats, Floats]] = []
        self._free: list[int] = []
        self._rows = self._columns = 0

    def open(self) -> int:
        if not self._free:
            self._free.append(self._rows)
            self._rows += 1
        self._free.sort(reverse=True)  # so that rows in use come first
        return self._free.pop()

    def close(self, row: int) -> None:
        self._free.append(row)

    def make_room(self, columns: int) -> None:
        """Grows every row to so many columns, and keeps its contents. Memory that is never written takes no space."""
        had = self.layers[0][0].shape if self.layers else (0, 0, 0, 0)
        if self._rows <= had[0] and columns <= had[2]:
            return
        rows = max(self._rows, had[0] if self._rows <= had[0] else 2 * had[0])
        columns = had[2] if columns <= had[2] else -(-(columns + columns // 2) // _STEP) * _STEP
        old, self.layers = self.layers, []
        for number, shape in enumerate(self.forward.shapes):
            grown = [np.zeros((rows, shape.kv_heads, columns, shape.width), self.forward.kv_dtype) for _ in "kv"]
            for new, buffer in zip(grown, old[number] if old else (), strict=False):
                new[: had[0], :, : had[2]] = buffer
            self.layers.append((grown[0], grown[1]))


_stores: WeakKeyDictionary[OrtForward, _Store] = WeakKeyDictionary()


class OrtKVRows(FillableKVRows):
    """`KVRows` by ONNX Runtime: all trees of a model share one buffer per layer, one row each, and their forwards.

    Not lazy: a forward returns when it is complete.
    """

    lazy = False
    whole = False

    def __init__(self, model: LoadedModel) -> None:
        """Raises ModelError if ONNX Runtime does not compute this model's trees."""
        if model.cpu is None or not model.cpu.masked:
            raise ModelError("ONNX Runtime does not compute trees of this model")
        store = self._store = _stores.setdefault(model.cpu, _Store(model.cpu))
        self._row = store.open()
        finalize(self, store.close, self._row)

    def _prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int
    ) -> None:
        for first in range(start, len(tokens), _ORT_PREFILL):
            chunk = np.array(tokens[first : first + _ORT_PREFILL], np.int32)
            part = Segment(self._row, first, len(chunk), long=True)
            self._store.make_room(self._store.forward.room([part])[1])
            self._store.forward(chunk, [part], self._store.layers, np.zeros(0, np.int64))
            if progress is not None and len(tokens) > _ORT_PREFILL:
                progress(min(first + _ORT_PREFILL, len(tokens)), total)

    def adopt(self, start: int, read: KeysValues) -> None:
        self._write(start, zip(read.keys, read.values, strict=True), read.count)

    @staticmethod
    def forward(texts: Sequence[OrtKVRows], new: Sequence[NewRows]) -> mx.array:
        store = texts[0]._store
        tokens = np.concatenate([np.array(rows.tokens, np.int32) for rows in new])
        parts = [text._part(rows) for text, rows in zip(texts, new, strict=True)]
        store.make_room(store.forward.room(parts)[1])
        results = store.forward(tokens, parts, store.layers, np.arange(len(tokens)))
        return mx.array(results["logits"])

    def keep(self, prefix: int, columns: Ints) -> None:
        end = prefix + len(columns)
        for pair in self._store.layers:
            for buffer in pair:
                buffer[self._row, :, prefix:end] = buffer[self._row][:, columns]

    def save(self, count: int) -> SavedPrefix:
        row = slice(self._row, self._row + 1)
        return SavedPrefix(
            count, tuple((k[row, :, :count].copy(), v[row, :, :count].copy()) for k, v in self._store.layers)
        )

    def restore(self, start: CachedPrefix) -> None:
        self._write(0, start.saved.columns(start.length), start.length)

    def _write(self, start: int, layers: Any, count: int) -> None:
        self._store.make_room(start + count)
        for pair, layer in zip(self._store.layers, layers, strict=True):
            for buffer, new in zip(pair, layer, strict=True):
                buffer[self._row, :, start : start + count] = new

    def _part(self, new: NewRows) -> NodeSegment:
        return NodeSegment(self._row, new.start, len(new.parents), places=new.positions, visible=new.seen)
