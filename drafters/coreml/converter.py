"""Converts an mlx-lm checkpoint into a package directory. Needs coremltools, on any system."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider import __version__
from outrider.drafters.coreml import package
from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, DecoderArchitecture, PackageFunction, PackageLayout
from outrider.drafters.coreml.package import Manifest, import_coremltools
from outrider.drafters.coreml.weights import HEAD, NORM, Checkpoint, DenseMatrix, Weights
from outrider.protocol.digest import file_hash, model_digest
from outrider.protocol.errors import InvalidRequest, ModelError

_MIN_ROW_SCALE = 2.0**-10  # rows with a smaller maximum are scaled by this instead, so that eps / max**2 fits float16

Progress = Callable[[str, int, int], None]
"""Called with the stage, and its steps done and in total; each stage begins with 0 steps done."""


class _GraphBuilder:
    """Builds a coremltools Function of the decoder in `layout`, one for each number of rows, all with its `weights`.

    Every shape is static, no rank is above 4, projections are 1x1 convolutions over (1, channels, 1, rows), and
    key/value heads are never repeated. The inputs are embedded tokens, rotations in place of positions, and an additive
    mask over [slots of the cache | the rows themselves] in place of the tree.

    `_past` and `_new` hold the keys "k" and values "v" of each layer, (1, kv_heads, slots or rows, head_dim): the cache
    before the call, and the call's rows. The outputs are the new rows of all layers, `k_new` and `v_new` (layers,
    kv_heads, rows, head_dim), and the logits (1, chunk, 1, rows) of each chunk of the vocabulary.
    """

    def __init__(self, layout: PackageLayout, weights: Weights, function: PackageFunction) -> None:
        self._mil = import_coremltools(".converters.mil.mil")
        self._mb = self._mil.Builder
        self._layout = layout
        self._sizes: DecoderArchitecture = layout.architecture
        self._weights = weights
        self._function = function
        self._rows = function.rows
        self._float = np.float32 if layout.weights == "fp32" else np.float16

    def build(self) -> Any:
        target = import_coremltools().target.iOS18
        number = self._mil.types.fp32 if self._float is np.float32 else self._mil.types.fp16
        inputs = {
            name: self._mb.placeholder(shape=shape, dtype=number, name=name)
            for name, shape in self._layout.inputs(self._function).items()
        }
        with self._mil.Function(inputs, opset_version=target) as function:
            self._inputs = function.inputs
            self._past = {kind: self._split(self._inputs[f"{kind}_past"]) for kind in "kv"}
            self._new: dict[str, list[Any]] = {"k": [], "v": []}
            x, last = self._inputs["x"], self._sizes.layers - 1
            for layer in range(self._sizes.layers):
                name = f"model.layers.{layer}"
                normed = self._norm(f"{name}.input_layernorm", x, 1)
                self._append_kv(f"{name}.self_attn", normed)
                if self._function.logits or layer < last or layer == 0:  # a prefill only fills the cache
                    x = self._build_layer(name, x, normed, layer)
            outputs = [self._concat(self._new[kind], 0, f"{kind}_new") for kind in "kv"]
            if self._function.logits:
                outputs += self._project_logits(x)
            function.set_outputs(outputs)
        return function

    def _build_layer(self, name: str, x: Any, normed: Any, layer: int) -> Any:
        mb = self._mb
        x = mb.add(x=x, y=self._attend(f"{name}.self_attn", normed, layer))
        normed = self._norm(f"{name}.post_attention_layernorm", x, 1)
        gate = mb.silu(x=self._project(f"{name}.mlp.gate_proj", normed))
        inner = mb.mul(x=gate, y=self._project(f"{name}.mlp.up_proj", normed))
        return mb.add(x=x, y=self._project(f"{name}.mlp.down_proj", inner))

    def _append_kv(self, name: str, x: Any) -> None:
        """Adds the keys and values of these rows to `_new`."""
        shape = (1, self._sizes.kv_heads, self._rows, self._sizes.head_dim)
        keys = self._rotate(self._project_heads(f"{name}.k_proj", f"{name}.k_norm", x, 1))
        values = self._project_heads(f"{name}.v_proj", None, x, 1)
        for kind, rows in (("k", keys), ("v", values)):
            self._new[kind].append(self._mb.reshape(x=rows, shape=shape))

    def _attend(self, name: str, x: Any, layer: int) -> Any:
        """Returns the attention over the old cache and over the rows themselves, each read once."""
        mb, sizes, count = self._mb, self._sizes, self._rows
        folded = (1, sizes.kv_heads, sizes.groups * count, sizes.head_dim)
        queries = self._project_heads(f"{name}.q_proj", f"{name}.q_norm", x, sizes.groups)
        queries = mb.mul(x=self._rotate(queries), y=self._float(sizes.head_dim**-0.5))
        queries = mb.reshape(x=queries, shape=folded)
        slots = self._layout.slots
        old = mb.matmul(x=queries, y=self._past["k"][layer], transpose_y=True)
        new = mb.matmul(x=queries, y=self._new["k"][layer], transpose_y=True)
        scores = mb.reshape(x=self._concat([old, new], -1), shape=(sizes.kv_heads, sizes.groups, count, slots + count))
        weights = mb.softmax(x=mb.add(x=scores, y=self._inputs["mask"]), axis=-1)
        weights = mb.reshape(x=weights, shape=(1, sizes.kv_heads, sizes.groups * count, slots + count))
        on_old, on_new = mb.split(x=weights, split_sizes=[slots, count], axis=-1)
        mixed = mb.matmul(x=on_old, y=self._past["v"][layer])
        mixed = mb.add(x=mixed, y=mb.matmul(x=on_new, y=self._new["v"][layer]))

        mixed = mb.reshape(x=mixed, shape=(sizes.kv_heads, sizes.groups, count, sizes.head_dim))
        mixed = mb.transpose(x=mixed, perm=[0, 1, 3, 2])
        mixed = mb.reshape(x=mixed, shape=(1, sizes.heads * sizes.head_dim, 1, count))
        return self._project(f"{name}.o_proj", mixed)

    def _project_heads(self, projection: str, norm: str | None, x: Any, groups: int) -> Any:
        """(1, hidden, 1, rows) -> (kv_heads, groups, rows, head_dim), by Qwen3's `norm` if there is one."""
        mb, sizes = self._mb, self._sizes
        shape = (sizes.kv_heads, groups, sizes.head_dim, self._rows)
        heads = mb.transpose(x=mb.reshape(x=self._project(projection, x), shape=shape), perm=[0, 1, 3, 2])
        return self._norm(norm, heads, 3) if norm and sizes.family == "qwen3" else heads

    def _rotate(self, heads: Any) -> Any:
        """Applies the rope by halves; the host passes sin with its first half negated."""
        mb = self._mb
        low, high = mb.split(x=heads, num_splits=2, axis=-1)
        swapped = self._concat([high, low], -1)
        return mb.add(x=mb.mul(x=heads, y=self._inputs["cos"]), y=mb.mul(x=swapped, y=self._inputs["sin"]))

    def _norm(self, name: str, x: Any, axis: int) -> Any:
        """Returns the RMSNorm of x / max|x|, which float16 can hold at every scale; the maximum cancels out."""
        mb = self._mb
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
        largest = mb.maximum(x=largest, y=self._float(_MIN_ROW_SCALE))
        scaled = mb.real_div(x=x, y=largest)
        mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[axis], keep_dims=True)
        root = mb.real_div(x=self._float(self._sizes.norm_eps**0.5), y=largest)
        inverse = mb.rsqrt(x=mb.add(x=mean, y=mb.mul(x=root, y=root)), epsilon=self._float(0))
        gain = self._weights.vectors[f"{name}.weight"]
        along = [-1 if place == axis else 1 for place in range(4)]
        return mb.mul(x=mb.mul(x=scaled, y=inverse), y=self._const(f"{name}.weight", gain.reshape(along)))

    def _project(self, name: str, x: Any) -> Any:
        bias = self._weights.vectors.get(f"{name}.bias")
        added = None if bias is None else self._const(f"{name}.bias", bias)
        return self._mb.conv(x=x, weight=self._matrix_weight(name), bias=added)

    def _project_logits(self, x: Any) -> list[Any]:
        """Returns logits (1, chunk, 1, rows) for each chunk of the vocabulary."""
        normed, first, outputs = self._norm(NORM, x, 1), 0, []
        for index, count in enumerate(self._sizes.head_chunks):
            weight = self._matrix_weight(HEAD, first, first + count)
            outputs.append(self._mb.conv(x=normed, weight=weight, name=f"logits_{index}"))
            first += count
        return outputs

    def _matrix_weight(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Returns rows [first, last) of the matrix `name` as a convolution weight (rows, columns, 1, 1)."""
        form, rows = self._weights.matrices[name], slice(first, last)
        key = name if last is None else f"{name}[{first}:{last}]"
        if isinstance(form, DenseMatrix):
            return self._const(key, _as_conv_kernel(form.values[rows]))
        return self._mb.constexpr_blockwise_shift_scale(
            data=self._const(f"{key}.data", _as_conv_kernel(form.data[rows])),
            scale=self._const(f"{key}.scale", _as_conv_kernel(form.scale[rows])),
        )

    def _const(self, key: str, value: NDArray[Any]) -> Any:
        const = self._mb.const(val=value)
        const.op.weight_id = key
        return const

    def _split(self, x: Any) -> list[Any]:
        if self._sizes.layers == 1:
            return [x]
        return list(self._mb.split(x=x, num_splits=self._sizes.layers, axis=0))

    def _concat(self, values: list[Any], axis: int, name: str | None = None) -> Any:
        return self._mb.concat(values=values, axis=axis, **({} if name is None else {"name": name}))


def _as_conv_kernel(matrix: NDArray[Any]) -> NDArray[Any]:
    return matrix.reshape(*matrix.shape, 1, 1)


def convert(
    model: Path, destination: Path, weights: str, context: int | None, progress: Progress = lambda *_: None
) -> Manifest:
    """Writes the package of the checkpoint `model` to `destination`, which must not exist, completely or not at all:
    all files are written to a directory next to it, which is renamed last.

    Raises:
        InvalidRequest: `destination` exists already, or as `write_package`.
        ModelError: the model is refused, or the disk can't hold the package; no files are left behind.
    """
    if os.path.exists(destination):
        raise InvalidRequest(f"{destination} already exists; remove it, or choose another folder")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.partial-") as folder:
            partial_package = Path(folder, destination.name)
            partial_package.mkdir()
            manifest = write_package(model, partial_package, weights, context, progress)
            partial_package.rename(destination)
    except OSError as error:
        raise ModelError(
            f"{destination} can't be written ({error.strerror or error}); free some space, or choose another folder"
        ) from error
    return manifest


def write_package(model: Path, directory: Path, weights: str, context: int | None, progress: Progress) -> Manifest:
    """Writes the package of the checkpoint `model` into `directory`, which is empty.

    Args:
        weights: one of `WEIGHT_FORMATS`.
        context: in tokens; None: DEFAULT_CONTEXT, or the model's own if that is shorter.

    Raises:
        InvalidRequest: the context is too short, or longer than the model's or than that of any package.
        ModelError: the model is refused.
        OSError: the disk can't hold the package, or is not writable.
    """
    progress("reading", 0, 1)
    checkpoint = Checkpoint(model, weights)
    sizes = checkpoint.architecture
    least, most = PackageLayout.prefill.rows, sizes.max_positions
    context = min(DEFAULT_CONTEXT, most) if context is None else context
    if not least <= context <= most:
        raise InvalidRequest(f"context is {context}; expected {least} to {most} tokens for this model")
    layout = PackageLayout(sizes, weights, context)
    rope = checkpoint.rope(layout.context)
    found = checkpoint.read(partial(progress, "reading weights"))
    np.save(directory / package.EMBEDDING_FILE, found.embedding)
    np.save(directory / package.ROPE_FILE, rope)
    np.save(directory / package.EXPECTED_FILE, checkpoint.expected_logits(found))
    _write_mlpackage(layout, found, directory, partial(progress, "building"))
    progress("checking", 0, 1)
    manifest = Manifest(
        layout=layout,
        source=checkpoint.path.resolve().name,
        source_hash=model_digest(checkpoint.path),
        parameters=checkpoint.parameters,
        files={path: file_hash(directory / path) for path in package.HASHED_FILES},
        versions={"outrider": __version__, **{name: version(name) for name in ("coremltools", "mlx", "mlx-lm")}},
    )
    manifest.write(directory)
    progress("checking", 1, 1)
    return manifest


def _write_mlpackage(
    layout: PackageLayout, weights: Weights, directory: Path, progress: Callable[[int, int], None]
) -> None:
    """Saves every function of `layout`; `progress` counts them, and the export as the last step.

    The .mlpackage is built in its final types, so no graph pass runs: this takes seconds, whereas a conversion for each
    function takes minutes. All functions share one copy of the weights on disk, by name (`weight_id`), so nothing has
    to be compared or hashed to find duplicates.

    Raises:
        OSError: the disk is full or not writable.
    """
    program, steps = import_coremltools(".converters.mil.mil").Program(), len(layout.functions) + 1
    for built, function in enumerate(layout.functions):
        progress(built, steps)
        program.add_function(function.name, _GraphBuilder(layout, weights, function).build())
    program.default_function_name = layout.functions[0].name
    program.export_as_multifunction = True
    progress(steps - 1, steps)
    tools, export = import_coremltools(), import_coremltools(".converters.mil.backend.mil.load").load
    with tempfile.TemporaryDirectory(dir=directory) as weights_dir:
        try:
            spec = export(program, weights_dir, specification_version=tools.target.iOS18.value)
            tools.utils.save_spec(spec, str(directory / package.MLPACKAGE), weights_dir=weights_dir)
        except RuntimeError as error:  # coremltools' writers raise it if the disk is full
            raise OSError(errno.EIO, str(error)) from error
    progress(steps, steps)
