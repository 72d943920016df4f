"""Forwards by ONNX Runtime over the buffers of `engine.flat`, and the KV rows of a drafter's trees.

`OrtFlat` makes the target's forwards; rollback, copies and the prompt cache stay in `engine.flat`. On the quantised
path the bits of a token's logits do not depend on how it is fed: alone, in a chain, in a segment of a prompt, or with
other requests. Chains and batch neighbours therefore cannot change a text. Trees are not fed here, because their side
branches are added up in another order.

`OrtKVRows` are the `KVRows` (see `engine.kv_rows`) of a drafter's trees: one forward for all trees of a model, which
share one buffer a layer, a row each. Nothing here is lazy: a forward returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import FlatCache, Segment
from outrider.engine.hidden_states import AFTER_NORM, BEFORE_NORM
from outrider.engine.kv_rows import Ints, KeysValues, NewRows
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtForward, OrtSegment, room
from outrider.engine.ort.graph import Array, norm_of
from outrider.engine.positions import Ints as WholeNumbers
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.protocol.errors import ModelError


class HiddenStateListener(Protocol):
    """Who listens to what passes places of a model (`engine.hidden_states`)."""

    def wants(self, key: object) -> bool:
        """Whether rows of this place are wanted."""
        ...

    def on_hidden_states(self, key: object, rows: Array) -> None:
        """What passes there, [T, H]; what is not wanted is dropped."""
        ...


class OrtFlat:
    """The forwards of one target. `norm`: its last."""

    def __init__(self, forward: OrtForward, norm: nn.Module) -> None:
        self._forward = forward
        self._factors, self._eps = norm_of(norm)

    @property
    def trees(self) -> bool:
        """Whether a tree's nodes get what they would get as chains, but for the rounding of float32."""
        return not self._forward.quantised

    def forward(
        self,
        tokens: WholeNumbers,
        segments: Sequence[Segment],
        caches: Sequence[FlatCache],
        wanted: Sequence[int] | None,
        listener: HiddenStateListener | None = None,
    ) -> mx.array:
        """Feeds tokens [T], piece after piece; logits of the `wanted`, or of all: [R, V]. `ear` hears hidden rows."""
        places = np.arange(len(tokens)) if wanted is None else np.array(wanted, np.int64)
        logits = np.empty((len(places), self._forward.vocab_size), np.float32)
        heard = self._heard(listener)
        rows = {layer: np.empty((len(tokens), self._forward.width), np.float32) for layer in heard}
        for first, own in _runs(segments):
            end = first + sum(segment.count for segment in own)
            here = np.flatnonzero((places >= first) & (places < end))
            found = self._run(
                tokens[first:end], [_part(segment) for segment in own], caches, places[here] - first, heard
            )
            logits[here] = found["logits"]
            for layer in heard:
                rows[layer][first:end] = found[f"layer{layer}"]
        if listener is not None:
            self._tell(listener, rows)
        return mx.array(logits)

    def _run(
        self,
        tokens: WholeNumbers,
        parts: Sequence[OrtSegment],
        caches: Sequence[FlatCache],
        wanted: WholeNumbers,
        heard: Sequence[int],
    ) -> dict[str, Array]:
        reach = room(parts)
        layers = [
            own.on_host(*reach, _like(shape.kv_heads, shape.width))
            for own, shape in zip(caches, self._forward.shapes, strict=True)
        ]
        return self._forward(tokens, parts, layers, wanted, heard)

    def _heard(self, listener: HiddenStateListener | None) -> list[int]:
        """The layers whose outputs somebody wants."""
        if listener is None:
            return []
        last = len(self._forward.shapes) - 1
        of_norm = listener.wants(BEFORE_NORM) or listener.wants(AFTER_NORM)
        return [layer for layer in range(last + 1) if listener.wants(layer) or (layer == last and of_norm)]

    def _tell(self, listener: HiddenStateListener, rows: dict[int, Array]) -> None:
        for layer, own in rows.items():
            listener.on_hidden_states(layer, own)
        last = rows.get(len(self._forward.shapes) - 1)
        if last is not None:
            listener.on_hidden_states(BEFORE_NORM, last)
            if listener.wants(AFTER_NORM):
                size = np.sqrt(np.square(last).mean(axis=-1, keepdims=True) + np.float32(self._eps))
                listener.on_hidden_states(AFTER_NORM, last / size * self._factors)


