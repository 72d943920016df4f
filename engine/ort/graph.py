"""Builds an ONNX graph of a dense mlx-lm model, or of a draft head, from the weights of its module, quantised or not.

A forward feeds one flat row of tokens of several texts. Dense layers see the flat row; attention sees it arranged by
text [B, S], and writes keys and values in place. Knows layers and the formats of weights; knows nothing of texts,
buffers or scheduling. `ort.check.check_logits` compares the graph's logits with the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from outrider.engine.ort.layers import Array, DecoderLayers, LayerShape, Layout, dequantise, levels, to_numpy
from outrider.protocol.errors import ModelError

_MICROSOFT_DOMAIN = "com.microsoft"
_MICROSOFT_OPS = (
    "BranchwiseRMSNorm", "GroupQueryAttention", "MatMulIntegerToFloat", "MatMulNBits", "QuickGelu",
    "SkipSimplifiedLayerNormalization",
)  # fmt: skip
_OPSET_VERSION, _IR_VERSION = 21, 10
# The tolerance, in quantisation steps, for zero points that are integers up to the rounding of half-precision scales.
_ZERO_POINT_TOLERANCE = 2.0**-7
_GROUP_SIZE = 32
_MAX_BLOCK_SIZE = 64  # of a Hadamard rotation
_ROTATED_AT_ONCE = 2**16  # weights, which fit in a core's cache
_MAX_LEVEL = np.float32(127)  # of a weight or an activation with its own sign, in 8 bits


@dataclass(slots=True)
class Graph:
    """A model as ONNX: `proto` without weights, which are in `weights` by name.

    Attention has one head for each key head. The G query heads that share it are G queries, one after the other for all
    tokens of a text, so keys and values are read once. The further queries write to columns after the text.

    Inputs: `x` [T, H], embedded tokens; of a head `features` [T, W]; `take` [B x S x 3 x KV], the heads at each place
    of [B, S], KV of queries, keys and values each, as numbers of a token's query heads, key heads and value heads,
    token after token; `back` [T x heads], the place of each query head's result in [B, S, KV]; `lengths` [B], each
    text's columns afterwards, less one; `total`; `counts` [B], the queries of a text; `places` [B, S], their positions;
    `cos{r}` and `sin{r}` of each rope; `mask{w}` [B, 1, S, total] for each of the layout's masks; `logits_indices` [R],
    the tokens that get logits. For each layer `k{i}`, `v{i}` and, bound to the same memory, `new_k{i}`, `new_v{i}`.
    Outputs: `logits` [R, V], `hidden` [R, H], the last layer's output (see `gives_normed`); each layer's, `layer{i}`
    [T, H].

    `biases`: the argument of `exact_biases.write`, if that has to be called.
    """

    proto: bytes
    weights: dict[str, Array]
    biases: dict[str, tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class Affine:
    """w = scales x q + biases, by groups along K: q packed [N, K x bits / 8], low bits first.

    Groups wider than 32 are split: with AVX-512 their kernels compute the last of an odd number of rows differently.
    """

    q: Array
    scales: Array
    biases: Array
    bits: int

    @classmethod
    def of(cls, layer: nn.Module) -> Affine:
        if getattr(layer, "mode", "affine") != "affine":
            raise ModelError(f"weights of {layer.bits} bits ({layer.mode}) are not supported")
        q, bits = levels(layer)
        parts = max(1, int(layer.group_size) // _GROUP_SIZE)
        return cls(q, np.repeat(to_numpy(layer.scales), parts, 1), np.repeat(to_numpy(layer.biases), parts, 1), bits)

    @classmethod
    def rounded(cls, weight: Array) -> Affine:
        """Rounds weights [N, K], of whole groups, to 8 bits."""
        q, scales = _quantise(weight, 8, _GROUP_SIZE)
        return cls(q, scales, -128 * scales, 8)

    @property
    def group(self) -> int:
        return int(self.q.shape[1]) * 8 // self.bits // int(self.scales.shape[1])

    def zero_points(self) -> tuple[Array, Array]:
        """Returns zero points [N, groups], integers from 0 to 2^bits - 1, and what they leave of the biases."""
        points = np.rint(np.clip(-self.biases / np.where(self.scales == 0, 1, self.scales), 0, 2**self.bits - 1))
        rest = self.biases + points * self.scales
        return points.astype(np.uint8), np.where(
            np.abs(rest) <= _ZERO_POINT_TOLERANCE * np.abs(self.scales), np.float32(0), rest
        )


@dataclass
class Builder:
    """A graph under construction. Nodes may be added twice: ONNX Runtime computes equal ones once.

    `per_token`: see `_per_token`.
    """

    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    kv_type: int = TensorProto.FLOAT
    rounded: bool = False
    exact: bool = False
    per_token: bool = False
    biases: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Adds a node; returns the name of its first output."""
        name, domain = f"{kind}_{len(self.nodes)}", _MICROSOFT_DOMAIN if kind in _MICROSOFT_OPS else ""
        names = outputs or [name]
        self.nodes.append(helper.make_node(kind, inputs, names, name=name, domain=domain, **attributes))
        return names[0]

    def weight(self, array: Array) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights[name] = np.ascontiguousarray(array)
        return name

    def ints(self, *values: int) -> str:
        """Returns a constant of integers, such as a shape, created once."""
        return self.constant("ints_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, np.int64))

    def constant(self, name: str, value: Array | np.generic) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def scale(self, x: str, factor: float) -> str:
        return x if factor == 1 else self.op("Mul", x, self.weight(np.array(factor, np.float32)))

    def linear(self, x: str, layers: Sequence[nn.Module]) -> str:
        """Adds layers with the same input x [R, K], concatenated: [R, sum of N]. Layers of one form are one product."""
        first = layers[0]
        if len({_linear_form(layer) for layer in layers}) > 1:
            return self.op("Concat", *(self.linear(x, [layer]) for layer in layers), axis=-1)
        if isinstance(first, nn.QuantizedLinear | nn.QuantizedEmbedding):
            parts = [Affine.of(layer) for layer in layers]
            rows = zip(*((part.q, part.scales, part.biases) for part in parts), strict=True)
            q, scales, shifts = map(np.concatenate, rows)
            multiply = self._per_token if self.per_token else self._affine
            product = multiply(x, Affine(q, scales, shifts, parts[0].bits))
        elif type(first).__name__ in ("Linear", "Embedding"):
            dense = np.concatenate([to_numpy(layer.weight) for layer in layers])
            if self.rounded and dense.shape[1] % _GROUP_SIZE == 0:
                product = self._affine(x, Affine.rounded(dense))
            else:
                product = self.op("MatMul", x, self.weight(dense.T))
        else:
            raise ModelError(f"layers of kind {type(first).__name__} are not supported")
        if "bias" not in first:
            return product
        return self.op("Add", product, self.weight(np.concatenate([to_numpy(layer.bias) for layer in layers])))

    def _affine(self, x: str, whole: Affine) -> str:
        """Adds a quantised product. Activations are rounded to 8 bits by block.

        Biases become zero points. What these leave of them, unless biases will be `exact`, are the weights of each
        group's sum of x, so the sums follow x as further columns, and their weights are quantised, too.
        """
        bits, group = whole.bits, whole.group
        q, scales = whole.q, whole.scales
        used = depth = scales.shape[1] * group
        points, rest = whole.zero_points()
        uneven = bool(rest.any())
        if uneven and not self.exact:
            levels, steps = _quantise(rest, bits, group)
            x, used = self._with_sums(x, depth, group), depth + depth // group
            q = np.concatenate([q, _pack_levels(levels, bits)], axis=1)
            scales = np.concatenate([scales, steps], axis=1)
            added = ((0, 0), (0, scales.shape[1] - points.shape[1]))
            points = np.pad(points, added, constant_values=2 ** (bits - 1))
        count, columns = len(q), scales.shape[1] * group
        inputs = [x, self.weight(q.reshape(count, columns // group, -1)), self.weight(scales)]
        if uneven and self.exact:
            self.biases[inputs[1]] = -(points * scales), whole.biases
        if (points != 2 ** (bits - 1)).any():
            inputs.append(self.weight(_pack_levels(points, bits)))
        settings = {"K": used, "N": count, "bits": bits, "block_size": group, "accuracy_level": 4}
        return self.op("MatMulNBits", *inputs, **settings)

    def _per_token(self, x: str, whole: Affine) -> str:
        """Adds a product of 8-bit integers: one scale for each token's activations, one for each output's weights.

        Before they are rounded, both are rotated by Hadamard matrices within blocks, which changes no product, and
        spreads the outliers that would make the scales large (QuaRot, arXiv 2404.00456).
        """
        weights = dequantise(whole.q, whole.scales, whole.biases, whole.bits)
        block = math.gcd(weights.shape[1], _MAX_BLOCK_SIZE)
        rotated = _rotate(weights, block) / np.float32(block)
        scales = np.abs(rotated).max(axis=1) / _MAX_LEVEL
        levels = np.rint(rotated / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8)
        step, middle = self.constant("step", 1 / _MAX_LEVEL), self.constant("middle", np.uint8(128))
        matrix = self.constant(f"hadamard_{block}", _rotate(np.eye(block, dtype=np.float32), block))
        turned = self.op("MatMul", self.op("Reshape", x, self.ints(-1, block)), matrix)
        turned = self.op("Reshape", turned, self.ints(-1, weights.shape[1]))
        largest = self.op("ReduceMax", self.op("Abs", turned), self.ints(-1), keepdims=1)
        rounded = self.op("QuantizeLinear", self.op("Div", turned, largest), step, middle)
        product = self.op("MatMulIntegerToFloat", rounded, self.weight(levels.T), step, self.weight(scales), middle)
        return self.op("Mul", product, largest)

    def _with_sums(self, x: str, depth: int, group: int) -> str:
        """Adds x [R, K] followed by the sums of its groups."""
        apart = self.op("Reshape", x, self.ints(-1, depth // group, group))
        return self.op("Concat", x, self.op("ReduceSum", apart, self.ints(2), keepdims=0), axis=-1)

    def norm(self, x: str, layer: nn.Module) -> str:
        weight, eps = _norm_parameters(layer)
        return self.op("SimplifiedLayerNormalization", x, self.weight(weight), axis=-1, epsilon=eps)

    def add_and_norm(self, x: str, y: str, layer: nn.Module, total: str) -> str:
        """Adds the norm of x + y; the sum gets the name `total`."""
        weight, eps = _norm_parameters(layer)
        outputs = [f"normed_{total}", "", "", total]
        return self.op("SkipSimplifiedLayerNormalization", x, y, self.weight(weight), outputs=outputs, epsilon=eps)

    def head_norm(self, x: str, layer: nn.Module, heads: int) -> str:
        """Adds the norm of each of the `heads` in x [T, heads x width]."""
        weight, eps = _norm_parameters(layer)
        return self.op("BranchwiseRMSNorm", x, self.weight(weight), num_branches=heads, epsilon=eps)


def build(decoder: DecoderLayers, layout: Layout, exact: bool = False, per_token: bool = False) -> Graph:
    """Builds the graph of modules from their weights, which are rounded in groups, or else `per_token`.

    `exact`: biases of groups are only rounded, since `exact_biases` follows.

    Raises:
        ModelError: one of its layers is not supported.
    """
    kv_type = helper.np_dtype_to_tensor_dtype(layout.kv_dtype)
    b = Builder(kv_type=kv_type, rounded=decoder.rounded, exact=exact, per_token=per_token)
    layers, added = decoder.layers, ""
    res, n = decoder.begin(b) if decoder.begin is not None else ("x", b.norm("x", layers[0].input_layernorm))
    for number, (layer, shape, rope) in enumerate(zip(layers, layout.shapes, layout.angles, strict=True)):
        mask = f"mask{layout.masks.index(shape.window)}"
        if number:
            n = b.add_and_norm(res, added, layer.input_layernorm, f"layer{number - 1}")
            res = f"layer{number - 1}"
        o = _attention(b, n, layer.self_attn, shape, number, (f"cos{rope}", f"sin{rope}"), mask)
        o = b.scale(o, decoder.residual_factor)
        has_four_norms = "pre_feedforward_layernorm" in layer  # norms before and after attention and MLP
        if has_four_norms:
            o = b.norm(o, layer.post_attention_layernorm)
        between = layer["pre_feedforward_layernorm" if has_four_norms else "post_attention_layernorm"]
        n, res = b.add_and_norm(res, o, between, f"middle{number}"), f"middle{number}"
        added = b.scale(_mlp(b, n, layer.mlp, number, gelu=has_four_norms), decoder.residual_factor)
        if has_four_norms:
            added = b.norm(added, layer.post_feedforward_layernorm)
    last = f"layer{len(layers) - 1}"
    b.op("Add", res, added, outputs=[last])
    rows = b.op("Gather", last, "logits_indices", axis=0)
    normed = b.norm(rows, decoder.norm)
    b.op("Identity", normed if decoder.gives_normed else rows, outputs=["hidden"])
    b.op("Identity", b.linear(b.scale(normed, decoder.output_factor), [decoder.output]), outputs=["logits"])
    return Graph(_proto(b, layout, decoder.begin is not None), b.weights, b.biases)


def _attention(
    b: Builder, x: str, attention: nn.Module, shape: LayerShape, number: int, angles: tuple[str, str], mask: str
) -> str:
    """Adds the attention of normed x [T, H], which writes keys and values in place."""
    heads, kv_heads, width = int(attention.n_heads), shape.kv_heads, shape.width
    projections = ("qkv_proj",) if "qkv_proj" in attention else ("q_proj", "k_proj", "v_proj")
    qkv = b.linear(x, [attention[name] for name in projections])
    if "q_norm" in attention:
        q, k, v = f"q_{number}", f"k_{number}", f"v_{number}"
        widths = b.ints(heads * width, kv_heads * width, kv_heads * width)
        b.op("Split", qkv, widths, outputs=[q, k, v], axis=-1)
        q = b.head_norm(q, attention.q_norm, heads)
        k = b.head_norm(k, attention.k_norm, kv_heads)
        qkv = b.op("Concat", q, k, v, axis=-1)
    apart = b.op("Reshape", b.op("Cast", qkv, to=b.kv_type), b.ints(-1, width))
    laid = b.op("Reshape", b.op("Gather", apart, "take", axis=0), "laid")
    inputs = [laid, "", "", f"k{number}", f"v{number}", "lengths", "total", *angles, "places", mask]
    outputs = [f"found_{number}", f"new_k{number}", f"new_v{number}"]
    settings = {"num_heads": kv_heads, "kv_num_heads": kv_heads, "do_rotary": 1, "scale": float(attention.scale)}
    found = b.op("GroupQueryAttention", *inputs, *[""] * 5, "counts", outputs=outputs, **settings)
    found = b.op("Gather", b.op("Reshape", found, b.ints(-1, width)), "back", axis=0)
    flat = b.op("Reshape", found, b.ints(-1, heads * width))
    return b.linear(b.op("Cast", flat, to=TensorProto.FLOAT), [attention.o_proj])


def _mlp(b: Builder, x: str, mlp: nn.Module, number: int, gelu: bool) -> str:
    """Adds the MLP of normed x [T, H], gated by SiLU, or by GELU."""
    up = b.linear(x, [mlp.gate_up_proj] if "gate_up_proj" in mlp else [mlp.gate_proj, mlp.up_proj])
    gate = b.op("Split", up, outputs=[f"gate_{number}", f"up_{number}"], axis=-1, num_outputs=2)
    activated = b.op("Gelu", gate, approximate="tanh") if gelu else b.op("QuickGelu", gate, alpha=1.0)
    return b.linear(b.op("Mul", activated, f"up_{number}"), [mlp.down_proj])


def _proto(b: Builder, layout: Layout, features: bool) -> bytes:
    def info(name: str, kind: int, *dims: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, dims)

    f32, i32, i64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
    inputs = [
        info("x", f32, "T", "H"),
        *([info("features", f32, "T", "W")] if features else []),
        info("take", i64, "heads_of_places"),
        info("laid", i64, 3),
        info("back", i64, "places_of_heads"),
        info("lengths", i32, "B"),
        info("total", i32),
        info("counts", i32, "B"),
        info("places", i64, "B", "S"),
        info("logits_indices", i64, "R"),
        *(info(f"{c}{r}", b.kv_type, "L", f"half{r}") for r in range(len(layout.ropes)) for c in ("cos", "sin")),
        *(info(f"mask{m}", b.kv_type, "B", 1, "S", "E") for m in range(len(layout.masks))),
    ]
    outputs = [info("logits", f32, "R", "V"), info("hidden", f32, "R", "H")]
    outputs += [info(f"layer{i}", f32, "T", "H") for i in range(len(layout.shapes))]
    for i, shape in enumerate(layout.shapes):
        for c in "kv":
            inputs.append(info(f"{c}{i}", b.kv_type, "B", shape.kv_heads, "C", shape.width))
            outputs.append(info(f"new_{c}{i}", b.kv_type, "B", shape.kv_heads, "C", shape.width))
    initial = list(b.constants.values())
    for name, array in b.weights.items():
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        initial.append(tensor)
    graph = helper.make_graph(b.nodes, "model", inputs, outputs, initial)
    opsets = [helper.make_opsetid("", _OPSET_VERSION), helper.make_opsetid(_MICROSOFT_DOMAIN, 1)]
    proto: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString()
    return proto


def _linear_form(layer: nn.Module) -> tuple[object, ...]:
    """Returns what layers must have in common to be one product."""
    return type(layer), getattr(layer, "bits", None), getattr(layer, "group_size", None), "bias" in layer


def _norm_parameters(layer: nn.Module) -> tuple[Array, float]:
    """Returns an RMS norm's factors, however the module stores them, and its epsilon."""
    weight, eps = to_numpy(layer.weight), float(layer.eps)
    ones = to_numpy(layer(mx.ones((1, weight.size))))[0] * np.sqrt(np.float32(1 + eps))
    for factors in (weight, 1 + weight):
        if np.allclose(ones, factors, rtol=1e-2, atol=1e-3):
            return factors, eps
    raise ModelError(f"{type(layer).__name__} is not a supported RMS norm")


def _rotate(rows: Array, block: int) -> Array:
    """Returns rows [N, K] times a Hadamard matrix, of entries 1 and -1, within blocks of K; `block`: a power of 2."""
    turned = np.empty_like(rows)
    step = max(_ROTATED_AT_ONCE // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        part, width = rows[first : first + step].reshape(-1, block), 1
        while width < block:
            even, odd = part[:, ::2], part[:, 1::2]
            part, width = np.concatenate([even + odd, even - odd], axis=1), 2 * width
        turned[first : first + step] = part.reshape(-1, rows.shape[1])
    return turned


def _pack_levels(points: Array, bits: int) -> Array:
    if bits == 8:
        return points
    even = np.pad(points, ((0, 0), (0, points.shape[1] % 2)))
    packed: Array = even[:, 0::2] | even[:, 1::2] << 4
    return packed


def _quantise(numbers: Array, bits: int, group: int) -> tuple[Array, Array]:
    """Quantises `numbers` [N, G]: levels [N, columns] and scales [N, columns / group], G padded to whole groups."""
    middle = 2 ** (bits - 1)
    blocks = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % group))).reshape(len(numbers), -1, group)
    scales = np.abs(blocks).max(axis=-1) / np.float32(middle - 0.5)
    by = scales[..., None]
    levels = np.clip(np.rint(blocks / np.where(by == 0, 1, by)), -middle, middle - 1) + middle
    return levels.astype(np.uint8).reshape(len(numbers), -1), scales
