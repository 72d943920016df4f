"""Layers of draft heads on a CPU by numpy: few rows at a time, over the buffers of `engine.flat`. Not lazy.

Supports the layers of the Llama, Mistral, Qwen2 and Qwen3 families; other models are refused. MLX copies the weights at
each call and computes exponentials one by one, so few rows cost half as much here (docs/log.md). Texts of different
lengths need no padding: attention is computed text by text. Keys and values are written into MLX's buffers, so prefill,
rollback and the prompt cache are those of `engine.flat`.

A BLAS copies ("packs") the weights at every call, too, which for a few rows costs more than the product.
`BlockedLinear` keeps weights in column blocks small enough for the kernels that read them in place: eight rows through
a 3M-parameter draft model take 0.5 ms, instead of 1.2 in plain numpy and 1.9 in MLX. Values never change, only their
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.flat import Bools, FlatCache, Floats, Segment, one_column
from outrider.engine.hidden_states import ReducedLMHead, unwrapped
from outrider.engine.loading import LoadedModel
from outrider.engine.positions import Ints, RopeTable
from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Larger weights don't stay in a CPU cache, and MLX's forwards are no longer mostly overhead.
_MOST_BYTES = 512 * 2**20
_MASKED = np.float32(-1e30)
# Scores this far below the highest one have no weight. Their exponentials may be subnormal numbers, which a CPU
# multiplies a hundred times slower: a third of a forward over long texts (docs/log.md).
_FARTHEST = np.float32(-60)


_WIDTH = 64  # columns of a block
# The largest product that OpenBLAS computes without packing: more rows are split into parts, and each block is
# multiplied by all parts in turn.
_SMALL = 10**6


class BlockedLinear:
    """x [R, K] -> x W + b [R, N], float32. Several layers with the same input may be one `BlockedLinear`."""

    def __init__(self, layers: list[nn.Linear] | list[nn.Embedding]) -> None:
        """Raises TypeError if a layer is not a plain dense one."""
        if any(type(layer).__name__ not in ("Linear", "Embedding", "HeadEmbedding") for layer in layers):
            raise TypeError(f"{type(layers[0]).__name__} is not a plain dense layer")
        weight = np.concatenate([host(layer.weight) for layer in layers])
        self.width = weight.shape[0]
        padded = np.pad(weight, ((0, -self.width % _WIDTH), (0, 0)))
        # [N, K] as stored -> [N / block, 1, K, block]
        self._blocks = np.ascontiguousarray(padded.reshape(-1, 1, _WIDTH, weight.shape[1]).swapaxes(2, 3))
        biases = [layer["bias"] for layer in layers if "bias" in layer]
        self._bias = np.concatenate([host(bias) for bias in biases]) if biases else None

    def __call__(self, x: Floats) -> Floats:
        count, _, depth, width = self._blocks.shape
        parts = max(-(-len(x) * depth * width // _SMALL), 1)
        each = -(-len(x) // parts)
        padded = x if parts * each == len(x) else np.pad(x, ((0, parts * each - len(x)), (0, 0)))
        rows = np.empty((parts, each, count, width), np.float32)
        # Writes each product in place. "C": all parts while a block is in the cache, whatever the strides of `rows`.
        np.matmul(padded.reshape(parts, each, depth), self._blocks, out=rows.transpose(2, 0, 1, 3), order="C")
        output: Floats = rows.reshape(parts * each, count * width)[: len(x), : self.width]
        if self._bias is not None:
            output += self._bias
        return output


class Norm:
    """RMS normalisation of the last axis."""

    def __init__(self, layer: nn.RMSNorm) -> None:
        self._weight = host(layer.weight)
        self._eps = np.float32(layer.eps)

    def __call__(self, x: Floats) -> Floats:
        normed: Floats = np.square(x)
        mean = np.add.reduce(normed, axis=-1, keepdims=True)  # pairwise sums, since a plain dot product loses digits
        mean /= x.shape[-1]
        mean += self._eps
        np.divide(x, np.sqrt(mean, out=mean), out=normed)
        normed *= self._weight
        return normed


def host(array: mx.array) -> Floats:
    """Returns a float32 copy that numpy owns."""
    return np.array(array.astype(mx.float32), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class NumpySegment:
    """One text in one layer: its `rows` of the forward become the columns `place` of `keys` and `values`, of which it
    then has `end`. `hidden` is added to the scores, [R, end]: 0 or very negative.
    """

    rows: slice
    keys: Floats
    values: Floats
    place: slice | Ints
    end: int
    hidden: Floats | None


def hidden(seen: Bools) -> Floats | None:
    """Returns what to add to scores to mask columns that are not `seen`, [R, end]; None: all are seen."""
    return None if seen.all() else np.where(seen, np.float32(0), _MASKED)


def exponentials(scores: Floats) -> Floats:
    """Computes the exponentials of scores relative to the highest of their row, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.maximum(scores, _FARTHEST, out=scores)
    return np.exp(scores, out=scores)


