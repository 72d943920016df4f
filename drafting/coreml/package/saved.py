"""A .mlpackage read back from disk: its functions as plain records, weights still in the file.

Only the protobuf classes of coremltools are used; the weights are read by `blobs`. So what is checked through this is
what was written, not what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.coreml.package import quiet
from outrider.drafting.coreml.package.blobs import DTYPES, BlobFile
from outrider.protocol.errors import ModelError

_DATA = Path("Data") / "com.apple.CoreML"
MODEL = _DATA / "model.mlmodel"
WEIGHTS = _DATA / "weights" / "weight.bin"


@dataclass(frozen=True, slots=True)
class Port:
    """A named value; `dtype` is CoreML's word (FLOAT16, INT32, ...). -1 in `shape` is an unknown size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A value known at load time: at `offset` of weight.bin, or `immediate`."""

    port: Port
    offset: int | None = None
    immediate: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; each argument is a list of value names or constants."""

    kind: str
    arguments: dict[str, list[str | Constant]]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class SavedFunction:
    """`operations` in order; a `const` operation has one argument, "val"."""

    name: str
    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A package's functions by name."""

    version: int
    default_function: str
    functions: dict[str, SavedFunction]
    blobs: BlobFile = field(repr=False)

    def value(self, constant: Constant) -> NDArray[Any]:
        if constant.immediate is not None:
            return constant.immediate
        return self.blobs.read(constant.offset or 0, constant.port.dtype, constant.port.shape)


def read(package: Path) -> SavedModel:
    """The model in the .mlpackage directory `package`.

    Raises:
        ModelError: `package` is not one.
    """
    if not (package / MODEL).is_file() or not (package / WEIGHTS).is_file():
        raise ModelError(f"{package} is not a Core ML package; expected {MODEL} and {WEIGHTS} in it")
    return _Reader(package).read()


class _Reader:
    def __init__(self, package: Path) -> None:
        self._package = package
        proto = quiet.model_proto()
        self._types = proto.DESCRIPTOR.pool.FindEnumTypeByName("CoreML.Specification.MILSpec.DataType")
        self._model = proto.Model()
        try:
            self._model.ParseFromString((package / MODEL).read_bytes())
        except ValueError as error:  # protobuf's DecodeError
            raise ModelError(f"{package / MODEL} is damaged ({error}); convert the model again") from error

    def read(self) -> SavedModel:
        specs = sorted(self._model.mlProgram.functions.items())  # protobuf keeps no order
        functions = {name: self._function(name, spec) for name, spec in specs}
        return SavedModel(
            self._model.specificationVersion,
            self._model.description.defaultFunctionName,
            functions,
            BlobFile(self._package / WEIGHTS),
        )

    def _function(self, name: str, spec: Any) -> SavedFunction:
        block = spec.block_specializations[spec.opset]
        plain = [port for port in spec.inputs if port.type.WhichOneof("type") == "tensorType"]
        states = [port for port in spec.inputs if port.type.WhichOneof("type") == "stateType"]
        return SavedFunction(
            name,
            tuple(self._port(port.name, port.type) for port in plain),
            tuple(self._port(port.name, port.type.stateType.wrappedType) for port in states),
            tuple(block.outputs),
            tuple(self._operation(operation) for operation in block.operations),
        )

    def _operation(self, spec: Any) -> Operation:
        if spec.blocks:
            raise ModelError(f"{self._package} has a {spec.type} with blocks, which the interpreter does not know")
        arguments: dict[str, list[str | Constant]] = {
            name: [self._argument(binding) for binding in argument.arguments] for name, argument in spec.inputs.items()
        }
        if spec.type == "const":
            arguments["val"] = [self._constant(spec.attributes["val"])]
        return Operation(spec.type, arguments, tuple(self._port(port.name, port.type) for port in spec.outputs))

    def _argument(self, binding: Any) -> str | Constant:
        return str(binding.name) if binding.WhichOneof("binding") == "name" else self._constant(binding.value)

    def _port(self, name: str, spec: Any) -> Port:
        tensor = spec.tensorType
        sizes = (dim.constant.size if dim.WhichOneof("dimension") == "constant" else -1 for dim in tensor.dimensions)
        return Port(name, self._types.values_by_number[tensor.dataType].name, tuple(sizes))

    def _constant(self, spec: Any) -> Constant:
        port = self._port("", spec.type)
        if spec.WhichOneof("value") == "blobFileValue":
            return Constant(port, offset=spec.blobFileValue.offset)
        tensor = spec.immediateValue.tensor
        kind = tensor.WhichOneof("value")
        values = getattr(tensor, kind).values
        if kind == "bytes":
            array = np.frombuffer(values, DTYPES[port.dtype])
        else:
            array = np.array(list(values), DTYPES.get(port.dtype))
        return Constant(port, immediate=array.reshape(port.shape))
