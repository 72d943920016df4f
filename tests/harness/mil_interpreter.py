"""The reference interpreter: runs a saved package in numpy, on any machine, in Core ML's place.

It computes each operation as in Core ML's documentation, and rounds each result to the type that the graph declares
for it (sums are taken in float32). So float16 packages show float16's errors. It is slow. Operations take float32,
int32 or bool arrays by Core ML's argument names and return one array or a list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.runtimes import Inputs, Outputs, RuntimeFault
from outrider.protocol.errors import ModelError
from tests.harness import mil_program
from tests.harness.mil_program import Constant, Port, SavedFunction, SavedModel, SavedOperation

Array: TypeAlias = NDArray[Any]
Op: TypeAlias = Callable[..., Array | list[Array]]


def conv(x: Array, weight: Array, bias: Array | None = None, **_: Array) -> Array:
    """A 1x1 convolution: (1, in, 1, n) by (out, in, 1, 1)."""
    rows = weight.reshape(weight.shape[:2]) @ x.reshape(x.shape[1], x.shape[3])
    if bias is not None:
        rows = rows + bias[:, None]
    return np.asarray(rows).reshape(1, weight.shape[0], 1, x.shape[3])


def matmul(x: Array, y: Array, transpose_x: Array | bool = False, transpose_y: Array | bool = False) -> Array:
    x = np.swapaxes(x, -1, -2) if transpose_x else x
    y = np.swapaxes(y, -1, -2) if transpose_y else y
    return np.asarray(np.matmul(x, y))


def softmax(x: Array, axis: Array) -> Array:
    shifted = np.exp(x - x.max(axis=int(axis), keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=int(axis), keepdims=True))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Array:
    return np.asarray(1 / np.sqrt(x + epsilon))


def concat(values: list[Array], axis: Array, interleave: Array | bool = False) -> Array:
    if interleave:
        raise NotImplementedError("concat with interleave")
    return np.concatenate(values, axis=int(axis))


def split(x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None) -> list[Array]:
    if split_sizes is None:
        return np.split(x, int(num_splits if num_splits is not None else 1), axis=int(axis))
    return np.split(x, np.cumsum(split_sizes)[:-1], axis=int(axis))


def blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """Returns scale * (data - offset), with one scale for each block of the data."""
    for axis in range(data.ndim):
        block = data.shape[axis] // scale.shape[axis]
        if block > 1:
            scale = np.repeat(scale, block, axis)
            offset = None if offset is None else np.repeat(offset, block, axis)
    shifted = data.astype(np.float32) if offset is None else data.astype(np.float32) - offset
    return np.asarray(scale * shifted)


def _reduce(function: Callable[..., Any]) -> Op:
    def reduce(x: Array, axes: Array, keep_dims: Array | bool = False) -> Array:
        return np.asarray(function(x, axis=tuple(int(axis) for axis in axes), keepdims=bool(keep_dims)))

    return reduce


def _binary(function: Callable[..., Any]) -> Op:
    def binary(x: Array, y: Array) -> Array:
        return np.asarray(function(x, y))

    return binary


OPS: dict[str, Op] = {
    "abs": lambda x: np.asarray(np.abs(x)),
    "add": _binary(np.add),
    "mul": _binary(np.multiply),
    "real_div": _binary(np.divide),
    "maximum": _binary(np.maximum),
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "rsqrt": rsqrt,
    "softmax": softmax,
    "silu": silu,
    "conv": conv,
    "matmul": matmul,
    "concat": concat,
    "split": split,
    "reshape": lambda x, shape: np.reshape(x, tuple(int(size) for size in shape)),
    "transpose": lambda x, perm: np.transpose(x, tuple(int(axis) for axis in perm)),
}


_MOVES = ("concat", "reshape", "split", "transpose")  # these compute no numbers to round
_CONSTEXPR = "constexpr_blockwise_shift_scale"


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation ready to run: `fixed` arguments are constants, `named` are looked up, `dead` is freed after it."""

    operation: SavedOperation
    run: Op
    fixed: dict[str, Any]
    named: dict[str, list[str]]
    dead: tuple[str, ...]


class NumpyRuntime:
    """Takes the place of `CoreMLRuntime`, over the package directory `package`.

    Raises:
        ModelError: there is no package, or it has an operation that this interpreter does not support.
    """

    name = "the reference interpreter (numpy): exact and slow, for checking"

    def __init__(self, package: Path) -> None:
        self._model: SavedModel = mil_program.read(package)
        self._weights: dict[object, NDArray[Any]] = {}
        self._plans: dict[str, tuple[_Step, ...]] = {}

    def call(self, function: str, inputs: Inputs) -> Outputs:
        spec = self._model.functions.get(function)
        if spec is None:
            raise RuntimeFault(f"the package has no function {function}; it has {', '.join(self._model.functions)}")
        values = {port.name: _checked(port, inputs) for port in spec.inputs}
        for step in self._plan(spec):
            _execute(step, values)
            for name in step.dead:
                del values[name]
        return {name: values[name] for name in spec.outputs}

    def _plan(self, spec: SavedFunction) -> tuple[_Step, ...]:
        if spec.name not in self._plans:
            self._plans[spec.name] = _Planner(self._model, self._weights).plan(spec)
        return self._plans[spec.name]


