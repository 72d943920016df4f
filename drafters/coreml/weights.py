"""A checkpoint: its architecture, its rotations, and its weights as numpy arrays in a package's form.

Knows mlx-lm's module names; knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import dequantize_model, get_total_parameters
from numpy.typing import NDArray

from outrider.drafters.coreml import layout
from outrider.drafters.coreml.layout import TRIAL_PROMPT_TOKENS
from outrider.engine.loading import read_config, read_model
from outrider.engine.ort.layers import check_rope, rope_angles
from outrider.protocol.errors import ModelError

_MIN_SCALE = 2.0**-24  # float16's smallest number
_BLOCK_ELEMENTS = 1 << 21

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
NORM = "model.norm"


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """float16 or float32 [rows, columns]."""

    values: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """`scale` * `data`, rounded to float16: int8 [rows, columns], with a float16 scale for each row, [rows, 1]."""

    data: NDArray[np.int8]
    scale: NDArray[np.float16]

    @property
    def values(self) -> NDArray[np.float16]:
        values = np.empty(self.data.shape, np.float16)
        for rows in _row_blocks(self.data):
            values[rows] = self.data[rows] * self.scale[rows].astype(np.float32)
        return values


WeightMatrix = DenseMatrix | QuantizedMatrix


def quantize_int8(dense: NDArray[np.floating]) -> QuantizedMatrix:
    """Quantises `dense` [rows, columns] with one scale for each row."""
    data, scale = np.empty(dense.shape, np.int8), np.empty((dense.shape[0], 1), np.float16)
    for rows in _row_blocks(dense):
        wide = dense[rows].astype(np.float32)
        scale[rows] = np.maximum(np.abs(wide).max(axis=1, keepdims=True) / 127, _MIN_SCALE)
        data[rows] = np.clip(np.rint(wide / scale[rows].astype(np.float32)), -127, 127)
    return QuantizedMatrix(data, scale)


def _row_blocks(matrix: NDArray[Any]) -> list[slice]:
    """Returns slices of rows with a few million numbers each, so that temporary float32 arrays stay small."""
    rows = max(1, _BLOCK_ELEMENTS // matrix.shape[1])
    return [slice(first, first + rows) for first in range(0, matrix.shape[0], rows)]


@dataclass(slots=True)
class Weights:
    """`matrices` by module name ("model.layers.0.mlp.up_proj", "lm_head"), `vectors` for norms and biases.

    `embedding` is [vocab, hidden] in float16 (float32 for kind fp32), with the head's numbers if the model is tied.
    """

    embedding: NDArray[np.floating]
    matrices: dict[str, WeightMatrix] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.floating]] = field(default_factory=dict)

    def dense(self, prefix: str) -> list[tuple[str, mx.array]]:
        """Returns the weights below the module `prefix` in float32, by their names there."""
        named: dict[str, NDArray[np.floating]] = {
            f"{name}.weight": form.values for name, form in self.matrices.items() if name.startswith(prefix)
        }
        named |= {name: vector for name, vector in self.vectors.items() if name.startswith(prefix)}
        return [(name.removeprefix(prefix), mx.array(value.astype(np.float32))) for name, value in named.items()]


class Checkpoint:
    """An mlx-lm model in the directory `path`, whose weights are not read yet; `kind` is one of WEIGHT_FORMATS.

    `parameters`: the number of its weights.

    Raises:
        ModelError: there is no model, its architecture is refused, or its weights contradict config.json.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.architecture = path, layout.read_architecture(read_config(path))
        self._model, config = read_model(path)
        self.parameters = int(get_total_parameters(self._model))
        if "quantization" in config:
            self._model.set_dtype(mx.float32)  # float16 would round the weights
            self._model = dequantize_model(self._model)  # lazy
        self._kind = kind

    def rope(self, positions: int) -> NDArray[np.float32]:
        """Returns cos and sin of positions 0 .. `positions` - 1, [2, positions, head_dim / 2], see `Package.rope`.

        The model's own rope module is applied to unit vectors, so every scaling that mlx-lm supports is correct.

        Raises:
            ModelError: the model's rope is not a rotation of the two halves of a head (a traditional or partial rope).
        """
        rope, width = self._model.model.layers[0].self_attn.rope, self.architecture.head_dim
        try:
            check_rope(rope, width)
        except ModelError as error:
            raise ModelError(
                "this model's rope does not rotate the two halves of a head (a traditional or partial rope); "
                "the coreml graph does (use --draft-backend mlx for this one)"
            ) from error
        return rope_angles(rope, width, positions)

    def read(self, progress: Callable[[int, int], None]) -> Weights:
        """Reads and releases all weights, one matrix at a time, so that a conversion needs little more memory than they
        do. `progress(done, total)` counts modules.

        Raises:
            ModelError: a weight does not fit float16.
        """
        weights = Weights(np.empty((0, 0)))
        modules = [(name, module) for name, module in self._model.named_modules() if "weight" in module]
        for done, (name, module) in enumerate(modules):
            progress(done, len(modules))
            if module["weight"].ndim == 1:
                weights.vectors[f"{name}.weight"] = self._cast_weight(f"{name}.weight", module["weight"])
            elif name != EMBEDDING:
                weights.matrices[name] = self._read_matrix(name, module)
            else:
                form = self._read_matrix(name, module)
                weights.embedding = form.values
                if self.architecture.tied:
                    weights.matrices[HEAD] = form
            if "bias" in module:
                weights.vectors[f"{name}.bias"] = self._cast_weight(f"{name}.bias", module["bias"])
            module.clear()
        progress(len(modules), len(modules))
        return weights

    def expected_logits(self, weights: Weights) -> NDArray[np.float32]:
        """Returns `Package.expected`: MLX's logits in float32 from `weights`, with one layer in memory at a time."""
        model = type(self._model)(self._model.args)  # dense, even if the checkpoint is quantised
        tokens, layers = layout.trial_text(self.architecture.vocab_size), model.model.layers
        with mx.stream(mx.cpu):  # some GPUs round float32 products
            x = mx.array(weights.embedding[tokens].astype(np.float32))[None]
            for number in range(self.architecture.layers):
                layer = layers.pop(0)
                layer.load_weights(weights.dense(f"model.layers.{number}."))
                x = layer(x, "causal")
                mx.eval(x)
            model.model.norm.load_weights(weights.dense(f"{NORM}."))
            last = np.array(model.model.norm(x))[0, TRIAL_PROMPT_TOKENS:]
        head = weights.embedding if self.architecture.tied else weights.matrices[HEAD].values
        return np.concatenate([last @ head[rows].astype(np.float32).T for rows in _row_blocks(head)], axis=1)

    def _read_matrix(self, name: str, module: nn.Module) -> WeightMatrix:
        """Returns the module's weight [rows, columns]. An untied embedding stays dense."""
        dense = self._cast_weight(name, module.weight)
        if name == EMBEDDING and not self.architecture.tied:
            return DenseMatrix(dense)
        return quantize_int8(dense) if self._kind == "int8" else DenseMatrix(dense)

    def _cast_weight(self, name: str, array: mx.array) -> NDArray[np.floating]:
        """Returns `array` as float32 for fp32, else as float16."""
        if self._kind == "fp32":
            return np.array(array.astype(mx.float32))
        narrow = np.array(array.astype(mx.float16))
        if not np.isfinite(narrow).all():
            raise ModelError(
                f"{name} has values up to {float(mx.abs(array).max()):.3g}, beyond float16's 65504 (or NaN); the Neural"
                " Engine computes in float16 (use --draft-backend mlx for this model)"
            )
        return narrow