class NumpyLayer:
    """One transformer block: attention over columns 0..end, then a gated MLP."""

    def __init__(self, block: nn.Module) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.before, self._between = Norm(block.input_layernorm), Norm(block.post_attention_layernorm)
        self._in = BlockedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = BlockedLinear([attention.o_proj])
        self._up, self._down = BlockedLinear([mlp.gate_proj, mlp.up_proj]), BlockedLinear([mlp.down_proj])
        self.heads, self.kv_heads = int(attention.n_heads), int(attention.n_kv_heads)
        self.width = attention.o_proj.weight.shape[1] // self.heads
        self._scale = np.float32(attention.scale)
        self._q_norm = Norm(attention.q_norm) if "q_norm" in attention else None
        self._k_norm = Norm(attention.k_norm) if "k_norm" in attention else None

    def __call__(self, x: Floats, angles: Floats, spans: Sequence[NumpySegment]) -> Floats:
        """Feeds x [R, H], the tokens of one text after another; each token attends to its own text.

        Args:
            angles: cosines and signed sines, [2, R, D]; see RopeTable.
        """
        return self.behind(x, self.before(x), angles, spans)

    def behind(self, x: Floats, seen: Floats, angles: Floats, spans: Sequence[NumpySegment]) -> Floats:
        """Feeds x like a call, but attention reads `seen` [R, any] instead of the normed x."""
        rows, heads, kv_heads, width = len(x), self.heads, self.kv_heads, self.width
        read = self._in(seen).reshape(rows, heads + 2 * kv_heads, width)
        asking = read[:, : heads + kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            asking = np.concatenate([self._q_norm(asking[:, :heads]), self._k_norm(asking[:, heads:])], axis=1)
        turned = _turn(asking, angles)
        outputs = [self._attend(turned[span.rows], read[span.rows, heads + kv_heads :], span) for span in spans]
        x = x + self._out(outputs[0] if len(outputs) == 1 else np.concatenate(outputs))
        x += self._down(_gated(self._up(self._between(x))))
        return x

    def _attend(self, turned: Floats, fresh: Floats, span: NumpySegment) -> Floats:
        """Writes one text's keys and values, and returns the attention of its queries, [R, heads x D].

        Args:
            turned: queries, then keys, [R, heads + kv heads, D].
            fresh: values, [R, kv heads, D].
        """
        rows, heads, kv_heads, width, end = len(turned), self.heads, self.kv_heads, self.width, span.end
        span.keys[:, span.place] = turned[:, heads:].transpose(1, 0, 2)
        span.values[:, span.place] = fresh.transpose(1, 0, 2)
        # Heads that share keys become rows of one product: [kv heads, heads per kv head x R, D].
        asked = turned[:, :heads].reshape(rows, kv_heads, -1, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)
        asked = np.multiply(asked, self._scale, dtype=np.float32)
        scores: Floats = asked @ span.keys[:, :end].transpose(0, 2, 1)
        if span.hidden is not None:
            scores = scores.reshape(kv_heads, -1, rows, end)
            scores += span.hidden
            scores = scores.reshape(kv_heads, -1, end)
        weights = exponentials(scores)
        output: Floats = weights @ span.values[:, :end]
        output /= weights.sum(axis=-1, keepdims=True)
        return output.reshape(kv_heads, -1, rows, width).transpose(2, 0, 1, 3).reshape(rows, -1)


def rope_of(block: nn.Module) -> RopeTable:
    """Returns the layer's rope table. Raises TypeError if its rope is of another kind."""
    attention = block.self_attn
    rope = RopeTable.of(attention.rope.inner, attention.o_proj.weight.shape[1] // attention.n_heads)
    if rope is None or not rope.whole:
        raise TypeError("its rope can't be tabulated")
    return rope


class Ends:
    """A model's embedding [V, H] and its output layer."""

    def __init__(self, model: nn.Module) -> None:
        self.embedding = host(unwrapped(model.model.embed_tokens).weight)
        layer = unwrapped(model.lm_head if "lm_head" in model else model.model.embed_tokens)
        self.head = BlockedLinear([layer.rows if isinstance(layer, ReducedLMHead) else layer])


def ends_of(model: LoadedModel) -> Ends:
    """Loads embedding and output layer of a model whose weights may still be in their files; reads no other layers.

    Raises:
        ModelError: numpy can't compute this model.
    """
    _check(model)
    try:
        return Ends(model.model)
    except (AttributeError, TypeError, KeyError) as error:
        raise ModelError(f"numpy can't compute this model: {error}") from error


def _check(model: LoadedModel) -> None:
    """Raises ModelError if numpy can't compute this model."""
    if mx.default_device().type != mx.cpu:
        raise ModelError("numpy would leave the GPU idle")
    if model.model_type not in FAMILIES or 4 * model.parameters > _MOST_BYTES:
        raise ModelError(f"numpy computes only {', '.join(FAMILIES)} models up to {_MOST_BYTES // 2**20} MiB")
    if model.config.get("sliding_window") and "sliding_attention" in (model.config.get("layer_types") or ()):
        raise ModelError("numpy computes no sliding windows")


def _turn(x: Floats, angles: Floats) -> Floats:
    """Ropes x [R, heads, D] by cosines and signed sines [2, R, D] whose halves turn together."""
    cos, sin = angles[0][:, None], angles[1][:, None]
    turned: Floats = x * cos
    halves = (*x.shape[:2], 2, x.shape[-1] // 2)
    turned += (x.reshape(halves)[:, :, ::-1] * sin.reshape(len(x), 1, *halves[2:])).reshape(x.shape)
    return turned


def _gated(both: Floats) -> Floats:
    """Returns SiLU of the gate times the other half: [R, 2 F] -> [R, F]."""
    width = both.shape[1] // 2
    gate, up = both[:, :width], both[:, width:]
    out: Floats = np.negative(gate)
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


MOST_ROWS = 256  # for more rows MLX is as fast


def spans(
    layers: Sequence[NumpyLayer], segments: Sequence[Segment], caches: Sequence[FlatCache]
) -> Iterator[list[NumpySegment]]:
    """Yields the segments of each layer's attention."""
    ends = np.cumsum([segment.count for segment in segments]).tolist()
    reach = max(segment.row for segment in segments) + 1, max(segment.end for segment in segments)
    masks = [hidden(segment.seen(segment.end, None)) for segment in segments]
    for layer, own in zip(layers, caches, strict=True):
        keys, values = own.on_host(*reach, one_column(layer.kv_heads, layer.width))
        yield [
            NumpySegment(
                slice(end - segment.count, end),
                keys[segment.row],
                values[segment.row],
                segment.place,
                segment.end,
                mask,
            )
            for segment, end, mask in zip(segments, ends, masks, strict=True)
        ]
