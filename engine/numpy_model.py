"""`Columns` of a small dense model on the CPU, computed with numpy: for drafters whose forwards are shorter than MLX's
bookkeeping for them.

Serves the Llama, Mistral, Qwen2 and Qwen3 families; whatever else a model is, `NumpyRow` refuses, and the check at load
(`engine.selfcheck`) holds its logits to the model's own. Nothing here is lazy: a forward returns when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine.blocks import Dense, Floats, Norm, host
from outrider.engine.columns import Ints, KeysValues, NewColumns
from outrider.engine.head import unwrapped
from outrider.engine.loading import LoadedModel
from outrider.engine.positions import RopeTable
from outrider.engine.prompt_cache import Saved, Start
from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Beyond this the weights no longer stay in a cache, and MLX's forwards are no longer mostly bookkeeping.
_MOST_BYTES = 512 * 2**20
_STEP = 256
_PREFILL = 128  # as quick a token as 512, and others wait less
_MASKED = np.float32(-1e30)


class NumpyRow:
    """`Columns` (see engine.columns) of one request; the weights are shared by all requests of a model."""

    lazy = False
    whole = False

    def __init__(self, model: LoadedModel) -> None:
        """
        Raises:
            ModelError: the model is not of these families, too large, or not in float32 on a CPU.
        """
        self.net = _net_of(model)
        self._keys = [np.zeros((layer.kv_heads, 0, layer.width), np.float32) for layer in self.net.layers]
        self._values = [np.zeros((layer.kv_heads, 0, layer.width), np.float32) for layer in self.net.layers]

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
        net = texts[0].net
        return mx.array(net.head(net.norm(_forward(texts, new))))

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
        hidden = None if new.seen.all() else np.where(new.seen, np.float32(0), _MASKED)
        rows = slice(begin, begin + len(new.tokens))
        for index in range(len(self.net.layers)):
            self._keys[index] = _with_room(self._keys[index], new.end)
            self._values[index] = _with_room(self._values[index], new.end)
            yield Span(rows, self._keys[index], self._values[index], new.start, new.end, hidden)


@dataclass(frozen=True, slots=True)
class Span:
    """One text in one layer: its `rows` of the forward become the columns start..end of `keys` and `values`.

    `hidden`: what is added to the scores, [R, end]: 0 or very negative.
    """

    rows: slice
    keys: Floats
    values: Floats
    start: int
    end: int
    hidden: Floats | None


def _forward(texts: Sequence[NumpyRow], new: Sequence[NewColumns]) -> Floats:
    """The last layer's output for all texts' tokens, [all R, H]."""
    net = texts[0].net
    x: Floats = net.embedding[np.concatenate([np.array(one.tokens) for one in new])]
    angles = net.rope.on_host(np.concatenate([one.positions[one.start :] for one in new]))
    begins = np.cumsum([0, *(len(one.tokens) for one in new)]).tolist()
    spans = zip(*(text.spans(one, begin) for text, one, begin in zip(texts, new, begins, strict=False)), strict=True)
    with np.errstate(over="ignore"):  # exp(-gate) of a closed gate
        for layer, own in zip(net.layers, spans, strict=True):
            x = layer(x, angles, own)
    return x


class Layer:
    """One transformer block: attention over columns 0..end, then a gated MLP."""

    def __init__(self, block: nn.Module) -> None:
        attention, mlp = block.self_attn, block.mlp
        self._before, self._between = Norm(block.input_layernorm), Norm(block.post_attention_layernorm)
        self._in = Dense([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = Dense([attention.o_proj])
        self._up, self._down = Dense([mlp.gate_proj, mlp.up_proj]), Dense([mlp.down_proj])
        self.heads, self.kv_heads = int(attention.n_heads), int(attention.n_kv_heads)
        self.width = attention.o_proj.weight.shape[1] // self.heads
        self._scale = np.float32(attention.scale)
        self._q_norm = Norm(attention.q_norm) if "q_norm" in attention else None
        self._k_norm = Norm(attention.k_norm) if "k_norm" in attention else None

    def __call__(self, x: Floats, angles: Floats, spans: Sequence[Span]) -> Floats:
        """Feeds x [R, H], the tokens of one text after the other; each attends to its own text.

        Args:
            angles: cosines and signed sines, [2, R, D]; see RopeTable.
        """
        rows, heads, kv_heads, width = len(x), self.heads, self.kv_heads, self.width
        read = self._in(self._before(x)).reshape(rows, heads + 2 * kv_heads, width)
        queries, new = read[:, :heads], read[:, heads : heads + kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            queries, new = self._q_norm(queries), self._k_norm(new)
        turned = _turn(np.concatenate([queries, new], axis=1), angles)
        found = [self._attend(turned[span.rows], read[span.rows, heads + kv_heads :], span) for span in spans]
        x = x + self._out(found[0] if len(found) == 1 else np.concatenate(found))
        gate, up = np.split(self._up(self._between(x)), 2, axis=1)
        out: Floats = x + self._down(gate / (1 + np.exp(-gate)) * up)
        return out

    def _attend(self, turned: Floats, fresh: Floats, span: Span) -> Floats:
        """What one text's queries find, [R, heads x D]; its keys and values are remembered first.

        Args:
            turned: queries, then keys, [R, heads + kv heads, D].
            fresh: values, [R, kv heads, D].
        """
        rows, heads, kv_heads, width, end = len(turned), self.heads, self.kv_heads, self.width, span.end
        span.keys[:, span.start : end] = turned[:, heads:].transpose(1, 0, 2)
        span.values[:, span.start : end] = fresh.transpose(1, 0, 2)
        # Heads that share keys become rows of one product: [kv heads, heads a kv head x R, D].
        asked = turned[:, :heads].reshape(rows, kv_heads, -1, width).transpose(1, 2, 0, 3).reshape(kv_heads, -1, width)
        scores: Floats = asked @ span.keys[:, :end].transpose(0, 2, 1)
        scores *= self._scale
        if span.hidden is not None:
            scores = scores.reshape(kv_heads, -1, rows, end)
            scores += span.hidden
            scores = scores.reshape(kv_heads, -1, end)
        found: Floats = _softmax(scores) @ span.values[:, :end]
        return found.reshape(kv_heads, -1, rows, width).transpose(2, 0, 1, 3).reshape(rows, -1)


class Net:
    """A whole model's weights, laid out for the host."""

    def __init__(self, model: nn.Module) -> None:
        body = model.model
        self.embedding = host(unwrapped(body.embed_tokens).weight)
        self.layers = [Layer(block) for block in body.layers]
        self.norm = Norm(body.norm)
        self.head = Dense([unwrapped(model.lm_head if "lm_head" in model else body.embed_tokens)])
        rope = RopeTable.of(body.layers[0].self_attn.rope.inner, self.layers[0].width)
        if rope is None or not rope.whole:
            raise TypeError("its rope does not turn by tabulated angles")
        self.rope = rope


