"""The modules that a graph computes, of a dense mlx-lm model or of a draft head, and the layout of its inputs.

Knows what `ort.graph` can build; that module imports onnx, which only the first load of a model needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine.cache import window_of
from outrider.engine.hidden_states import ReducedLMHead, find_backbone, find_embedding, find_final_norm, find_lm_head
from outrider.protocol.errors import ModelError

if TYPE_CHECKING:
    from outrider.engine.ort.graph import Builder

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

SUPPORTED_MODEL_TYPES = (
    "llama", "mistral", "smollm3", "granite", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3",
    "internlm3", "mimo", "nanbeige", "seed_oss",
)  # fmt: skip
"""The check at load compares a few tokens only: what a type does at later positions must be known to `ort.graph`."""

_HEAD_WIDTH_STEP = 16  # of GroupQueryAttention with a rope
_PROBED_POSITIONS = (0, 3, 700)

InputBuilder = Callable[["Builder"], tuple[str, str]]
"""Adds the inputs of the first layer and of its attention, computed from `x` and `features`; returns their names."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's keys and values, and its `window`; None: it sees all tokens."""

    kv_heads: int
    width: int
    window: int | None

    @classmethod
    def of(cls, attention: nn.Module, window: int | None) -> LayerShape:
        weight, bits = attention.o_proj.weight, getattr(attention.o_proj, "bits", 32)  # quantised weights are packed
        return cls(int(attention.n_kv_heads), int(weight.shape[1]) * 32 // bits // int(attention.n_heads), window)


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The modules that a graph computes. `windows`: each layer's; None: it sees all tokens.

    `factor`: embeddings are multiplied by it; `residual_factor`: what attention and MLP add; `output_factor`: the input
    of `output`, which computes the logits of all tokens, or only of these `tokens`, of a vocabulary of `vocab_size`.
    `begin`: builds the input of a head, which reads features besides tokens; `gives_normed`: the head's vectors are
    returned after the norm. `rounded`: dense layers are rounded to 8 bits.
    """

    layers: Sequence[nn.Module]
    windows: Sequence[int | None]
    embedding: nn.Module
    norm: nn.Module
    output: nn.Module
    vocab_size: int
    tokens: mx.array | None = None
    factor: float = 1.0
    residual_factor: float = 1.0
    output_factor: float = 1.0
    begin: InputBuilder | None = None
    gives_normed: bool = False
    rounded: bool = False

    @classmethod
    def of(cls, model: nn.Module, model_type: str) -> DecoderLayers:
        """Returns a model's modules. Raises ModelError: one of them can't be found."""
        backbone, layers = find_backbone(model)
        windows = [window_of(cache) for cache in make_prompt_cache(model)]
        if sum(getattr(layer, "use_sliding", False) for layer in layers) > sum(map(bool, windows)):
            raise ModelError("it has layers with a window, but their caches keep all tokens")
        if len(windows) != len(layers):
            raise ModelError(f"its {len(layers)} layers have {len(windows)} caches")
        norm, table = find_final_norm(backbone), find_embedding(backbone)
        own, tokens = find_lm_head(model), None
        output = table if own is None else own
        vocab_size = int(output.vocab_size if isinstance(output, ReducedLMHead) else output.weight.shape[0])
        if isinstance(output, ReducedLMHead):
            output, tokens = output.rows, output.tokens
        factor = getattr(backbone, "embedding_multiplier", 1.0)  # this and the next two: Granite's
        residual_factor = getattr(layers[0], "residual_multiplier", 1.0)
        output_factor = 1.0 / getattr(model, "logits_scaling", 1.0)
        if model_type.startswith("gemma3"):
            factor = mx.array(int(norm.weight.size) ** 0.5, mx.bfloat16).astype(mx.float32).item()
        return cls(layers, windows, table, norm, output, vocab_size, tokens, factor, residual_factor, output_factor)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a graph's inputs look like. `heads`: each layer's query heads and key heads; `ropes`: with the width of
    their heads; `angles`: each layer's rope, an index of `ropes`; `masks`: their windows."""

    shapes: list[LayerShape]
    heads: tuple[int, int]
    angles: list[int]
    ropes: list[tuple[nn.Module, int]]
    masks: list[int | None]
    quantised: bool
    width: int
    outputs: int

    @classmethod
    def of(cls, decoder: DecoderLayers) -> Layout:
        """Reads no weights.

        Raises:
            ModelError: a layer is not supported.
        """
        attentions = [layer.self_attn for layer in decoder.layers]
        shapes = [LayerShape.of(own, window) for own, window in zip(attentions, decoder.windows, strict=True)]
        heads = {(int(own.n_heads), shape.kv_heads) for own, shape in zip(attentions, shapes, strict=True)}
        if len(heads) > 1:
            raise ModelError("layers with different numbers of heads are not supported")
        if uneven := [shape.width for shape in shapes if shape.width % _HEAD_WIDTH_STEP]:
            raise ModelError(f"heads of width {uneven[0]} are not supported, only multiples of {_HEAD_WIDTH_STEP}")
        used = [(_rope_signature(own.rope), shape.width) for own, shape in zip(attentions, shapes, strict=True)]
        known = list(dict.fromkeys(used))
        ropes = [(attentions[used.index(key)].rope, key[1]) for key in known]
        for rope, width in ropes:
            check_rope(rope, width)
        angles = [known.index(key) for key in used]
        masks = list(dict.fromkeys(decoder.windows))
        parts = [decoder.output, *(part for layer in decoder.layers for part in layer.modules())]
        kinds = nn.QuantizedLinear | nn.QuantizedEmbedding
        quantised = decoder.rounded or any(isinstance(part, kinds) for part in parts)
        hidden, outputs = int(decoder.norm.weight.size), int(decoder.output.weight.shape[0])
        return cls(shapes, heads.pop(), angles, ropes, masks, quantised, hidden, outputs)

    @property
    def kv_dtype(self) -> np.dtype[Any]:
        """The format of keys, values, angles and masks: float16 for a quantised model, which rounds activations more
        than that, else float32."""
        return np.dtype(np.float16 if self.quantised else np.float32)


def levels(layer: nn.Module) -> tuple[Array, int]:
    """Returns a quantised layer's rows of packed levels, in 4 or 8 bits; other widths become 8, without rounding."""
    q, bits = np.array(layer.weight).view(np.uint8), int(layer.bits)
    q = q.reshape(len(q), -1)
    if bits in (4, 8):
        return q, bits
    single = np.unpackbits(q, axis=-1, bitorder="little").reshape(len(q), -1, bits)
    return np.packbits(single, axis=-1, bitorder="little")[..., 0], 8


def dequantise(q: Array, scales: Array, biases: Array, bits: int) -> Array:
    """Returns float32 rows [N, K] of packed levels (`levels`), with the scales and biases [N, groups] of each."""
    if bits == 4:
        q = np.stack([q & 15, q >> 4], axis=-1)
    apart: Array = q.reshape(*scales.shape, -1) * scales[..., None]
    return (apart + biases[..., None]).reshape(len(q), -1)


def to_numpy(array: mx.array) -> Array:
    """Returns a float32 copy that numpy owns."""
    return np.array(array.astype(mx.float32), dtype=np.float32)


def rope_angles(rope: nn.Module, width: int, count: int) -> Array:
    """Returns the rope's cosines and sines at the first `count` positions, float32 [2, count, width / 2]."""
    first = np.zeros((1, 1, count, width), dtype=np.float32)
    first[..., : width // 2] = 1.0
    turned = np.array(rope(mx.array(first), offset=0))[0, 0]
    return np.stack(np.split(turned, 2, axis=-1))


def check_rope(rope: nn.Module, width: int) -> None:
    """Raises ModelError unless the rope rotates dimension i with i + `width` / 2, by an angle of the position alone."""
    angles = rope_angles(rope, width, max(_PROBED_POSITIONS) + 1)
    x = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    first, second = np.split(x, 2)
    for position in _PROBED_POSITIONS:
        cos, sin = angles[:, position]
        turned = np.concatenate([first * cos - second * sin, first * sin + second * cos])
        actual = np.array(rope(mx.array(x)[None, None, None], offset=position)).ravel()
        if "Dynamic" in type(rope).__name__ or not np.allclose(turned, actual, rtol=1e-4, atol=1e-4):
            raise ModelError("its rope can't be tabulated for whole heads")  # Dynamic: also by the text's length


def _rope_signature(rope: nn.Module) -> Any:
    plain = {k: v for k, v in vars(rope).items() if isinstance(v, int | float | bool | str)}
    arrays = {k: to_numpy(v).tobytes() for k, v in rope.items() if isinstance(v, mx.array)}
    return type(rope).__name__, tuple(sorted(plain.items())), tuple(sorted(arrays.items()))
