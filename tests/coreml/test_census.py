"""The graphs contain only operations of the Neural Engine, small ranks, static shapes and narrow axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.drafters.coreml.package import WEIGHTS_PATH
from tests.coreml.conftest import Converted
from tests.harness import mil_program
from tests.harness.mil_program import Constant, SavedFunction, SavedModel

PLAIN = {
    "const", "abs", "add", "concat", "conv", "matmul", "maximum", "mul", "real_div", "reduce_max", "reduce_mean",
    "reshape", "rsqrt", "silu", "softmax", "split", "transpose",
}  # fmt: skip


@pytest.fixture(params=["fp16", "int8"])
def model(request: pytest.FixtureRequest, converted: Callable[..., Converted]) -> SavedModel:
    return mil_program.read(converted("qwen3", weights=request.param).package.path)


def test_package_is_for_ios18_and_has_five_functions(model: SavedModel) -> None:
    assert model.version == 9
    assert set(model.functions) == {"q1", "q8", "q16", "q32", "prefill64"}
    assert model.default_function == "q1"


def test_package_contains_only_known_operations(model: SavedModel, request: pytest.FixtureRequest) -> None:
    int8 = request.node.callspec.params["model"] == "int8"
    allowed = PLAIN | ({"constexpr_blockwise_shift_scale"} if int8 else set())
    for function in model.functions.values():
        assert {operation.kind for operation in function.operations} <= allowed


def test_ranks_shapes_and_widths_fit_the_neural_engine(model: SavedModel) -> None:
    for function in model.functions.values():
        for shape in _shapes(function):
            assert len(shape) <= 4
            assert all(0 < size <= 16384 for size in shape), shape


def test_nothing_is_computed_in_integers(model: SavedModel) -> None:
    for function in model.functions.values():
        computed = [operation for operation in function.operations if operation.kind != "const"]
        assert {port.dtype for operation in computed for port in operation.outputs} == {"FLOAT16"}
        assert {port.dtype for port in function.inputs} == {"FLOAT16"}


def test_the_cache_fits_the_grid_of_the_neural_engine(model: SavedModel) -> None:
    shapes = [port.shape for port in model.functions["q1"].inputs if port.name in ("k_past", "v_past")]
    assert len(shapes) == 2 and all(size % 32 == 0 for shape in shapes for size in shape[-2:])


def test_every_projection_is_a_one_by_one_convolution(model: SavedModel) -> None:
    function = model.functions["q8"]
    shapes = {port.name: port.shape for operation in function.operations for port in operation.outputs}
    kernels = [shapes[str(o.arguments["weight"][0])] for o in function.operations if o.kind == "conv"]
    assert len(kernels) == 15 and all(shape[2:] == (1, 1) for shape in kernels)
    reading = [operation for operation in model.functions["prefill64"].operations if operation.kind == "conv"]
    assert len(reading) == 7 + 2  # of the last layer only the key and value projections


def test_functions_share_their_weights(converted: Callable[..., Converted]) -> None:
    made = converted("qwen3")
    model = mil_program.read(made.package.path)
    offsets = {name: _offsets(function) for name, function in model.functions.items()}
    assert offsets["q1"] == offsets["q8"] == offsets["q16"] == offsets["q32"]
    assert offsets["prefill64"] < offsets["q1"]  # it lacks the head, and what follows the last layer's keys
    assert made.package.weight_bytes < 2.2 * made.package.manifest.parameters


def test_a_wide_vocabulary_is_cut_into_chunks(converted: Callable[..., Converted]) -> None:
    made = converted("llama", vocab_size=16384 * 2 + 100, num_hidden_layers=1, context=64)
    model = mil_program.read(made.package.path)
    shapes = [operation.outputs[0].shape for operation in model.functions["q8"].operations if operation.kind == "conv"]
    assert [shape[1] for shape in shapes[-3:]] == [16384, 16384, 100]
    for function in model.functions.values():
        assert all(size <= 16384 for shape in _shapes(function) for size in shape)
    text = [1, 40, 32867, 5]
    found, expected = made.logits(text), made.mlx_logits(text)
    assert found.shape == expected.shape == (4, 32868)
    assert (found.argmax(-1) == expected.argmax(-1)).all()


def test_two_conversions_give_the_same_weights(converted: Callable[..., Converted]) -> None:
    one, other = converted("llama"), converted("llama", context=65)
    name = str(WEIGHTS_PATH)
    assert one.package.manifest.files[name] == other.package.manifest.files[name]
    assert one.package.manifest.source_hash == other.package.manifest.source_hash
    assert one.package.manifest.key != other.package.manifest.key


def _shapes(function: SavedFunction) -> list[tuple[int, ...]]:
    ports = [*function.inputs, *(port for o in function.operations for port in o.outputs)]
    for operation in function.operations:
        ports += [c.port for constants in operation.arguments.values() for c in constants if isinstance(c, Constant)]
    return [port.shape for port in ports]


def _offsets(function: SavedFunction) -> set[int]:
    """Where the function's large matrices lie in weight.bin."""
    return {
        constant.offset
        for operation in function.operations
        for constants in operation.arguments.values()
        for constant in constants
        if isinstance(constant, Constant) and constant.offset is not None and len(constant.port.shape) == 4
    }
