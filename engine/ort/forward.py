"""Forwards of one model by ONNX Runtime, and the check at load whether they are used.

`OrtForward` computes one flat row of several texts over the buffers of `engine.flat`, which also has rollback, copies
and the prompt cache. `serve` compares logits with the model's own when
the model loads: they may differ by the rounding of float32, or of activations to 8 bits if the checkpoint is quantised.

On the quantised path a token's logits have the same bits however it is fed: alone, in a chain, in a piece of a prompt,
or together with other requests. So chains and other requests can't change a text. Trees are not fed there, because the
sums of their side branches have another order. Knows rows, columns and positions; knows nothing of tokens' meaning or
of requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import FlatAttentionMetadata, FlatCache, Segment
from outrider.engine.memory import give_back
from outrider.engine.ort.graph import FAMILIES, Array, DecoderLayers, Layout, build, host, levels
from outrider.engine.ort.sessions import CachedGraph, Sessions, free_arena, kernels
from outrider.engine.positions import Ints
from outrider.protocol.errors import InvalidRequest, ModelError, first_line, named_errors
from outrider.protocol.worker_link import CPU_KERNELS, KERNELS

_MASKED = -65504.0  # of float16 the lowest: the weight of such a column is 0
_PADDED = 2  # queries at least: for one ONNX Runtime computes attention by another path, with other bits
_PIECE = 128  # tokens of a text in a run at most: its queries write as many columns beyond it for each further head
_ANGLES = 512  # positions whose angles are tabulated at a time
_BOUND = 16  # bindings that are kept
_LONG = 128  # tokens from which on a forward leaves much free memory


class Embedding:
    """A model's embedding in numpy."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        self._factor = np.float32(factor)
        self._bits = 0
        if isinstance(layer, nn.QuantizedEmbedding):
            self._weight, self._bits = levels(layer)
            self._scales, self._biases = host(layer.scales), host(layer.biases)
        else:
            self._weight = host(layer.weight)

    def __call__(self, tokens: Ints) -> Array:
        """Returns the rows [T, H] of tokens [T]."""
        rows: Array = self._weight[tokens]
        if self._bits:
            q = rows if self._bits == 8 else np.stack([rows & 15, rows >> 4], axis=-1)
            scales = self._scales[tokens]
            apart = q.reshape(len(tokens), scales.shape[1], -1) * scales[..., None]
            rows = (apart + self._biases[tokens][..., None]).reshape(len(tokens), -1)
        return rows * self._factor if self._factor != 1 else rows


