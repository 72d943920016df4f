"""Forwards of one model by ONNX Runtime. Knows rows, columns and positions; knows nothing of tokens' meaning or of
requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import FlatCache, Segment
from outrider.engine.memory import release_memory
from outrider.engine.ort.layers import Array, DecoderLayers, Ints, Layout, dequantise, levels, rope_angles, to_numpy
from outrider.engine.ort.sessions import SHRINKING_RUN, CachedGraph, CoreChoice, Sessions, kernel_name
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import ModelError, first_line

if TYPE_CHECKING:
    from outrider.engine.ort.graph import Graph

log = logging.getLogger(__name__)

_EMBEDDING_FILE = "embedding.bin"
_MASKED_SCORE = -65504.0  # the lowest float16: such a column gets the weight 0
_MIN_QUERIES = 2  # with one query ONNX Runtime computes attention by another path, with other bits
_MAX_PIECE_TOKENS = 128  # each further head of a group writes as many columns beyond the text
_MIN_PIECE_TOKENS, _MAX_PIECE_SCORES = 32, 1 << 16  # scores: tokens x columns, of which attention makes copies
_ANGLE_BLOCK_POSITIONS = 512  # positions whose angles are tabulated at a time
_MAX_BINDINGS = 16  # bindings that are kept


class Embedding:
    """An embedding [V, H], the first layer, in numpy. Each row has its levels and then the scales and biases of its
    groups, or its float32 values.

    With a cached graph the rows stay in a file in its `folder`, since a text needs few of them; the layer's weights are
    read only if there is no such file. The file is read, not mapped: the system would map 64 KiB around each row, and
    so most of the file after a few texts. Its pages are in the system's page cache, which all processes share.
    """

    def __init__(self, layer: nn.Module, factor: float, folder: Path | None) -> None:
        self._factor = np.float32(factor)
        self._groups, self._bits, width = 0, 32, int(layer.weight.shape[1])
        if isinstance(layer, nn.QuantizedEmbedding):
            self._groups, self._bits = int(layer.scales.shape[1]), layer.bits if layer.bits in (4, 8) else 8
            width = width * 32 // layer.bits
        self._level_bytes = width * self._bits // 8
        self._row_bytes = self._level_bytes + 8 * self._groups
        self._file = _open_embedding_file(folder, layer, int(layer.weight.shape[0]) * self._row_bytes)
        self._rows = _to_embedding_rows(layer) if self._file is None else np.empty(0, np.uint8)

    def __call__(self, tokens: Ints) -> Array:
        """Returns the rows [T, H] of tokens [T]."""
        rows = self._read(tokens)
        if self._groups:
            q, *parts = np.split(rows, (self._level_bytes, self._level_bytes + 4 * self._groups), axis=1)
            scales, biases = (np.ascontiguousarray(part).view(np.float32) for part in parts)
            rows = dequantise(q, scales, biases, self._bits)
        rows = rows.view(np.float32)
        return rows * self._factor if self._factor != 1 else rows

    def _read(self, tokens: Ints) -> Array:
        """Returns the rows [T, size of a row] of tokens [T]."""
        if self._file is None:
            return np.asarray(self._rows[tokens])
        size, file = self._row_bytes, self._file.fileno()
        content = b"".join(os.pread(file, size, token * size) for token in tokens.tolist())
        if len(content) < len(tokens) * size:
            raise ModelError("the file of the model's embedding was truncated; restart to write it again")
        return np.frombuffer(content, np.uint8).reshape(len(tokens), size)


def _to_embedding_rows(layer: nn.Module) -> Array:
    """Returns the rows of an embedding as bytes [V, size of a row]."""
    if not isinstance(layer, nn.QuantizedEmbedding):
        return to_numpy(layer.weight).view(np.uint8)
    q, _ = levels(layer)
    return np.concatenate([q, to_numpy(layer.scales).view(np.uint8), to_numpy(layer.biases).view(np.uint8)], axis=1)


def _open_embedding_file(folder: Path | None, layer: nn.Module, size: int) -> FileIO | None:
    """Opens the file of rows, of `size` bytes, and writes it if there is none of this size; None: it can't be kept."""
    if folder is None:
        return None
    path = folder / _EMBEDDING_FILE
    try:
        if not path.exists() or path.stat().st_size != size:
            replace_file(path, _to_embedding_rows(layer).tobytes())
        return FileIO(path)
    except OSError as error:
        log.info("the model's embedding is not kept on disk: %s", first_line(error))
        return None