def _net_of(model: LoadedModel) -> Net:
    """The model's weights for the host, made once a model and kept with it."""
    if mx.default_device().type != mx.cpu:
        raise ModelError("numpy would leave the GPU idle")
    if model.model_type not in FAMILIES or model.weight_bytes > _MOST_BYTES:
        raise ModelError(f"numpy serves {', '.join(FAMILIES)} up to {_MOST_BYTES // 2**20} MiB")
    if model.config.get("sliding_window") and "sliding_attention" in (model.config.get("layer_types") or ()):
        raise ModelError("numpy serves no sliding windows")
    net: Net | None = getattr(model.model, "_host_net", None)
    if net is None:
        try:
            net = Net(model.model)
        except (AttributeError, TypeError, KeyError) as error:
            raise ModelError(f"numpy can't serve this model: {error}") from error
        object.__setattr__(model.model, "_host_net", net)
    return net


def _turn(x: Floats, angles: Floats) -> Floats:
    """Ropes x [R, heads, D] by cosines and signed sines [2, R, D] whose halves turn together."""
    cos, sin = angles[0][:, None], angles[1][:, None]
    half = x.shape[-1] // 2
    turned: Floats = x * cos
    turned[..., :half] += x[..., half:] * sin[..., :half]
    turned[..., half:] += x[..., :half] * sin[..., half:]
    return turned


def _softmax(scores: Floats) -> Floats:
    """Over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _with_room(buffer: Floats, end: int) -> Floats:
    if end <= buffer.shape[1]:
        return buffer
    columns = -(-(end + end // 2) // _STEP) * _STEP
    grown = np.zeros((buffer.shape[0], columns, buffer.shape[2]), np.float32)
    grown[:, : buffer.shape[1]] = buffer
    return grown
