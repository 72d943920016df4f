"""Several texts in one forward: one flat row of all their tokens, with attention text by text.

Dense layers see the tokens of all texts as one row, so nothing is padded there and weights are read once. Each
attention layer has one buffer with a row for each text. mlx-lm models run unmodified: their cache objects (`FlatCache`)
supply positions and masks, the attention function of their modules asks the cache (`patch_attention`), and their ropes
take a position for each token (`patch_ropes`).

The texts of a target and of a head have this form, and so do a drafter's token trees. Knows rows, columns and lengths;
knows nothing of tokens' meaning or of requests.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import create_attention_mask

from outrider.engine.hidden_states import add_mixin
from outrider.engine.memory import release_pages
from outrider.protocol.trees import node_depths

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
_STEP_COLUMNS = 256  # a buffer has a multiple of this many columns
_PATCHED_FUNCTION = "scaled_dot_product_attention"

LayerKVs = tuple[tuple[mx.array, mx.array], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One text's part of a flat row: the next `count` tokens of the text in `row`, whose first `start` tokens are in
    the buffers. They are consecutive and see all tokens before them. `long`: a piece of a prompt."""

    row: int
    start: int
    count: int
    long: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def positions(self) -> Ints:
        """The position of each token, [count]."""
        return np.arange(self.start, self.end, dtype=np.int32)

    def seen(self, end: int, window: int | None, causal: bool = False) -> Bools:
        """Returns which of the row's first `end` columns each token sees, [count, end]: within `window` if any, and if
        `causal` none at a later position than its own."""
        seen = np.tri(self.count, end, self.start, dtype=np.bool_)
        if window is not None:
            seen &= np.arange(end) > self.positions[:, None] - window
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSegment(Segment):
    """Nodes of a token tree, in the order in which they were fed; other tokens of the text may come before them. Each
    has a column, but its position is given by its depth, and it sees only its ancestors.

    `all_positions`: the position of each of the row's columns, [end]. `visible`: what each node sees, [count, end].
    """

    all_positions: Ints
    visible: Bools

    @classmethod
    def of(cls, row: int, start: int, count: int, parents: tuple[int, ...]) -> NodeSegment:
        """Returns the segment of `count` tokens, of which the last are the nodes of a tree (`protocol.trees`)."""
        end = start + count
        trunk = end - len(parents)
        all_positions, visible = np.arange(end, dtype=np.int32), np.tri(count, end, start, dtype=np.bool_)
        all_positions[trunk:] = np.array(node_depths(parents)) + trunk
        visible[-len(parents) :, trunk:] = ancestor_mask(parents)
        return cls(row, start, count, all_positions=all_positions, visible=visible)

    @property
    def positions(self) -> Ints:
        return self.all_positions[self.start :]

    def seen(self, end: int, window: int | None, causal: bool = False) -> Bools:
        seen = self.visible
        if causal:
            seen = seen & (self.all_positions <= self.positions[:, None])
        if window is not None:
            seen = seen & (self.all_positions > self.positions[:, None] - window)
        return seen if end == self.end else np.pad(seen, ((0, 0), (0, end - self.end)))


