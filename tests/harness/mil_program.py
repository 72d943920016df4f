"""Reads the .mlpackage of a package from disk: its functions as plain records, the weights still in the file.

Only coremltools' protobuf classes are used, so a check of these records is a check of the written file. `BlobFile`
reads weight.bin, Core ML's blob storage, through a memory map: each blob is a 64-byte header (sentinel, dtype, size,
offset) and its bytes, and nothing is copied before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.package import MODEL_PATH, WEIGHTS_PATH, import_coremltools
from outrider.protocol.errors import ModelError

_HEADER = struct.Struct("<IIQQ")
_SENTINEL = 0xDEADBEEF
DTYPES: dict[str, type[np.generic]] = {
    "FLOAT16": np.float16, "FLOAT32": np.float32, "INT8": np.int8, "UINT8": np.uint8, "INT16": np.int16,
    "UINT16": np.uint16, "INT32": np.int32, "UINT32": np.uint32, "BOOL": np.bool_,
}  # fmt: skip


class BlobFile:
    """weight.bin at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Returns the array whose header is at `offset`.

        Raises:
            ModelError: there is no such blob.
        """
        header = self._bytes[offset : offset + _HEADER.size].tobytes()
        sentinel, _, size, start = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0, 0)
        expected = int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        if sentinel != _SENTINEL or size != expected or start + size > self._bytes.size:
            raise ModelError(
                f"{self._path} holds no {dtype} {list(shape)} at {offset}; it does not belong to this model.mlmodel"
            )
        return self._bytes[start : start + size].view(DTYPES[dtype]).reshape(shape)


@dataclass(frozen=True, slots=True)
class Port:
    """A named value; `dtype` is Core ML's name (FLOAT16, INT32, ...). -1 in `shape` is an unknown size."""

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
class SavedOperation:
    """One operation; each argument is a list of value names or constants."""

    kind: str
    arguments: dict[str, list[str | Constant]]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class SavedFunction:
    """`operations` in order; a `const` operation has one argument, "val"."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]
    operations: tuple[SavedOperation, ...]


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
    """Returns the model in the package directory `package`.

    Raises:
        ModelError: `package` is not one, or it has an operation with blocks.
    """
    if not (package / MODEL_PATH).is_file() or not (package / WEIGHTS_PATH).is_file():
        raise ModelError(f"{package} is not a Core ML package; expected {MODEL_PATH} and {WEIGHTS_PATH} in it")
    return _Reader(package).read()


class _Reader:
    def __init__(self, package: Path) -> None:
        self._package = package
        self._types = import_coremltools(".proto.MIL_pb2").DataType
        self._model = import_coremltools(".proto.Model_pb2").Model()
        self._model.ParseFromString((package / MODEL_PATH).read_bytes())

    def read(self) -> SavedModel:
        specs = sorted(self._model.mlProgram.functions.items())  # protobuf keeps no order
        functions = {name: self._function(name, spec) for name, spec in specs}
        return SavedModel(
            self._model.specificationVersion,
            self._model.description.defaultFunctionName,
            functions,
            BlobFile(self._package / WEIGHTS_PATH),
        )

    def _function(self, name: str, spec: Any) -> SavedFunction:
        block = spec.block_specializations[spec.opset]
        return SavedFunction(
            name,
            tuple(self._port(port.name, port.type) for port in spec.inputs),
            tuple(block.outputs),
            tuple(self._operation(operation) for operation in block.operations),
        )

    def _operation(self, spec: Any) -> SavedOperation:
        if spec.blocks:
            raise ModelError(f"{self._package} has a {spec.type} with blocks, which the interpreter does not support")
        arguments: dict[str, list[str | Constant]] = {
            name: [self._argument(binding) for binding in argument.arguments] for name, argument in spec.inputs.items()
        }
        if spec.type == "const":
            arguments["val"] = [self._constant(spec.attributes["val"])]
        return SavedOperation(spec.type, arguments, tuple(self._port(port.name, port.type) for port in spec.outputs))

    def _argument(self, binding: Any) -> str | Constant:
        return str(binding.name) if binding.WhichOneof("binding") == "name" else self._constant(binding.value)

    def _port(self, name: str, spec: Any) -> Port:
        tensor = spec.tensorType
        sizes = (dim.constant.size if dim.WhichOneof("dimension") == "constant" else -1 for dim in tensor.dimensions)
        return Port(name, str(self._types.Name(tensor.dataType)), tuple(sizes))

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