class OrtForward:
    """The sessions of a model, or of a head. `quantised`: activations are rounded to 8 bits. `least`: the rows that
    forwards are padded to."""

    def __init__(self, decoder: DecoderLayers, cached: CachedGraph | None = None) -> None:
        """Opens the sessions. Raises ModelError if ONNX Runtime can't compute these modules."""
        layout = Layout.of(decoder)
        self._sessions = Sessions.open(partial(build, decoder, layout), cached)
        self._heads = layout.heads
        self.shapes, self._ropes, self._masks = layout.shapes, layout.ropes, layout.masks
        self.quantised, self.width, self._outputs = layout.quantised, layout.width, layout.outputs
        self.kv_dtype = layout.kv_dtype
        self.columns = [mx.array(np.zeros((1, s.kv_heads, 1, s.width), self.kv_dtype)) for s in self.shapes]
        self._head_tokens = np.array(decoder.tokens) if decoder.tokens is not None else None
        self.vocab_size = decoder.vocab_size
        self.least = 1
        self._embedding = Embedding(decoder.embedding, decoder.factor)
        self._angles: list[tuple[Array, Array]] = []
        self._bound: dict[Any, Any] = {}
        self._look_up(_ANGLES)

    @property
    def number_format(self) -> str:
        """The name of what a quantised forward's bits depend on: others may choose another token."""
        return kernels() + ("-exact" if self._sessions.exact else "")

    def __call__(
        self,
        tokens: Ints,
        segments: Sequence[Segment],
        caches: Sequence[FlatCache],
        wanted: Ints,
        tapped: Sequence[int] = (),
        all_cores: bool = False,
        features: Array | None = None,
    ) -> dict[str, Array]:
        """Feeds tokens [T], segment after segment, short ones first. Returns `logits` [R, V] at the `wanted` places of
        the flat row.

        Long segments are fed in pieces, on all cores in any case, because their texts wait for the first token.

        Args:
            caches: each layer's, whose buffers are written in place.
            tapped: layers whose outputs are returned as `layer{i}` [T, H].
            all_cores: also computes on the drafters' core, if they have one.
            features: float32 [T, W], for a head; then `hidden` [R, H], the last layer's output, is returned, too.
        """
        runs = list(_runs(segments))
        if len(runs) == 1:
            return self._run(tokens, runs[0][1], caches, wanted, tapped, all_cores, features)
        found: dict[str, Array] = {}
        for first, own in runs:
            end = first + sum(segment.count for segment in own)
            here = np.flatnonzero((wanted >= first) & (wanted < end))
            rows = features[first:end] if features is not None else None
            results = self._run(tokens[first:end], own, caches, wanted[here] - first, tapped, all_cores, rows)
            for name, part in results.items():
                count, at = (len(tokens), slice(first, end)) if name.startswith("layer") else (len(wanted), here)
                found.setdefault(name, np.empty((count, part.shape[1]), np.float32))[at] = part
        return found

    def _run(
        self,
        tokens: Ints,
        segments: Sequence[Segment],
        caches: Sequence[FlatCache],
        wanted: Ints,
        tapped: Sequence[int],
        all_cores: bool,
        features: Array | None,
    ) -> dict[str, Array]:
        """Feeds the segments of one run (`_runs`) in one forward; see `__call__`."""
        place = _Arrangement.of(segments, max(len(tokens), self.least), self._heads)
        self._look_up(max(place.total, place.positions_end))
        x = self._embedding(tokens)
        inputs = {"x": x} if features is None else {"x": x, "features": np.ascontiguousarray(features)}
        if place.flat > len(tokens):
            added = np.zeros(place.flat - len(tokens), np.int64)
            inputs = {name: np.concatenate([rows, rows[added]]) for name, rows in inputs.items()}
        asked = np.zeros(max(len(wanted), self.least if len(wanted) else 0), np.int64)
        asked[: len(wanted)] = wanted
        inputs |= {"wanted": asked, **place.inputs}
        for number, window in enumerate(self._masks):
            inputs[f"mask{number}"] = _mask(segments, place, window, self.kv_dtype)
        outputs = {"logits": np.empty((len(asked), self._outputs), np.float32)}
        if features is not None:
            outputs["hidden"] = np.empty((len(asked), self.width), np.float32)
        outputs |= {f"layer{i}": np.empty((place.flat, self.width), np.float32) for i in tapped}
        wide = self._sessions.all_cores
        session = wide if wide is not None and (all_cores or segments[0].long) else self._sessions.own
        binding = self._binding(session, caches, segments, place, tuple(tapped))
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding, free_arena() if len(tokens) >= _LONG else None)
        if len(tokens) >= _LONG:
            give_back()
        results = {
            name: array[: len(tokens) if name.startswith("layer") else len(wanted)] for name, array in outputs.items()
        }
        if self._head_tokens is not None:
            whole = np.full((len(wanted), self.vocab_size), -np.inf, np.float32)
            whole[:, self._head_tokens] = results["logits"]
            results["logits"] = whole
        return results

    def _binding(
        self,
        session: Any,
        caches: Sequence[FlatCache],
        parts: Sequence[Segment],
        place: _Arrangement,
        tapped: tuple[int, ...],
    ) -> Any:
        """Returns a session's binding of the keys and values of these segments' rows; a new one if a cache has new
        views. The caches get room for the segments.

        Each set of tapped layers has its own binding, since a shared one would still write rows to an old place.
        """
        first, stop = place.first, place.first + place.rows
        columns = max(part.start + _queries(part, self._heads) for part in parts)
        pairs = [cache.on_host(stop, columns, like) for cache, like in zip(caches, self.columns, strict=True)]
        key = (id(session), tapped, first, stop, *(cache.views for cache in caches))
        binding = self._bound.get(key)
        if binding is None:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            binding = self._bound[key] = session.io_binding()
            for number, buffer in enumerate(buffer for pair in pairs for buffer in pair):
                name, own = f"{'kv'[number % 2]}{number // 2}", buffer[first:stop]
                binding.bind_input(name, "cpu", 0, own.dtype, own.shape, own.ctypes.data)
                binding.bind_output(f"new_{name}", "cpu", 0, own.dtype, own.shape, own.ctypes.data)
            for number, (cos, sin) in enumerate(self._angles):
                binding.bind_input(f"cos{number}", "cpu", 0, cos.dtype, cos.shape, cos.ctypes.data)
                binding.bind_input(f"sin{number}", "cpu", 0, sin.dtype, sin.shape, sin.ctypes.data)
        return binding

    def _look_up(self, count: int) -> None:
        """Tabulates the angles of at least `count` positions."""
        if self._angles and count <= len(self._angles[0][0]):
            return
        positions = np.arange(-(-2 * count // _ANGLES) * _ANGLES)
        tables = [rope.on_host(positions) for rope in self._ropes]
        halves = [table[..., table.shape[-1] // 2 :] for table in tables]  # in the first halves sines are negated
        self._angles = [(half[0].astype(self.kv_dtype), half[1].astype(self.kv_dtype)) for half in halves]
        self._bound.clear()


def _queries(part: Segment, heads: tuple[int, int]) -> int:
    """Returns how many queries a segment has in attention, with these `heads` (see `graph.Layout`)."""
    return max(heads[0] // heads[1] * part.count, _PADDED)


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
        size = max(_queries(part, heads) for part in parts)
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
            fed[row] = _queries(part, heads)
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


def _mask(parts: Sequence[Segment], place: _Arrangement, window: int | None, dtype: np.dtype[Any]) -> Array:
    """Returns the mask to add to scores, [rows, 1, size, total]: 0 where a query sees a column."""
    mask = np.full((place.rows, 1, place.size, place.total), _MASKED, dtype)
    for part in parts:
        seen = part.seen(part.end, window)
        for begin in range(0, place.group * part.count, part.count):
            mask[part.row - place.first, 0, begin : begin + part.count, : part.end][seen] = 0
    return mask


def _runs(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """Yields the first token and the segments of each run: all short segments together, and pieces of each long one,
    which would pad the others."""
    short = [segment for segment in segments if not segment.long]
    begin = sum(segment.count for segment in short)
    if short:
        yield 0, short
    for segment in segments[len(short) :]:
        for start in range(segment.start, segment.end, _PIECE):
            piece = replace(segment, start=start, count=min(_PIECE, segment.end - start))
            yield begin, [piece]
            begin += piece.count


log = logging.getLogger(__name__)

_OWN = 3  # tokens that MLX computes: for a quantised model each takes as long as ten by ONNX Runtime
_EXACT, _ROUNDED = 1e-3, 0.5  # allowed mean of `deviations`: float32, and 8 bits
_WIDE, _NEIGHBOUR = 11, 3


def enabled() -> bool:
    """Returns whether ONNX Runtime may compute in this process: its device is a CPU, and `CPU_KERNELS` allows it.

    Raises:
        InvalidRequest: `CPU_KERNELS` is none of `KERNELS`.
    """
    chosen = os.environ.get(CPU_KERNELS) or "auto"
    if chosen not in KERNELS:
        raise InvalidRequest(f"{CPU_KERNELS} is {chosen!r}; expected {' or '.join(KERNELS)}")
    return chosen != "mlx" and mx.default_device().type == mx.cpu


def serve(model: nn.Module, model_type: str, folder: Path) -> OrtForward | None:
    """Returns the model's forwards by ONNX Runtime; None if MLX computes them (the log says why).

    Args:
        model: its parameters may be lazy; quantised ones stay quantised.
        folder: the model's files, by which its graph is kept on disk.

    Raises:
        InvalidRequest: `CPU_KERNELS` is none of `KERNELS`.
    """
    if not enabled():
        return None
    if model_type not in FAMILIES:
        log.info("MLX computes this %s model: ONNX Runtime serves %s", model_type, ", ".join(FAMILIES))
        return None
    try:
        with named_errors("ONNX Runtime's forwards", logging.INFO):
            cached = CachedGraph.of(folder)
            forward = OrtForward(DecoderLayers.of(model, model_type), cached)
            least = cached.least if cached is not None else None
            if least is None:
                check(forward, lambda tokens: model(mx.array(tokens[None]))[0])
                if cached is not None:
                    cached.passed(forward.least)
            else:
                forward.least = least
            return forward
    except ModelError as error:
        log.warning("MLX computes this %s model: %s", model_type, first_line(error))
        return None


Features = Callable[[Ints], Array | None]
"""Returns the features of tokens [T], [T, W]; None: a model needs none."""


def check(forward: OrtForward, own: Callable[[Ints], mx.array], features: Features = lambda tokens: None) -> None:
    """Compares logits, and sets `forward.least`: the rows that a forward needs for its bits to be always the same.

    `own` computes the logits [T, V] of a text's first tokens without ONNX Runtime.

    Raises:
        ModelError: the logits are not the model's own, or depend on what else is fed in the same forward.
    """
    tokens = np.array([(7919 * i + 13) % forward.vocab_size for i in range(_WIDE)], np.int32)
    expected, logits = own(tokens[:_OWN]), alone(forward, tokens, (_OWN,), features=features)
    mean = float(deviations(expected, mx.array(logits)).mean())
    if not mean <= (_ROUNDED if forward.quantised else _EXACT):
        raise ModelError(f"its logits differ from the model's own by {mean:.2g} of their standard deviation")
    if not forward.quantised:
        return
    for forward.least in (1, 2):
        whole = alone(forward, tokens, (_WIDE,), features=features)
        if (alone(forward, tokens, (1, 1, 2, 3, 4), features=features) == whole).all():
            break
    else:
        raise ModelError("its logits depend on how many tokens are fed at once")
    beside = alone(forward, tokens, (3, 1, _WIDE - 4), features=features, beside=((0, 2), (2,), (0, 2)))
    if not (beside == whole).all():
        raise ModelError("its logits depend on the other texts in the same forward")
    if not (alone(forward, tokens, (1, 2, 8), True, features) == whole).all():
        raise ModelError("its logits depend on the number of cores")


def deviations(own: mx.array, logits: mx.array) -> Array:
    """Returns how far rows of logits [R, V] are from a model's own: their root mean square, in standard deviations of
    its own or 1, [R]. Tokens that the model excludes, as a draft model may, don't count."""
    known = host(own) != -np.inf
    own_rows, rows = (np.where(known, host(each), 0) for each in (own, logits))
    errors: Array = np.sqrt(np.square(rows - own_rows).mean(axis=-1, where=known))
    errors /= np.maximum(own_rows.std(axis=-1, where=known), 1.0)
    return errors


def alone(
    forward: OrtForward,
    tokens: Array,
    counts: Sequence[int],
    all_cores: bool = False,
    features: Features = lambda tokens: None,
    beside: Sequence[tuple[int, ...]] = (),
) -> Array:
    """Returns the logits of one text's tokens, fed in pieces of these sizes.

    `beside`: the rows of the texts that begin next to each piece; this text is in row 1.
    """
    caches, logits, start = [FlatCache(FlatAttentionMetadata()) for _ in forward.shapes], [], 0
    for count, rows in zip(counts, beside or [()] * len(counts), strict=True):
        own = Segment(1, start, count)
        segments = sorted([own, *(Segment(row, 0, _NEIGHBOUR) for row in rows)], key=lambda segment: segment.row)
        fed = [tokens[start : start + count] if segment is own else tokens[:_NEIGHBOUR] for segment in segments]
        flat, begin = np.concatenate(fed), sum(segment.count for segment in segments if segment.row < own.row)
        wanted = np.arange(begin, begin + count)
        logits.append(forward(flat, segments, caches, wanted, (), all_cores, features(flat))["logits"])
        start += count
    return np.concatenate(logits)