def ancestor_mask(parents: Sequence[int]) -> Bools:
    """Returns for each node which nodes are its ancestors or itself, [M, M]."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@dataclass(frozen=True, slots=True)
class WindowMask:
    """A placeholder for the mask of layers with this window (None: all columns); `SegmentGroup` builds the mask.

    `causal`: see `Segment.seen`.
    """

    window: int | None
    causal: bool = False


class SegmentGroup:
    """Texts whose attention is one operation: rows of the buffers from `first` on, padded to `width` queries each."""

    def __init__(self, segments: Sequence[Segment], begins: Sequence[int]) -> None:
        self.first, self.stop = min(p.row for p in segments), max(p.row for p in segments) + 1
        self.width, self.end = max(p.count for p in segments), max(p.end for p in segments)
        rows = self.stop - self.first
        self.begin, self.count = begins[0], sum(p.count for p in segments)
        in_order = [p.row for p in segments] == list(range(self.first, self.stop))
        self.unpadded = in_order and all(p.count == self.width for p in segments)
        padded, spread = np.full((rows, self.width), self.begin, np.int32), []
        for segment, begin in zip(segments, begins, strict=True):
            row = segment.row - self.first
            padded[row] = np.minimum(begin + np.arange(self.width), begin + segment.count - 1)
            spread.append(row * self.width + np.arange(segment.count))
        self._segments = segments
        self._padded, self._spread = mx.array(padded.reshape(-1)), mx.array(np.concatenate(spread))
        self._masks: dict[WindowMask, mx.array | None] = {}

    def gather_queries(self, flat: mx.array) -> mx.array:
        """Arranges queries [1, H, T, D] by text: [rows, H, width, D]."""
        heads, width = flat.shape[1], flat.shape[-1]
        together = slice(self.begin, self.begin + self.count)
        own = flat[0, :, together] if self.unpadded else mx.take(flat[0], self._padded, axis=1)
        return own.reshape(heads, -1, self.width, width).swapaxes(0, 1)

    def scatter_outputs(self, output: mx.array) -> mx.array:
        """Arranges attention's output [rows, H, width, D] in the order of the flat row: [H, count, D]."""
        flat = output.swapaxes(0, 1).reshape(output.shape[1], -1, output.shape[-1])
        return flat if self.unpadded else mx.take(flat, self._spread, axis=1)

    def mask(self, of: WindowMask) -> mx.array | None:
        """Returns which columns each query sees, [rows, 1, width, end]; None: all of them. Padding sees all."""
        if of not in self._masks:
            seen = np.ones((self.stop - self.first, self.width, self.end), np.bool_)
            for segment in self._segments:
                seen[segment.row - self.first, : segment.count] = segment.seen(self.end, of.window, of.causal)
            self._masks[of] = None if seen.all() else mx.array(seen[:, None])
        return self._masks[of]


