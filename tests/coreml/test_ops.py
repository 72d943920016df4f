"""The interpreter's operations, compared with coremltools' value inference, or with manual results."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafters.coreml.drafter import CoreMLKVRows
from outrider.drafters.coreml.package import WEIGHTS_PATH, import_coremltools
from outrider.drafters.coreml.runtimes import RuntimeFault
from outrider.protocol.errors import ModelError
from tests.coreml.conftest import Converted
from tests.harness import mil_interpreter as interpreter
from tests.harness import mil_program
from tests.harness.mil_interpreter import NumpyRuntime
from tests.harness.mil_program import Constant

WITHOUT_INFERENCE = {"conv", "silu", "split"}  # coremltools' own inference of split takes sizes for positions
PER_KIND = 6
MIL = ".converters.mil.mil"


@pytest.fixture
def executed(converted: Callable[..., Converted], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Operation -> arguments of a few of its calls in a graph."""
    seen: dict[str, list[dict[str, Any]]] = {}

    def recorder(kind: str, run: interpreter.Op) -> interpreter.Op:
        def record(**arguments: Any) -> Any:
            calls = seen.setdefault(kind, [])
            if len(calls) < PER_KIND and not any(_shapes(call) == _shapes(arguments) for call in calls):
                calls.append(arguments)
            return run(**arguments)

        return record

    for kind, run in list(interpreter.OPS.items()):
        monkeypatch.setitem(interpreter.OPS, kind, recorder(kind, run))
    kv_rows = CoreMLKVRows(converted("qwen3").host())
    for function in (kv_rows._host.layout.functions[1], kv_rows._host.layout.prefill):
        kv_rows.read([3, 1, 4], function)
    monkeypatch.undo()
    return seen


def test_real_operations_agree_with_coremltools(executed: dict[str, list[dict[str, Any]]]) -> None:
    assert set(executed) == set(interpreter.OPS)  # every operation of the interpreter occurs in a graph
    checked = set()
    for kind, calls in executed.items():
        for arguments in calls:
            inferred = None if kind == "split" else _inferred(kind, arguments)
            if inferred is None:
                continue
            checked.add(kind)
            result = interpreter.OPS[kind](**arguments)
            for found, expected in zip(result if isinstance(result, list) else [result], inferred, strict=True):
                assert found.shape == expected.shape
                np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6, err_msg=kind)
    assert set(executed) - checked == WITHOUT_INFERENCE


def test_constexpr_agrees_with_coremltools() -> None:
    mil, draws = import_coremltools(MIL), np.random.default_rng(0)
    data = draws.integers(-128, 128, (8, 64, 1, 1)).astype(np.int8)
    scale = draws.random((8, 2, 1, 1)).astype(np.float16)
    zero = draws.integers(-128, 128, scale.shape).astype(np.int8)
    with mil.Function({"x": mil.Builder.TensorSpec((1,))}, opset_version=import_coremltools().target.iOS18):
        for offset in (zero, None):
            given = {"data": data, "scale": scale} | ({} if offset is None else {"offset": offset})
            var = mil.Builder.constexpr_blockwise_shift_scale(**given)
            expected = var.op.materialized_val_inference()
            np.testing.assert_allclose(interpreter.blockwise_shift_scale(**given), expected, rtol=2e-3)


def test_conv_is_a_matrix_product_per_position() -> None:
    draws = np.random.default_rng(1)
    x, weight, bias = draws.random((1, 3, 1, 5)), draws.random((4, 3, 1, 1)), draws.random(4)
    found = np.asarray(interpreter.conv(x, weight, bias, strides=np.array([1, 1])))
    assert found.shape == (1, 4, 1, 5)
    for row in range(4):
        for place in range(5):
            expected = sum(weight[row, i, 0, 0] * x[0, i, 0, place] for i in range(3)) + bias[row]
            assert math.isclose(found[0, row, 0, place], expected, rel_tol=1e-12)


def test_silu_is_x_over_one_plus_e_to_minus_x() -> None:
    for x in (-40.0, -1.5, 0.0, 0.3, 12.0):
        assert math.isclose(float(np.asarray(interpreter.silu(np.array(x)))), x / (1 + math.exp(-x)), abs_tol=1e-15)