class _Planner:
    """Converts a function's operations to steps; decoded weights are shared through `weights`."""

    def __init__(self, model: SavedModel, weights: dict[object, NDArray[Any]]) -> None:
        self._model = model
        self._weights = weights
        self._known: dict[str, NDArray[Any]] = {}

    def plan(self, spec: SavedFunction) -> tuple[_Step, ...]:
        steps = []
        for operation in spec.operations:
            if operation.kind == "const":
                self._known[operation.outputs[0].name] = self._decoded(operation.arguments["val"][0])
            elif operation.kind == _CONSTEXPR:
                self._known[operation.outputs[0].name] = self._expanded(operation)
            elif operation.kind in OPS:
                steps.append(self._step(operation))
            else:
                raise ModelError(f"the reference interpreter does not support the operation {operation.kind!r}")
        return _with_ends(steps, keep=set(spec.outputs))

    def _step(self, operation: SavedOperation) -> _Step:
        fixed: dict[str, Any] = {}
        named: dict[str, list[str]] = {}
        for name, bindings in operation.arguments.items():
            many = name == "values"
            values = [self._known.get(b) if isinstance(b, str) else self._decoded(b) for b in bindings]
            if all(value is not None for value in values):
                fixed[name] = values if many else values[0]
            else:
                named[name] = [b if isinstance(b, str) else "" for b in bindings]
                if many:  # a list may have constants and results: constants become named values
                    fixed.update({b: v for b, v in zip(named[name], values, strict=True) if v is not None})
        return _Step(operation, OPS[operation.kind], fixed, named, ())

    def _decoded(self, binding: str | Constant) -> NDArray[Any]:
        if isinstance(binding, str):
            return self._known[binding]
        key: object = (binding.offset, binding.port.dtype, binding.port.shape)
        if binding.offset is None:
            return _widened(self._model.value(binding))
        if key not in self._weights:
            self._weights[key] = _widened(self._model.value(binding))
        return self._weights[key]

    def _expanded(self, operation: SavedOperation) -> NDArray[Any]:
        bindings = {name: constants[0] for name, constants in operation.arguments.items()}
        key = tuple(b.offset if isinstance(b, Constant) else b for b in bindings.values())
        if key not in self._weights:
            parts = {n: self._model.value(b) for n, b in bindings.items() if isinstance(b, Constant)}
            expanded = blockwise_shift_scale(**parts)
            self._weights[key] = _rounded(expanded, operation.outputs[0].dtype)
        return self._weights[key]


def _with_ends(steps: list[_Step], keep: set[str]) -> tuple[_Step, ...]:
    """Returns the steps, each with the values that no later step needs."""
    seen, ended = set(keep), []
    for step in reversed(steps):
        touched = {port.name for port in step.operation.outputs}
        touched |= {name for names in step.named.values() for name in names}
        dead = {name for name in touched if name not in seen and name not in step.fixed}
        seen |= touched
        ended.append(_Step(step.operation, step.run, step.fixed, step.named, tuple(sorted(dead))))
    return tuple(reversed(ended))


def _execute(step: _Step, values: dict[str, NDArray[Any]]) -> None:
    arguments = {name: value for name, value in step.fixed.items() if name in step.operation.arguments}
    for name, names in step.named.items():
        arrays = [values[n] if n in values else step.fixed[n] for n in names]
        arguments[name] = arrays if name == "values" else arrays[0]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the host checks for overflow
        result = step.run(**arguments)
        results = result if isinstance(result, list) else [result]
        for port, array in zip(step.operation.outputs, results, strict=True):
            if array.shape != port.shape:
                raise RuntimeFault(f"{step.operation.kind} {port.name} gave {array.shape}, declared {port.shape}")
            values[port.name] = array if step.operation.kind in _MOVES else _rounded(array, port.dtype)


def _checked(port: Port, inputs: Inputs) -> NDArray[Any]:
    array = inputs.get(port.name)
    if array is None or array.shape != port.shape:
        shape = None if array is None else array.shape
        raise RuntimeFault(f"input {port.name} has shape {shape}; expected {port.shape}")
    return _rounded(array, port.dtype)


def _rounded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    match dtype:
        case "FLOAT16":
            return array.astype(np.float16).astype(np.float32)
        case "FLOAT32":
            return array.astype(np.float32, copy=False)
        case "INT32":
            return array.astype(np.int32, copy=False)
    return array


def _widened(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def open_runtime(package: Package) -> NumpyRuntime:
    """Returns the interpreter in Core ML's place: see `runtimes.STAND_IN_VARIABLE`."""
    return NumpyRuntime(package.path)
