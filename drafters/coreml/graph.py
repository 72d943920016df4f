"""The decoder as a Core ML graph: one function for each number of rows, all with the same weights.

Every shape is static, no rank is above 4, projections are 1x1 convolutions over (1, channels, 1, rows), and key/value
heads are never repeated. The inputs are embedded tokens, rotations in place of positions, and an additive mask over
[slots of the cache | the rows themselves] in place of the tree. Needs only coremltools' builder.

`Constants` are the weights of a graph under construction. All functions of a package share one copy on disk, by name
(`weight_id`), so nothing has to be compared or hashed to find duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.layout import DecoderArchitecture, Mode, PackageFunction, PackageLayout
from outrider.drafters.coreml.package import coremltools
from outrider.drafters.coreml.weights import HEAD, NORM, DenseMatrix, Int4, Int8, Weights


class Constants:
    """Adds `weights` to the function that is being built."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._mil = coremltools(".converters.mil.mil")
        self._mb = self._mil.Builder

    def matrix(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Returns rows [first, last) of the matrix `name` as a convolution weight (rows, columns, 1, 1)."""
        form = self._weights.matrices[name]
        rows = slice(first, last)
        key = name if last is None else f"{name}[{first}:{last}]"
        match form:
            case DenseMatrix(values):
                return self._const(key, _kernel(values[rows]))
            case Int8(data, scale):
                return self._mb.constexpr_blockwise_shift_scale(
                    data=self._const(f"{key}.data", _kernel(data[rows])),
                    scale=self._const(f"{key}.scale", _kernel(scale[rows])),
                )
            case Int4(data, scale, zero):
                return self._mb.constexpr_blockwise_shift_scale(
                    data=self._const(f"{key}.data", self._uint4(data[rows])),
                    scale=self._const(f"{key}.scale", _kernel(scale[rows])),
                    offset=self._const(f"{key}.zero", self._uint4(zero[rows])),
                )

    def bias(self, name: str) -> Any | None:
        vector = self._weights.vectors.get(f"{name}.bias")
        return None if vector is None else self._const(f"{name}.bias", vector)

    def vector(self, name: str, rank: int, axis: int) -> Any:
        """Returns the vector `name` along `axis` of a tensor of this rank, with size 1 along the others."""
        vector = self._weights.vectors[name]
        shape = [1] * rank
        shape[axis] = vector.size
        return self._const(name, vector.reshape(shape))

    def _const(self, key: str, value: NDArray[Any]) -> Any:
        const = self._mb.const(val=value)
        const.op.weight_id = key
        return const

    def _uint4(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return _kernel(data.view(self._mil.types.np_uint4_dtype))  # a label, no copy


def _kernel(matrix: NDArray[Any]) -> NDArray[Any]:
    return matrix.reshape(*matrix.shape, 1, 1)


_FLOOR = 2.0**-10  # below this a row is scaled by this instead, so that eps / max**2 stays in float16


@dataclass(frozen=True, slots=True)
class _Rows:
    """The inputs of every layer: rotations (1, 1, rows, head_dim) and the mask (1, 1, rows, slots + rows)."""

    cos: Any
    sin: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class _Memory:
    """A layer's cache (1, kv_heads, slots, head_dim)."""

    keys: Any
    values: Any


def build(layout: PackageLayout, constants: Constants, function: PackageFunction) -> Any:
    """Returns one coremltools Function of the decoder in `layout`, with its weights from `constants`."""
    return _GraphBuilder(layout, constants, function).build()


class _GraphBuilder:
    def __init__(self, layout: PackageLayout, constants: Constants, function: PackageFunction) -> None:
        self._mil = coremltools(".converters.mil.mil")
        self._mb = self._mil.Builder
        self._layout = layout
        self._sizes: DecoderArchitecture = layout.architecture
        self._constants = constants
        self._function = function
        self._rows = function.rows
        self._float = np.float32 if layout.weights == "fp32" else np.float16

    def build(self) -> Any:
        target = coremltools().target.iOS18
        with self._mil.Function(self._placeholders(), opset_version=target) as function:
            inputs = function.inputs
            rows = _Rows(inputs["cos"], inputs["sin"], inputs["mask"])
            memories = self._memories(inputs)
            x, keys, values = inputs["x"], [], []
            for layer, memory in enumerate(memories):
                name, last = f"model.layers.{layer}", layer == len(memories) - 1
                normed = self._norm(f"{name}.input_layernorm", x, 1)
                fresh = self._fresh(f"{name}.self_attn", normed, rows)
                keys.append(fresh.keys)
                values.append(fresh.values)
                if self._function.logits or not last or layer == 0:  # a prefill only fills the cache
                    x = self._layer(name, x, normed, rows, memory, fresh)
            self._store(inputs, memories, keys, values)
            wanted = {tensor.name for tensor in self._layout.outputs(self._function)}
            outputs = []
            if "k_new" in wanted:
                outputs += [self._concat(keys, 0, "k_new"), self._concat(values, 0, "v_new")]
            if self._function.logits:
                outputs += self._logits(x)
            function.set_outputs(outputs)
        return function

    # --- inputs and cache ---------------------------------------------------------------------------------------

    def _placeholders(self) -> dict[str, Any]:
        specs = {}
        number = self._mil.types.fp32 if self._float is np.float32 else self._mil.types.fp16
        for tensor in self._layout.inputs(self._function):
            dtype = self._mil.types.int32 if tensor.integer else number
            specs[tensor.name] = self._mb.placeholder(shape=tensor.shape, dtype=dtype, name=tensor.name)
        for tensor in self._layout.states():
            specs[tensor.name] = self._mb.StateTensorSpec(tensor.shape, self._mil.types.fp16)
        return specs

    def _memories(self, inputs: dict[str, Any]) -> list[_Memory]:
        """Returns each layer's cache as it was before this call."""
        layers = range(self._sizes.layers)
        match self._layout.mode:
            case Mode.STATELESS:
                keys, values = self._split(inputs["k_past"]), self._split(inputs["v_past"])
            case Mode.ONEHOT:
                self._read = {name: self._mb.read_state(input=inputs[name]) for name in ("k_state", "v_state")}
                keys, values = (self._split(whole) for whole in self._read.values())
            case Mode.HYBRID:
                keys = [self._mb.read_state(input=inputs[f"k_state_{i}"]) for i in layers]
                values = [self._mb.read_state(input=inputs[f"v_state_{i}"]) for i in layers]
        return [_Memory(k, v) for k, v in zip(keys, values, strict=True)]

    def _store(self, inputs: dict[str, Any], old: Sequence[_Memory], keys: list[Any], values: list[Any]) -> None:
        """Writes the new rows into the states, if there are any."""
        mb = self._mb
        if self._layout.mode is Mode.ONEHOT:
            write = inputs["write"]
            keep = mb.sub(x=np.float16(1), y=mb.reduce_sum(x=write, axes=[-1], keep_dims=True))
            for kind, fresh in (("k", keys), ("v", values)):
                kept = mb.mul(x=self._read[f"{kind}_state"], y=keep)
                moved = mb.matmul(x=write, y=self._concat(fresh, 0))
                mb.coreml_update_state(state=inputs[f"{kind}_state"], value=mb.add(x=kept, y=moved))
        if self._layout.mode is Mode.HYBRID:
            begin, end = self._window(inputs["pos"])
            for layer, memory in enumerate(old):
                for kind, before, fresh in (("k", memory.keys, keys[layer]), ("v", memory.values, values[layer])):
                    update = mb.slice_update(
                        x=before, update=fresh, begin=begin, end=end, end_mask=[True, True, False, True]
                    )
                    mb.coreml_update_state(state=inputs[f"{kind}_state_{layer}"], value=update)

    def _window(self, position: Any) -> tuple[Any, Any]:
        """Returns begin and end of the slots [position, position + rows) of a (1, kv_heads, slots, head_dim) state."""
        mb, zero = self._mb, np.zeros(1, np.int32)
        past = mb.add(x=position, y=np.int32(self._rows))
        begin = mb.concat(values=[zero, zero, position, zero], axis=0)
        return begin, mb.concat(values=[zero, zero, past, zero], axis=0)

    # --- the decoder --------------------------------------------------------------------------------------------

    def _layer(self, name: str, x: Any, normed: Any, rows: _Rows, memory: _Memory, fresh: _Memory) -> Any:
        mb = self._mb
        x = mb.add(x=x, y=self._attention(f"{name}.self_attn", normed, rows, memory, fresh))
        normed = self._norm(f"{name}.post_attention_layernorm", x, 1)
        gate = mb.silu(x=self._project(f"{name}.mlp.gate_proj", normed))
        inner = mb.mul(x=gate, y=self._project(f"{name}.mlp.up_proj", normed))
        return mb.add(x=x, y=self._project(f"{name}.mlp.down_proj", inner))

    def _fresh(self, name: str, x: Any, rows: _Rows) -> _Memory:
        """Returns the keys and values of these rows, (1, kv_heads, rows, head_dim)."""
        shape = (1, self._sizes.kv_heads, self._rows, self._sizes.head_dim)
        keys = self._rotate(self._heads(f"{name}.k_proj", f"{name}.k_norm", x, 1), rows)
        values = self._heads(f"{name}.v_proj", None, x, 1)
        return _Memory(self._mb.reshape(x=keys, shape=shape), self._mb.reshape(x=values, shape=shape))

    def _attention(self, name: str, x: Any, rows: _Rows, memory: _Memory, fresh: _Memory) -> Any:
        """Returns the attention over the old cache and over the rows themselves, each read once."""
        mb, sizes, count = self._mb, self._sizes, self._rows
        folded = (1, sizes.kv_heads, sizes.groups * count, sizes.head_dim)
        queries = self._heads(f"{name}.q_proj", f"{name}.q_norm", x, sizes.groups)
        queries = mb.mul(x=self._rotate(queries, rows), y=self._float(sizes.head_dim**-0.5))
        queries = mb.reshape(x=queries, shape=folded)
        slots = self._layout.slots
        old = mb.matmul(x=queries, y=memory.keys, transpose_y=True)
        new = mb.matmul(x=queries, y=fresh.keys, transpose_y=True)
        scores = mb.reshape(x=self._concat([old, new], -1), shape=(sizes.kv_heads, sizes.groups, count, slots + count))
        weights = mb.softmax(x=mb.add(x=scores, y=rows.mask), axis=-1)
        weights = mb.reshape(x=weights, shape=(1, sizes.kv_heads, sizes.groups * count, slots + count))
        on_old, on_new = mb.split(x=weights, split_sizes=[slots, count], axis=-1)
        mixed = mb.add(x=mb.matmul(x=on_old, y=memory.values), y=mb.matmul(x=on_new, y=fresh.values))

        mixed = mb.reshape(x=mixed, shape=(sizes.kv_heads, sizes.groups, count, sizes.head_dim))
        mixed = mb.transpose(x=mixed, perm=[0, 1, 3, 2])
        mixed = mb.reshape(x=mixed, shape=(1, sizes.heads * sizes.head_dim, 1, count))
        return self._project(f"{name}.o_proj", mixed)

    def _heads(self, projection: str, norm: str | None, x: Any, groups: int) -> Any:
        """(1, hidden, 1, rows) -> (kv_heads, groups, rows, head_dim), normed if the family norms heads."""
        mb, sizes = self._mb, self._sizes
        heads = mb.reshape(
            x=self._project(projection, x), shape=(sizes.kv_heads, groups, sizes.head_dim, self._rows)
        )  # fmt: skip
        heads = mb.transpose(x=heads, perm=[0, 1, 3, 2])
        return self._norm(norm, heads, 3) if norm and sizes.normed_heads else heads

    def _rotate(self, heads: Any, rows: _Rows) -> Any:
        """Applies the rope by halves; the host passes sin with its first half negated."""
        mb = self._mb
        low, high = mb.split(x=heads, num_splits=2, axis=-1)
        swapped = self._concat([high, low], -1)
        return mb.add(x=mb.mul(x=heads, y=rows.cos), y=mb.mul(x=swapped, y=rows.sin))

    def _norm(self, name: str, x: Any, axis: int) -> Any:
        """Returns the RMSNorm of x / max|x|, which float16 can hold at every scale; the maximum cancels out."""
        mb = self._mb
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
        largest = mb.maximum(x=largest, y=self._float(_FLOOR))
        scaled = mb.real_div(x=x, y=largest)
        mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[axis], keep_dims=True)
        root = mb.real_div(x=self._float(self._sizes.norm_eps**0.5), y=largest)
        inverse = mb.rsqrt(x=mb.add(x=mean, y=mb.mul(x=root, y=root)), epsilon=self._float(0))
        gain = self._constants.vector(f"{name}.weight", rank=4, axis=axis)
        return mb.mul(x=mb.mul(x=scaled, y=inverse), y=gain)

    def _project(self, name: str, x: Any) -> Any:
        bias = self._constants.bias(name)
        return self._mb.conv(x=x, weight=self._constants.matrix(name), **({} if bias is None else {"bias": bias}))

    def _logits(self, x: Any) -> list[Any]:
        """Returns logits (1, chunk, 1, rows) for each chunk of the vocabulary."""
        normed, first, outputs = self._norm(NORM, x, 1), 0, []
        for index, count in enumerate(self._sizes.head_chunks):
            weight = self._constants.matrix(HEAD, first, first + count)
            outputs.append(self._mb.conv(x=normed, weight=weight, name=f"logits_{index}"))
            first += count
        return outputs

    def _split(self, x: Any) -> list[Any]:
        if self._sizes.layers == 1:
            return [x]
        return list(self._mb.split(x=x, num_splits=self._sizes.layers, axis=0))

    def _concat(self, values: list[Any], axis: int, name: str | None = None) -> Any:
        return self._mb.concat(values=values, axis=axis, **({} if name is None else {"name": name}))
