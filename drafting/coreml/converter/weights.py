"""A model's weights as numpy arrays in the form the package will hold, read one matrix at a time.

Each matrix is let go of on the MLX side as soon as it is taken, so that converting needs little more than the weights
themselves. Knows mlx-lm's module names; knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.converter.quantize import GROUP, Dense, Form, Int4Grid, int4, int8
from outrider.drafting.coreml.package.architecture import Architecture
from outrider.protocol.errors import InvalidRequest, ModelError

KINDS = ("fp16", "int8", "int4", "fp32")
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
NORM = "model.norm"


@dataclass(slots=True)
class Weights:
    """`matrices` by module name ("model.layers.0.mlp.up_proj", "lm_head"), `vectors` for norms and biases.

    `embedding` is [vocab, hidden] in float16 (float32 for kind fp32), the head's own numbers when the model is tied.
    """

    architecture: Architecture
    kind: str
    embedding: NDArray[np.floating]
    matrices: dict[str, Form] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.floating]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        numbers = self.embedding.size + sum(vector.size for vector in self.vectors.values())
        for name, form in self.matrices.items():
            if name != HEAD or not self.architecture.tied:
                numbers += form.values.size if isinstance(form, Dense) else form.data.size
        return numbers


@dataclass(slots=True)
class _Range:
    """What happened to numbers on their way to float16."""

    source: str = ""
    largest: float = 0.0
    flushed: int = 0
    total: int = 0

    def note(self) -> tuple[str, ...]:
        if not self.source:
            return ()
        return (
            f"weights were {self.source} and are float16 here: the largest is {self.largest:.3g} of 65504, "
            f"{self.flushed} of {self.total} were too small and became 0",
        )


class WeightReader:
    """Takes the weights of an mlx-lm `model` apart. `kind` is one of KINDS."""

    def __init__(self, model: nn.Module, architecture: Architecture, kind: str) -> None:
        if kind not in KINDS:
            raise InvalidRequest(f"weights is {kind!r}; expected one of {', '.join(KINDS)}")
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._architecture = architecture
        self._kind = kind
        self._dtype = np.float32 if kind == "fp32" else np.float16
        self._range = _Range()

    def read(self, progress: Callable[[int, int], None] | None = None) -> Weights:
        """Everything; `progress(done, total)` counts matrices.

        Raises:
            ModelError: a weight does not fit float16, or its width does not divide into int4's groups.
        """
        names = list(self._matrix_names())
        weights = Weights(self._architecture, self._kind, np.empty((0, 0)))
        for done, name in enumerate(names):
            form = self._matrix(name)
            if name == EMBEDDING:
                weights.embedding = form.values
                if self._architecture.tied:
                    weights.matrices[HEAD] = form
            else:
                weights.matrices[name] = form
            bias = self._vector(name, "bias")
            if bias is not None:
                weights.vectors[f"{name}.bias"] = bias
            self._modules.pop(name).clear()
            if progress:
                progress(done + 1, len(names))
        for name in self._norm_names():
            vector = self._vector(name, "weight")
            if vector is not None:
                weights.vectors[f"{name}.weight"] = vector
        weights.notes = self._range.note()
        return weights

    def _matrix_names(self) -> Iterator[str]:
        yield EMBEDDING
        for layer in range(self._architecture.layers):
            for name in PROJECTIONS:
                yield f"model.layers.{layer}.{name}"
        if not self._architecture.tied:
            yield HEAD

    def _norm_names(self) -> Iterator[str]:
        inner = ["input_layernorm", "post_attention_layernorm"]
        if self._architecture.normed_heads:
            inner += ["self_attn.q_norm", "self_attn.k_norm"]
        for layer in range(self._architecture.layers):
            for name in inner:
                yield f"model.layers.{layer}.{name}"
        yield NORM

    def _matrix(self, name: str) -> Form:
        """The module's weight [rows, columns] in this reader's kind."""
        module = self._modules[name]
        dense = self._narrow(name, _dense(module))
        stays = name == EMBEDDING and not self._architecture.tied
        if self._kind == "int8" and not stays:
            return int8(dense)
        if self._kind == "int4" and not stays:
            return int4(dense, name, _grid(module))
        return Dense(dense)

    def _vector(self, name: str, key: str) -> NDArray[np.floating] | None:
        vector = self._modules[name].get(key)
        return None if vector is None else self._narrow(f"{name}.{key}", vector)

    def _narrow(self, name: str, array: mx.array) -> NDArray[np.floating]:
        """`array` as this reader's float type; counts what that changes."""
        if self._dtype is np.float32:
            return np.array(array.astype(mx.float32))
        narrow = np.array(array.astype(mx.float16))
        if array.dtype != mx.float16:
            self._range.source = str(array.dtype).removeprefix("mlx.core.")
            self._range.total += array.size
            self._range.flushed += int(((array != 0) & (array.astype(mx.float16) == 0)).sum())
            self._range.largest = max(self._range.largest, float(mx.abs(array).max()))
        if not np.isfinite(narrow).all():
            raise ModelError(
                f"{name} holds values up to {float(mx.abs(array).max()):.3g}, beyond float16's 65504 (or no numbers"
                " at all); the Neural Engine computes in float16 (use --draft-backend mlx for this model)"
            )
        return narrow


def _dense(module: nn.Module) -> mx.array:
    """The weight of a plain or quantised Linear or Embedding, [rows, columns]."""
    if "scales" not in module:
        weight: mx.array = module.weight
        return weight
    scales, biases = module.scales, module.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    wide: mx.array = mx.dequantize(
        module.weight, scales, biases, group_size=module.group_size, bits=module.bits, mode=module.mode
    )
    return wide


def _grid(module: nn.Module) -> Int4Grid | None:
    """The levels of a module that is quantised in the very groups that int4 wants."""
    if "scales" not in module or (module.mode, module.bits, module.group_size) != ("affine", 4, GROUP):
        return None
    scales, biases = (np.array(x.astype(mx.float32)) for x in (module.scales, module.biases))
    # mlx may count downwards from the highest level
    return Int4Grid(np.abs(scales), np.minimum(biases, biases + 15 * scales))
