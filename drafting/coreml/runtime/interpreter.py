"""The reference runtime: interprets the saved package in numpy, on any machine.

Each result is rounded to the type the graph declares for it (sums are taken in float32), so float16 packages show
float16's errors. Slow and exact; it says so in its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.package import saved
from outrider.drafting.coreml.package.saved import Constant, Operation, Port, SavedFunction, SavedModel
from outrider.drafting.coreml.runtime import ops
from outrider.drafting.coreml.runtime.runtime import Inputs, Outputs, RuntimeFault, State
from outrider.protocol.errors import ModelError

_STATE_OPS = ("read_state", "write_state")
_MOVES = ("concat", "reshape", "slice_update", "split", "transpose")  # these make no new numbers to round
_CONSTEXPR = "constexpr_blockwise_shift_scale"


class NumpyState(dict[str, NDArray[Any]]):
    """State arrays by name, float32 holding float16's numbers."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation ready to run: `fixed` arguments are known, `named` are looked up, `dead` is free afterwards."""

    operation: Operation
    run: ops.Op | None
    fixed: dict[str, Any]
    named: dict[str, list[str]]
    dead: tuple[str, ...]


class NumpyRuntime:
    """A `Runtime` over the .mlpackage directory `package`.

    Raises:
        ModelError: no package there, or an operation in it that this interpreter does not know.
    """

    name = "the reference interpreter (numpy): exact and slow, for checking"

    def __init__(self, package: Path) -> None:
        self._model: SavedModel = saved.read(package)
        self._weights: dict[object, NDArray[Any]] = {}
        self._plans: dict[str, tuple[_Step, ...]] = {}

    def new_state(self) -> State | None:
        states = self._model.functions[self._model.default_function].states
        return NumpyState({port.name: np.zeros(port.shape, np.float32) for port in states}) if states else None

    def call(self, function: str, inputs: Inputs, state: State | None) -> Outputs:
        spec = self._model.functions.get(function)
        if spec is None:
            raise RuntimeFault(f"the package has no function {function}; it has {', '.join(self._model.functions)}")
        values = {port.name: _checked(port, inputs) for port in spec.inputs}
        for step in self._plan(spec):
            if step.run is None:
                _touch_state(step, values, state)
            else:
                _execute(step, step.run, values)
            for name in step.dead:
                del values[name]
        return {name: values[name] for name in spec.outputs}

    def close(self) -> None:
        self._weights.clear()
        self._plans.clear()

    def _plan(self, spec: SavedFunction) -> tuple[_Step, ...]:
        if spec.name not in self._plans:
            self._plans[spec.name] = _Planner(self._model, self._weights).plan(spec)
        return self._plans[spec.name]


class _Planner:
    """Turns a function's operations into steps; weights decoded once are shared through `weights`."""

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
            elif operation.kind in ops.OPS or operation.kind in _STATE_OPS:
                steps.append(self._step(operation))
            else:
                raise ModelError(f"the reference interpreter does not know the operation {operation.kind!r}")
        return _with_ends(steps, keep=set(spec.outputs))

    def _step(self, operation: Operation) -> _Step:
        fixed: dict[str, Any] = {}
        named: dict[str, list[str]] = {}
        for name, bindings in operation.arguments.items():
            many = name == "values"
            values = [self._known.get(b) if isinstance(b, str) else self._decoded(b) for b in bindings]
            if all(value is not None for value in values):
                fixed[name] = values if many else values[0]
            else:
                named[name] = [b if isinstance(b, str) else "" for b in bindings]
                if many:  # a list may mix constants and results: constants become named values
                    fixed.update({b: v for b, v in zip(named[name], values, strict=True) if v is not None})
        return _Step(operation, ops.OPS.get(operation.kind), fixed, named, ())

    def _decoded(self, binding: str | Constant) -> NDArray[Any]:
        if isinstance(binding, str):
            return self._known[binding]
        key: object = (binding.offset, binding.port.dtype, binding.port.shape)
        if binding.offset is None:
            return _widened(self._model.value(binding))
        if key not in self._weights:
            self._weights[key] = _widened(self._model.value(binding))
        return self._weights[key]

    def _expanded(self, operation: Operation) -> NDArray[Any]:
        bindings = {name: constants[0] for name, constants in operation.arguments.items()}
        key = tuple(b.offset if isinstance(b, Constant) else b for b in bindings.values())
        if key not in self._weights:
            parts = {n: self._model.value(b) for n, b in bindings.items() if isinstance(b, Constant)}
            expanded = ops.blockwise_shift_scale(**parts)
            self._weights[key] = _rounded(expanded, operation.outputs[0].dtype)
        return self._weights[key]


def _with_ends(steps: list[_Step], keep: set[str]) -> tuple[_Step, ...]:
    """The steps, each with the values that nothing needs after it."""
    seen, ended = set(keep), []
    for step in reversed(steps):
        touched = {port.name for port in step.operation.outputs}
        if step.run is not None or step.operation.kind == "write_state":
            touched |= {name for names in step.named.values() for name in names}
        states = set(step.named.get("input", [])) if step.run is None else set()
        dead = {name for name in touched if name not in seen and name not in step.fixed} - states
        seen |= touched
        ended.append(_Step(step.operation, step.run, step.fixed, step.named, tuple(sorted(dead))))
    return tuple(reversed(ended))


def _execute(step: _Step, run: ops.Op, values: dict[str, NDArray[Any]]) -> None:
    arguments = {name: value for name, value in step.fixed.items() if name in step.operation.arguments}
    for name, names in step.named.items():
        found = [values[n] if n in values else step.fixed[n] for n in names]
        arguments[name] = found if name == "values" else found[0]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # overflow is for the host to judge
        result = run(**arguments)
        results = result if isinstance(result, list) else [result]
        for port, array in zip(step.operation.outputs, results, strict=True):
            if array.shape != port.shape:
                raise RuntimeFault(f"{step.operation.kind} {port.name} gave {array.shape}, declared {port.shape}")
            values[port.name] = array if step.operation.kind in _MOVES else _rounded(array, port.dtype)


def _touch_state(step: _Step, values: dict[str, NDArray[Any]], state: State | None) -> None:
    if not isinstance(state, NumpyState):
        raise RuntimeFault("this package keeps its cache in a state; call it with one from new_state()")
    name = step.named["input"][0]
    if step.operation.kind == "read_state":
        values[step.operation.outputs[0].name] = state[name]
    else:
        state[name] = values[step.named["data"][0]]


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