class OrtForward:
    """The sessions of a model or a head, which compute one flat row of several texts over `engine.flat`'s buffers.

    `quantised`: activations are rounded to 8 bits. `min_rows`: the rows that forwards are padded to. `cached`: the
    graph in the cache that they read, if any.
    """

    def __init__(self, decoder: DecoderLayers, cached: CachedGraph | None = None, per_token: bool = False) -> None:
        """Opens the sessions. `per_token`: see `graph.build`. Raises ModelError if these modules can't be computed."""
        try:
            layout = Layout.of(decoder)
            self._sessions = Sessions.open(partial(_build, decoder, layout, per_token), cached)
        except (AttributeError, TypeError, KeyError, ValueError) as error:  # its modules have another structure
            raise ModelError(f"ONNX Runtime can't compute this model: {error}") from error
        self._core_choice = CoreChoice()
        self._layout, self.shapes, self.kv_dtype = layout, layout.shapes, layout.kv_dtype
        self.quantised, self.width = layout.quantised, layout.width
        self.columns = [mx.array(np.zeros((1, s.kv_heads, 1, s.width), self.kv_dtype)) for s in self.shapes]
        self._head_tokens = np.array(decoder.tokens) if decoder.tokens is not None else None
        self.vocab_size = decoder.vocab_size
        self.min_rows = 1
        self.cached = self._sessions.cached
        self._embedding = Embedding(decoder.embedding, decoder.factor, self.cached.folder if self.cached else None)
        self._angles: list[Array] = []  # of each rope: cosines and sines, [2, positions, width / 2]
        self._bindings: dict[Any, Any] = {}
        self._tabulate_angles(_ANGLE_BLOCK_POSITIONS)

    @property
    def number_format(self) -> str:
        """The name of what a quantised forward's bits depend on: others may choose another token."""
        return kernel_name() + ("-exact" if self._sessions.exact else "")

    @property
    def has_all_cores(self) -> bool:
        """Whether forwards can also use the drafters' core."""
        return self._sessions.all_cores is not None

    def __call__(
        self,
        tokens: Ints,
        segments: Sequence[Segment],
        caches: Sequence[FlatCache],
        logits_indices: Ints,
        tapped: Sequence[int] = (),
        all_cores: bool = False,
        features: Array | None = None,
    ) -> dict[str, Array]:
        """Feeds tokens [T], segment after segment, short ones first. Returns `logits` [R, V] of the tokens at
        `logits_indices` of the flat row.

        Long segments are fed in pieces, on all cores in any case, because their texts wait for the first token.

        Args:
            caches: one for each layer; the forward writes to their buffers.
            tapped: layers whose outputs are returned as `layer{i}` [T, H].
            all_cores: may also compute on the drafters' core, if they have one and it is faster (`CoreChoice`).
            features: float32 [T, W], for a head; then `hidden` [R, H], the last layer's output, is returned, too.
        """
        runs = list(_split_into_runs(segments))
        if len(runs) == 1:
            return self._run(tokens, runs[0][1], caches, logits_indices, tapped, all_cores, features)
        found: dict[str, Array] = {}
        for first, own in runs:
            end = first + sum(segment.count for segment in own)
            here = np.flatnonzero((logits_indices >= first) & (logits_indices < end))
            rows = features[first:end] if features is not None else None
            results = self._run(tokens[first:end], own, caches, logits_indices[here] - first, tapped, all_cores, rows)
            for name, part in results.items():
                at, of = (slice(first, end), tokens) if name.startswith("layer") else (here, logits_indices)
                found.setdefault(name, np.empty((len(of), part.shape[1]), np.float32))[at] = part
        return found

    def _run(
        self,
        tokens: Ints,
        segments: Sequence[Segment],
        caches: Sequence[FlatCache],
        logits_indices: Ints,
        tapped: Sequence[int],
        all_cores: bool,
        features: Array | None,
    ) -> dict[str, Array]:
        """Feeds the segments of one run (`_split_into_runs`) in one forward; see `__call__`."""
        arrangement = _Arrangement.of(segments, max(len(tokens), self.min_rows), self._layout.heads)
        self._tabulate_angles(max(arrangement.total, arrangement.positions_end))
        x = self._embedding(tokens)
        inputs = {"x": x} if features is None else {"x": x, "features": np.ascontiguousarray(features)}
        if arrangement.flat > len(tokens):
            added = np.zeros(arrangement.flat - len(tokens), np.int64)
            inputs = {name: np.concatenate([rows, rows[added]]) for name, rows in inputs.items()}
        padded_indices = np.zeros(max(len(logits_indices), self.min_rows if len(logits_indices) else 0), np.int64)
        padded_indices[: len(logits_indices)] = logits_indices
        inputs |= {"logits_indices": padded_indices, **arrangement.inputs}
        for number, window in enumerate(self._layout.masks):
            inputs[f"mask{number}"] = _mask(segments, arrangement, window, self.kv_dtype)
        outputs = {"logits": np.empty((len(padded_indices), self._layout.outputs), np.float32)}
        if features is not None:
            outputs["hidden"] = np.empty((len(padded_indices), self.width), np.float32)
        outputs |= {f"layer{i}": np.empty((arrangement.flat, self.width), np.float32) for i in tapped}
        is_long, session = segments[0].long, self._sessions.own
        wide = self._sessions.all_cores
        if wide is not None and (is_long or (all_cores and self._core_choice.use_all(len(tokens)))):
            session = wide
        binding, are_new = self._binding(session, caches, segments, arrangement, tuple(tapped))
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        is_large = is_long and len(tokens) >= _MIN_PIECE_TOKENS
        begun = time.perf_counter()
        session.run_with_iobinding(binding, SHRINKING_RUN if is_large else None)
        if wide is not None and not is_long:
            self._core_choice.record(len(tokens), session is wide, 1000 * (time.perf_counter() - begun))
        if is_large or are_new:  # buffers that have grown leave the memory of smaller ones
            release_memory()
        own = {name: tokens if name.startswith("layer") else logits_indices for name in outputs}
        results = {name: array[: len(own[name])] for name, array in outputs.items()}
        if self._head_tokens is not None:
            scattered = np.full((len(logits_indices), self.vocab_size), -np.inf, np.float32)
            scattered[:, self._head_tokens] = results["logits"]
            results["logits"] = scattered
        return results

    def _binding(
        self,
        session: Any,
        caches: Sequence[FlatCache],
        parts: Sequence[Segment],
        arrangement: _Arrangement,
        tapped: tuple[int, ...],
    ) -> tuple[Any, bool]:
        """Returns a session's binding of the keys and values of these segments' rows, and whether the caches made new
        views. The caches get room for the segments.

        Each set of tapped layers has its own binding, since a shared one would still write rows to an old address.
        """
        first, stop = arrangement.first, arrangement.first + arrangement.rows
        columns = max(part.start for part in parts) + arrangement.size  # each text's queries are padded to this size
        before = [cache.views for cache in caches]
        pairs = [cache.on_host(stop, columns, like) for cache, like in zip(caches, self.columns, strict=True)]
        views = [cache.views for cache in caches]
        key = (id(session), tapped, first, stop, *views)
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[key] = session.io_binding()
            for number, buffer in enumerate(buffer for pair in pairs for buffer in pair):
                name, own = f"{'kv'[number % 2]}{number // 2}", buffer[first:stop]
                binding.bind_input(name, "cpu", 0, own.dtype, own.shape, own.ctypes.data)
                binding.bind_output(f"new_{name}", "cpu", 0, own.dtype, own.shape, own.ctypes.data)
            for number, (cos, sin) in enumerate(self._angles):
                binding.bind_input(f"cos{number}", "cpu", 0, cos.dtype, cos.shape, cos.ctypes.data)
                binding.bind_input(f"sin{number}", "cpu", 0, sin.dtype, sin.shape, sin.ctypes.data)
        return binding, views != before

    def _tabulate_angles(self, count: int) -> None:
        """Tabulates the angles of the first `count` positions, or of more."""
        if self._angles and count <= self._angles[0].shape[1]:
            return
        positions = -(-2 * count // _ANGLE_BLOCK_POSITIONS) * _ANGLE_BLOCK_POSITIONS
        self._angles = [rope_angles(rope, width, positions).astype(self.kv_dtype) for rope, width in self._layout.ropes]
        self._bindings.clear()


def _build(decoder: DecoderLayers, layout: Layout, per_token: bool, exact: bool) -> Graph:
    """Builds the graph. Later loads of the model find it on disk, and do without the 10 MiB that onnx takes."""
    from outrider.engine.ort.graph import build

    return build(decoder, layout, exact, per_token)


def _count_queries(part: Segment, heads: tuple[int, int]) -> int:
    """Returns how many queries a segment has in attention, with these `heads` (see `layers.Layout`)."""
    return max(heads[0] // heads[1] * part.count, _MIN_QUERIES)


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """Where the queries of a flat row lie in [rows, size], one row for each text from buffer row `first` on.

    A segment's queries lie head after head of a `group`, each head's token after token. `flat`: the tokens of the flat
    row, padded; `total`: the columns in use afterwards; `inputs`: see `graph.Graph`.
    """

    first: int
    rows: int
    size: int
    group: int
    flat: int
    total: int
    positions_end: int
    inputs: dict[str, Array]

    @classmethod
    def of(cls, parts: Sequence[Segment], flat: int, heads: tuple[int, int]) -> _Arrangement:
        query_heads, kv_heads = heads
        group = query_heads // kv_heads
        first = min(part.row for part in parts)
        rows = max(part.row for part in parts) + 1 - first
        size = max(_count_queries(part, heads) for part in parts)
        take, back = np.zeros((rows, size), np.int64), np.zeros((flat, group), np.int64)
        lengths, fed = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        positions = np.zeros((rows, size), np.int64)
        begin = 0
        for part in parts:
            row, count = part.row - first, part.count
            end, used = begin + count, group * count
            places = np.arange(used).reshape(group, count)
            take[row, :used] = (np.arange(begin, end) * group + np.arange(group)[:, None]).reshape(-1)
            take[row, used:] = begin * group
            back[begin:end] = (row * size + places).T
            fed[row] = _count_queries(part, heads)
            lengths[row] = part.start + fed[row] - 1
            own = part.positions
            positions[row, :used].reshape(group, count)[:] = own
            positions[row, used:] = own[-1]
            begin = end
        back[begin:] = back[0]
        total = int(lengths.max()) + 1
        token, shared = np.divmod(take[..., None], group)
        each = np.arange(kv_heads)
        apart = np.concatenate(
            [each * group + shared, np.tile(query_heads + np.arange(2 * kv_heads), (rows, size, 1))], -1
        )
        inputs: dict[str, Array] = {
            "take": (token * (query_heads + 2 * kv_heads) + apart).reshape(-1),
            "laid": np.array([rows, size, -1], np.int64),
            "back": (back[:, None] * kv_heads + each[:, None]).reshape(-1),
            "lengths": lengths,
            "total": np.array(total, np.int32),
            "counts": fed,
            "places": positions,
        }
        return cls(first, rows, size, group, flat, total, int(positions.max()) + 1, inputs)


def _mask(parts: Sequence[Segment], arrangement: _Arrangement, window: int | None, dtype: np.dtype[Any]) -> Array:
    """Returns the mask to add to scores, [rows, 1, size, total]: 0 where a query sees a column."""
    mask = np.full((arrangement.rows, 1, arrangement.size, arrangement.total), _MASKED_SCORE, dtype)
    for part in parts:
        seen = part.seen(part.end, window)
        for begin in range(0, arrangement.group * part.count, part.count):
            mask[part.row - arrangement.first, 0, begin : begin + part.count, : part.end][seen] = 0
    return mask


def _split_into_runs(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """Yields the first token and the segments of each run: all short segments together, and pieces of each long one,
    which would pad the others. The more columns a piece sees, the fewer tokens it has."""
    short = [segment for segment in segments if not segment.long]
    begin = sum(segment.count for segment in short)
    if short:
        yield 0, short
    for segment in segments[len(short) :]:
        start = segment.start
        while start < segment.end:
            most = min(max(_MAX_PIECE_SCORES // max(start, 1), _MIN_PIECE_TOKENS), _MAX_PIECE_TOKENS)
            piece = replace(segment, start=start, count=min(most, segment.end - start))
            yield begin, [piece]
            begin, start = begin + piece.count, start + piece.count