class FlatAttentionMetadata:
    """Where one forward's tokens are written and what they see, for the caches of all layers."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.groups: list[SegmentGroup] = []
        self.offset: int | mx.array = 0
        self.rows: mx.array = mx.array(0)
        self.columns: slice | mx.array = slice(0)  # the tokens' columns; a slice only if there is one segment
        self.needed_size = (0, 0)  # how many rows and columns the buffers need
        self._masks: dict[tuple[WindowMask, bool], mx.array | None] = {}

    @property
    def only_segment(self) -> Segment | None:
        """The forward's only segment, for which mlx-lm's own attention is used, or None."""
        return self.segments[0] if len(self.segments) == 1 else None

    def begin(self, segments: Sequence[Segment]) -> None:
        """Sets the segments of the next forward: short ones, then long ones."""
        self.segments, self._masks = tuple(segments), {}
        self.needed_size = max(p.row for p in segments) + 1, max(p.end for p in segments)
        if len(segments) == 1:
            (only,) = segments
            self.offset = mx.array(only.positions) if isinstance(only, NodeSegment) else only.start
            self.columns = slice(only.start, only.end)
            return
        begins = np.concatenate([[0], np.cumsum([p.count for p in segments])])[:-1].tolist()
        short = sum(not p.long for p in segments)
        parts = [slice(short), *(slice(n, n + 1) for n in range(short, len(segments)))]
        self.groups = [SegmentGroup(segments[part], begins[part]) for part in parts if segments[part]]
        self.columns = mx.array(np.concatenate([np.arange(p.start, p.end, dtype=np.int32) for p in segments]))
        self.offset = mx.array(np.concatenate([p.positions for p in segments]))
        self.rows = mx.array(np.repeat([p.row for p in segments], [p.count for p in segments]).astype(np.int32))

    def mask(self, only_segment: Segment, of: WindowMask, return_array: bool) -> mx.array | None:
        """Returns what the tokens of the only segment see, [count, end]; None: everything."""
        key = of, return_array
        if key not in self._masks:
            seen = only_segment.seen(only_segment.end, of.window, of.causal)
            self._masks[key] = None if seen.all() and not return_array else mx.array(seen)
        return self._masks[key]


_view_numbers = itertools.count(1)


def ensure_capacity(buffer: mx.array | None, rows: int, columns: int, like: mx.array) -> mx.array:
    """Returns `buffer`, or a copy of it, larger than is needed now, if it has too few rows or columns."""
    had_rows, had_columns = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    if rows <= had_rows and columns <= had_columns and buffer is not None:
        return buffer
    rows = had_rows if rows <= had_rows else max(rows, had_rows + had_rows // 2)
    columns = had_columns if columns <= had_columns else -(-(columns + columns // 8) // _STEP_COLUMNS) * _STEP_COLUMNS
    grown = mx.zeros((rows, like.shape[1], columns, like.shape[3]), like.dtype if buffer is None else buffer.dtype)
    if buffer is not None:
        grown[:had_rows, :, :had_columns] = buffer
    return grown


class FlatCache:
    """One attention layer's buffers [rows, H, columns, D], written in place, which grow; replaces a `KVCache`."""

    def __init__(self, frame: FlatAttentionMetadata, window: int | None = None) -> None:
        """`window`: the columns that the layer sees if it passes no window."""
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._frame, self._window = frame, window
        self._host: tuple[Floats, Floats] | None = None  # numpy views; dropped when MLX writes, or it would copy
        self.views = 0  # identifies the latest views

    @property
    def offset(self) -> int | mx.array:
        return self._frame.offset

    @property
    def state(self) -> list[mx.array]:
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None, causal: bool = False
    ) -> Any:
        only_segment, window = self._frame.only_segment, window_size or self._window
        if only_segment is None:
            return WindowMask(window, causal)
        if isinstance(only_segment, NodeSegment):  # its tokens don't see just the columns up to their own
            return self._frame.mask(only_segment, WindowMask(window, causal), return_array)
        window = window if window is not None and only_segment.end > window else None  # else it covers the text
        return create_attention_mask(n, offset=only_segment.start, return_array=return_array, window_size=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the forward's keys and values [1, H, T, D].

        For a single text returns all its keys and values, as `KVCache` does. For several, `attend` reads the buffers.
        """
        self._host, frame = None, self._frame
        for buffer, new in zip(self._reserve(*frame.needed_size, keys, values), (keys, values), strict=True):
            if frame.only_segment is not None:
                buffer[frame.only_segment.row, :, frame.columns] = new[0]
            else:
                buffer[frame.rows, :, frame.columns] = new[0].swapaxes(0, 1)
        return (keys, values) if frame.only_segment is None else self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns those of a single text, also for layers that share them. Raises AttributeError for several texts."""
        only_segment = self._frame.only_segment
        if only_segment is None or self.keys is None or self.values is None:
            raise AttributeError("nothing has been fed yet")
        row = slice(only_segment.row, only_segment.row + 1)
        return self.keys[row, :, : only_segment.end], self.values[row, :, : only_segment.end]

    def attend(self, queries: mx.array, scale: float, mask: WindowMask, sinks: Any) -> mx.array:
        """Computes the attention of flat queries [1, H, T, D], each over its own text."""
        outputs = []
        for group in self._frame.groups:
            keys, values = (b[group.first : group.stop, :, : group.end] for b in (self.keys, self.values))  # type: ignore[index]
            part = mx.fast.scaled_dot_product_attention(
                group.gather_queries(queries), keys, values, scale=scale, mask=group.mask(mask), sinks=sinks
            )
            outputs.append(group.scatter_outputs(part))
        flat = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        return flat[None]

    def on_host(self, rows: int, columns: int, like: mx.array) -> tuple[Floats, Floats]:
        """Returns writable numpy views of the buffers, grown to this size if needed. `like`: keys of one column."""
        host = self._host
        if host is None or rows > host[0].shape[0] or columns > host[0].shape[2]:
            self._host = host = None
            keys, values = self._reserve(rows, columns, like, like)
            mx.eval(keys, values)
            self._host = host = np.array(keys, copy=False), np.array(values, copy=False)
            self.views = next(_view_numbers)
            for buffer in host:
                _release_zeros(buffer)
        return host

    def _reserve(self, rows: int, columns: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the buffers, grown to this size if needed, for such keys and values."""
        self.keys = ensure_capacity(self.keys, rows, columns, keys)
        self.values = ensure_capacity(self.values, rows, columns, values)
        return self.keys, self.values

    def move(self, source: int, target: int, columns: int) -> None:
        """Copies the first columns of a row to another row."""
        for buffer in self._host or (self.keys, self.values):
            if buffer is not None and source < buffer.shape[0] and columns:
                buffer[target : target + 1, :, :columns] = buffer[source : source + 1, :, :columns]

    def release(self, row: int, start: int = 0) -> None:
        """Returns the memory of a row's unused columns, from `start` on, if numpy views are in use."""
        for host in self._host or ():
            for head in host[row : row + 1].reshape(-1, *host.shape[2:]):
                release_pages(head[start:])

    def shorten(self, columns: int) -> None:
        """Frees columns that no text uses, if they are more than half, unless numpy views are in use."""
        kept = columns + _STEP_COLUMNS
        keys, values = self.keys, self.values
        if self._host is None and keys is not None and values is not None and keys.shape[2] > 2 * kept:
            self.keys, self.values = mx.contiguous(keys[:, :, :kept]), mx.contiguous(values[:, :, :kept])

    def gather(self, row: int, start: int, columns: Ints) -> None:
        """Moves column `columns[i]` (ascending) of a row to its column `start` + i."""
        source: Any = columns if self._host is not None else mx.array(columns)
        for buffer in self._host or (self.keys, self.values):
            if buffer is not None:
                buffer[row, :, start : start + len(columns)] = buffer[row][:, source]

    def adopt(self, row: int, keys: mx.array, values: mx.array, start: int = 0) -> None:
        """Writes a row's columns from `start` on, by numpy if its views are in use."""
        size = row + 1, start + keys.shape[2]
        buffers: Any = self._reserve(*size, keys, values) if self._host is None else self.on_host(*size, keys)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[row, :, start : size[1]] = new[0]

    def copy_columns(self, length: int, row: int = 0, start: int = 0) -> tuple[mx.array, mx.array]:
        """Returns copies of a row's columns [start, length): [1, H, length - start, D] each.

        Lazy; once evaluated they don't keep the buffers.
        """
        # Joined from two parts: `contiguous` may return the buffer itself, which ONNX Runtime writes in place.
        parts: Any = (mx.split(buffer[row : row + 1, :, start:length], [1], axis=2) for buffer in self.state)
        keys, values = (mx.concatenate(pair, axis=2) for pair in parts)
        return keys, values

    def clear(self) -> None:
        """Frees the buffers."""
        self.keys = self.values = self._host = None


def _release_zeros(buffer: Floats) -> None:
    """Returns the memory of the zeros at the end of each head's columns, which are zeros again when they are read."""
    for words in buffer.view(np.uint32).reshape(buffer.shape[0] * buffer.shape[1], -1):
        from_end = words[::-1] != 0
        release_pages(words[len(words) - int(from_end.argmax()) if from_end.any() else 0 :])


def patch_attention(model: nn.Module) -> None:
    """Makes the attention of `model` call `FlatCache.attend` if the mask is a `WindowMask`."""
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = sys.modules.get(name)
        if getattr(namespace, _PATCHED_FUNCTION, None) is scaled_dot_product_attention:
            setattr(namespace, _PATCHED_FUNCTION, attention)


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Replaces mlx-lm's `scaled_dot_product_attention`; with a `WindowMask` the cache computes the attention."""
    if isinstance(mask, WindowMask):
        output: mx.array = cache.attend(queries, scale, mask, sinks)
    else:
        output = scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return output


class TokenRope:
    """A rope that also takes one offset per token if there is one row. Used by `add_mixin`."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **others: Any) -> Any:
        """Applies the rope. `others`: arguments that mlx-lm's ropes don't have; such a call goes to the rope itself."""
        own = super().__call__  # type: ignore[misc]
        per_token = isinstance(offset, mx.array) and x.shape[0] == 1 and offset.shape == (x.shape[-2],)
        if others or not per_token:
            return own(x, offset=offset, **others)
        return own(x.swapaxes(0, 2), offset=offset).swapaxes(0, 2)


def patch_ropes(model: nn.Module) -> None:
    """Extends the rope of every attention of `model`, once."""
    for module in model.modules():
        for name in ("rope", "rotary_emb"):
            rope = module.get(name) if isinstance(module, dict) else None
            if isinstance(rope, nn.Module):
                add_mixin(rope, TokenRope)