def _runs(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """What goes together, and its first token: all short pieces; a long one would pad the others, so it goes alone."""
    begin, short = 0, 0
    while short < len(segments) and not segments[short].long:
        short += 1
    for own in ([list(segments[:short])] if short else []) + [[segment] for segment in segments[short:]]:
        yield begin, own
        begin += sum(segment.count for segment in own)


def _part(segment: Segment) -> OrtSegment:
    is_apart = bool(segment.parents) or segment.whole
    return OrtSegment(
        segment.row, segment.start, segment.positions, partial(segment.seen, segment.end) if is_apart else None
    )


@cache
def _like(kv_heads: int, width: int) -> mx.array:
    """Keys of one column, for what buffers are to be like."""
    return mx.zeros((1, kv_heads, 1, width))


_STEP = 256  # columns buffers grow by
_PREFILL = 128  # as quick a token as 512, and others wait less


class _Store:
    """The rows of all trees of a model; those that are free are used again."""

    def __init__(self, forward: OrtForward) -> None:
        self.forward = forward
        self.layers: list[tuple[Array, Array]] = []
        self._free: list[int] = []
        self._rows = self._columns = 0

    def open(self) -> int:
        if not self._free:
            self._free.append(self._rows)
            self._rows += 1
        self._free.sort(reverse=True)  # rows in use stand in front
        return self._free.pop()

    def close(self, row: int) -> None:
        self._free.append(row)

    def make_room(self, columns: int) -> None:
        """For so many columns of every row; what is there stays. Memory that was never written is not taken."""
        had = self.layers[0][0].shape if self.layers else (0, 0, 0, 0)
        if self._rows <= had[0] and columns <= had[2]:
            return
        rows = max(self._rows, had[0] if self._rows <= had[0] else 2 * had[0])
        columns = had[2] if columns <= had[2] else -(-(columns + columns // 2) // _STEP) * _STEP
        old, self.layers = self.layers, []
        for number, shape in enumerate(self.forward.shapes):
            grown = [np.zeros((rows, shape.kv_heads, columns, shape.width), np.float32) for _ in "kv"]
            for new, buffer in zip(grown, old[number] if old else (), strict=False):
                new[: had[0], :, : had[2]] = buffer
            self.layers.append((grown[0], grown[1]))


_stores: WeakKeyDictionary[OrtForward, _Store] = WeakKeyDictionary()


class OrtKVRows:
    """`Columns` of one request."""

    lazy = False
    whole = False

    def __init__(self, model: LoadedModel) -> None:
        """
        Raises:
            ModelError: ONNX Runtime does not make this model's forwards.
        """
        if model.cpu is None or not model.cpu.masked:
            raise ModelError("ONNX Runtime does not make this model's forwards")
        store = self._store = _stores.setdefault(model.cpu, _Store(model.cpu))
        self._row = store.open()
        finalize(self, store.close, self._row)

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        for first in range(start, len(tokens), _PREFILL):
            chunk = np.array(tokens[first : first + _PREFILL], np.int32)
            part = OrtSegment(self._row, first, np.arange(first, first + len(chunk)))
            self._store.make_room(room([part])[1])
            self._store.forward(chunk, [part], self._store.layers, np.zeros(0, np.int64))
            if progress is not None and len(tokens) > _PREFILL:
                progress(min(first + _PREFILL, len(tokens)), total)

    def adopt(self, start: int, read: KeysValues) -> None:
        """See `engine.kv_transfer.FillableKVRows`."""
        self._write(start, zip(read.keys, read.values, strict=True), read.count)

    @staticmethod
    def forward(texts: Sequence[OrtKVRows], new: Sequence[NewRows]) -> mx.array:
        store = texts[0]._store
        tokens = np.concatenate([np.array(one.tokens, np.int32) for one in new])
        parts = [text._part(one) for text, one in zip(texts, new, strict=True)]
        store.make_room(room(parts)[1])
        found = store.forward(tokens, parts, store.layers, np.arange(len(tokens)))
        return mx.array(found["logits"])

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
        for pair, found in zip(self._store.layers, layers, strict=True):
            for buffer, new in zip(pair, found, strict=True):
                buffer[self._row, :, start : start + count] = new

    def _part(self, new: NewRows) -> OrtSegment:
        def seen(window: int | None) -> Any:
            if window is None:
                return new.seen
            return new.seen & (new.positions > new.positions[new.start :, None] - window)

        return OrtSegment(self._row, new.start, new.positions[new.start :], seen)