def test_split_takes_a_number_or_sizes() -> None:
    x, axis = np.arange(12.0).reshape(2, 6), np.array(-1)
    three = interpreter.split(x, axis, num_splits=np.array(3))
    assert [part.tolist() for part in three] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    uneven = interpreter.split(x, axis, split_sizes=np.array([5, 1]))
    assert [part.shape for part in uneven] == [(2, 5), (2, 1)] and uneven[1].tolist() == [[5], [11]]


def test_concat_refuses_to_interleave() -> None:
    with pytest.raises(NotImplementedError):
        interpreter.concat([np.zeros(2)], np.array(0), interleave=True)


def test_wrong_inputs_and_functions_are_named(converted: Callable[..., Converted]) -> None:
    runtime = NumpyRuntime(converted("qwen3").package.path)
    with pytest.raises(RuntimeFault, match="no function q2; it has prefill64, q1"):
        runtime.call("q2", {})
    with pytest.raises(RuntimeFault, match=r"input x has shape \(3,\); expected \(1, 128, 1, 1\)"):
        runtime.call("q1", {"x": np.zeros(3)})


def test_results_are_rounded_to_the_declared_type(converted: Callable[..., Converted]) -> None:
    logits = converted("qwen3").logits([1, 2, 3])
    assert (logits.astype(np.float16) == logits).all()
    exact = converted("qwen3", weights="fp32").logits([1, 2, 3])
    assert (exact.astype(np.float16) != exact).any()


def test_weights_are_read_as_coremltools_reads_them(converted: Callable[..., Converted]) -> None:
    from coremltools.libmilstoragepython import _BlobStorageReader as Reader

    seen = set()
    for weights in ("fp16", "fp32", "int8"):
        path = converted("qwen3", weights=weights).package.path
        model, reader = mil_program.read(path), Reader(str(path / WEIGHTS_PATH))
        for constant in _constants(model):
            expected = _read_by_coremltools(reader, constant)
            assert (model.value(constant).reshape(-1) == expected.reshape(-1)).all()
            seen.add(constant.port.dtype)
    assert seen == {"FLOAT16", "FLOAT32", "INT8"}


def test_missing_blob_is_refused(tmp_path: Path, converted: Callable[..., Converted]) -> None:
    file = mil_program.BlobFile(converted("qwen3").package.path / WEIGHTS_PATH)
    for offset, shape in ((0, (4,)), (64, (10**6,)), (10**9, (4,))):
        with pytest.raises(ModelError, match="does not belong to this model"):
            file.read(offset, "FLOAT16", shape)


def _inferred(kind: str, arguments: dict[str, Any]) -> list[NDArray[Any]] | None:
    """The result that coremltools computes for constant arguments while it builds a graph; None if it does not."""
    mil = import_coremltools(MIL)
    target = import_coremltools().target.iOS18
    given = {name: _plain(value) for name, value in arguments.items()}
    with mil.Function({"unused": mil.Builder.TensorSpec((1,))}, opset_version=target):
        result = getattr(mil.Builder, kind)(**given)
    variables = list(result) if isinstance(result, list | tuple) else [result]
    return None if any(var.val is None for var in variables) else [var.val for var in variables]


def _plain(value: Any) -> Any:
    """Numpy scalars as Python's; coremltools passes them to functions that accept only these."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _shapes(arguments: dict[str, Any]) -> list[object]:
    return [(name, [a.shape for a in v] if isinstance(v, list) else np.shape(v)) for name, v in arguments.items()]


def _constants(model: mil_program.SavedModel) -> list[Constant]:
    return [
        constant
        for operation in model.functions["q1"].operations
        for constants in operation.arguments.values()
        for constant in constants
        if isinstance(constant, Constant) and constant.offset is not None
    ]


def _read_by_coremltools(reader: Any, constant: Constant) -> NDArray[Any]:
    match constant.port.dtype:
        case "FLOAT16":
            return np.frombuffer(reader.read_fp16_data(constant.offset).tobytes(), np.float16)
        case "FLOAT32":
            return np.asarray(reader.read_float_data(constant.offset))
    return np.asarray(reader.read_int8_data(constant.offset))
