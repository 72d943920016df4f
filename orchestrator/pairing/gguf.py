"""Reads GGUF files: the header, the tensors' positions, and blocks as MLX's quantised matrices.

Every length is checked against the file's size before it is used, so a truncated or foreign file raises a one-sentence
error. Knows the container and its block types; knows no architecture and no tokenizer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

Value: TypeAlias = "bool | int | float | str | list[str] | NDArray[np.generic]"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
GROUP_SIZE = 32
UNQUANTIZED_KINDS = ("F32", "F16", "BF16")
_WEIGHTS_PER_PIECE = 2**23
"""Weights converted at a time; each then takes about twenty bytes."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MlxTensor: TypeAlias = "dict[str, NDArray[Any]]"
"""A tensor as MLX stores it: `weight`; if it is quantised, packed, and `scales` and `biases`, a float16 per group of
32, w = scale q + bias.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 keep their exact numbers. Q4_K and Q5_K keep their levels; the scale and minimum of a
group, products of two numbers in the file, are rounded to half precision. Other block types have no such form (groups
of 16, curves): they are quantised again, with two bits more than they had, or kept in half precision.
"""

_KEPT_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
"""The types whose levels MLX's form can hold, and the number of their bits."""

_REQUANTIZED_BITS = {
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), 4),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S"), 5),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"), 6),
    "Q6_K": 8,
}
"""All other types, and the number of bits in which they are quantised again."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` in numpy's order; `kind`: ggml's name of the type; `offset` (from the start) and `size` in bytes."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's metadata, and its tensors by name. The getters raise ModelError if a key is missing or its value is
    of another type."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, int, "a whole number"))

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a whole number above 0."""
        size = self.whole(key, default)
        if size < 1:
            raise ModelError(f"{self.path}: {key} is {size}; expected a whole number above 0")
        return size

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number; a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        return float(self._get(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default, str, "a text"))

    def texts(self, key: str) -> list[str]:
        texts: list[str] = self._get(key, None, list, "a list of texts")
        return texts

    def numbers(self, key: str, count: int) -> NDArray[np.generic] | None:
        """Returns the list of `count` numbers, or None if there is no such key."""
        if key not in self.metadata:
            return None
        numbers: NDArray[np.generic] = self._get(key, None, np.ndarray, "a list of numbers")
        if len(numbers) != count:
            raise ModelError(f"{self.path}: {key} has {len(numbers)} numbers; expected {count}: download it again")
        return numbers

    def read_tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Reads a tensor's bytes [rows, bytes of a row], where the last dimension of the tensor is a row."""
        place = self.tensors[name]
        try:
            data = np.fromfile(self.path, np.uint8, place.size, offset=place.offset)
        except OSError as error:
            raise _unreadable_error(self.path, error) from None
        if len(data) < place.size:
            raise _truncated_error(self.path)
        return data.reshape(prod(place.shape[:-1]), -1)

    def _get(self, key: str, default: Value | None, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} has no {key} in its metadata; choose another file of this model")
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            found = reprlib.repr(value.tolist() if isinstance(value, np.ndarray) else value)
            raise ModelError(f"{self.path}: {key} is {found}; expected {expected}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a file.

    Raises:
        ModelError: the file is no GGUF file, is truncated, or has unknown types.
    """
    import ml_dtypes  # noqa: F401  (gives numpy the dtype bfloat16; deferred: few starts read a GGUF file)

    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file).read()
    except OSError as error:
        raise _unreadable_error(path, error) from None


def _unreadable_error(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} can't be read: {error.strerror or error}")


def _truncated_error(path: Path) -> ModelError:
    return ModelError(f"{path} is truncated; download it again")


class _HeaderReader:
    """Reads a header once, from its first byte to its last."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> GgufFile:
        if self._file.read(4) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: its first four bytes are not GGUF")
        version = self._read_number(4)
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; expected version 2 or 3, in little-endian byte order"
            )
        tensors, keys = self._read_number(8), self._read_number(8)
        metadata = {}
        for _ in range(keys):
            key = self._read_string()
            metadata[key] = self._read_value(self._read_number(4), key)
        header = GgufFile(self._path, metadata, dict(self._read_tensor_info() for _ in range(tensors)))
        alignment = header.size("general.alignment", 32)
        start = -(-self._file.tell() // alignment) * alignment
        placed = {name: replace(place, offset=start + place.offset) for name, place in header.tensors.items()}
        if any(place.offset + place.size > self._size for place in placed.values()):
            raise _truncated_error(self._path)
        return replace(header, tensors=placed)

    def _read_tensor_info(self) -> tuple[str, TensorInfo]:
        """Reads a tensor's name and position; its offset is relative to the end of the header."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # deferred: takes half a second

        name, dimensions = self._read_string(), self._read_number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: the tensor {name} has {dimensions} dimensions; expected 1 to 4")
        shape = tuple(self._read_number(8) for _ in range(dimensions))[::-1]
        if not all(shape) or prod(shape) > 8 * self._size:  # every type has at least one bit per number
            raise ModelError(f"{self._path} is too small for the tensor {name} of shape {shape}")
        number, offset = self._read_number(4), self._read_number(8)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self._path}: the tensor {name} has the unknown type {number}") from None
        block, width = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{self._path}: the tensor {name} has rows of {shape[-1]} numbers; expected a multiple of {block}"
            )
        return name, TensorInfo(shape, kind.name, offset, prod(shape) // block * width)

    def _read_value(self, kind: int, key: str) -> Value:
        from gguf import GGUFReader, GGUFValueType

        numbers = {int(known): number for known, number in GGUFReader.gguf_scalar_to_np.items()}
        if kind in numbers:
            number = self._read_numbers(numbers[kind], 1)[0]
            return float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()
        if kind == GGUFValueType.STRING:
            return self._read_string()
        if kind != GGUFValueType.ARRAY:
            raise ModelError(f"{self._path}: {key} has the unknown type {kind}")
        inner, count = self._read_number(4), self._read_number(8)
        if inner == GGUFValueType.STRING:
            return [self._read_string() for _ in range(count)]
        if inner not in numbers:
            raise ModelError(f"{self._path}: {key} is a list of the unknown type {inner}")
        return self._read_numbers(numbers[inner], count)

    def _read_numbers(self, kind: type[np.generic], count: int) -> NDArray[np.generic]:
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(self._read_bytes(dtype.itemsize * count), dtype)

    def _read_number(self, size: int) -> int:
        """Reads an unsigned number of `size` bytes."""
        return int.from_bytes(self._read_bytes(size), "little")

    def _read_string(self) -> str:
        data = self._read_bytes(self._read_number(8))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self._path} holds a text that is not UTF-8; download it again") from None

    def _read_bytes(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) < count:
            raise _truncated_error(self._path)
        return data


def mlx_bits(kind: str, keep_precision: bool) -> int | None:
    """Returns the number of bits in which MLX stores a tensor of this type; None: not quantised."""
    return _KEPT_BITS.get(kind) or (None if keep_precision else _REQUANTIZED_BITS.get(kind))


def convert_tensor(file: GgufFile, name: str, bits: int | None, dtype: str) -> MlxTensor:
    """Converts a tensor to `bits`, row by row; None: to `dtype` ("float16", "bfloat16" or "float32").

    Raises:
        ModelError: its type can't be read, or it holds numbers beyond half precision.
    """
    place = file.tensors[name]
    raw, step = file.read_tensor_bytes(name), max(1, _WEIGHTS_PER_PIECE // place.shape[-1])
    pieces = [raw[first : first + step] for first in range(0, len(raw), step)]
    if bits is None or len(place.shape) == 1:
        dense = np.concatenate([_dequantize(file, name, place.kind, rows).astype(dtype) for rows in pieces])
        return {"weight": dense.reshape(place.shape)}
    quantised = [_to_mlx(file, name, place.kind, rows, bits) for rows in pieces]
    parts = {part: np.concatenate([piece[part] for piece in quantised]) for part in quantised[0]}
    return {part: rows.reshape(*place.shape[:-1], -1) for part, rows in parts.items()}


def _pack_levels(levels: Bytes, bits: int) -> NDArray[np.uint32]:
    """Packs levels in `bits` bits each, lowest bits first, as MLX does."""
    if bits == 8:
        return levels.view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(levels[:, ::2] | levels[:, 1::2] << 4).view(np.uint32)
    single = np.unpackbits(levels[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(single.reshape(len(levels), -1), axis=-1, bitorder="little").view(np.uint32)


def quantize(weights: Floats, bits: int) -> MlxTensor:
    """Quantises weights on a uniform grid from the smallest to the largest weight of each group."""
    groups = weights.reshape(len(weights), -1, GROUP_SIZE)
    biases = groups.min(-1).astype(np.float16).astype(np.float32)
    scales = ((groups.max(-1) - biases) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    return _pack(weights, scales, biases, bits)


def _dequantize(file: GgufFile, name: str, kind: str, rows: Bytes) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: the tensor {name} is of type {kind}, which can't be read; choose a file with another"
            " quantisation, such as Q4_K_M or Q8_0"
        ) from None


def _to_mlx(file: GgufFile, name: str, kind: str, rows: Bytes, bits: int) -> MlxTensor:
    weights = _dequantize(file, name, kind, rows)
    if kind not in _KEPT_BITS:
        return quantize(weights, bits)
    with np.errstate(over="ignore", invalid="ignore"):
        scales, biases = _read_scales(kind, rows)
        is_finite = np.isfinite([scales.astype(np.float16), biases.astype(np.float16)]).all()
    if not is_finite:
        raise ModelError(f"{file.path}: the tensor {name} holds numbers beyond half precision; download the file again")
    return _pack(weights, scales, biases, bits)


def _read_scales(kind: str, rows: Bytes) -> tuple[Floats, Floats]:
    """Returns scale and bias of each group of 32 weights [rows, groups], for a type in `_KEPT_BITS`."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import Q4_K

    blocks = rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    scales, second = (np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32) for at in (0, 2))
    if kind.endswith("_K"):
        factors, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
        scales, biases = scales * factors, -second * minima
    else:
        biases = second if kind.endswith("_1") else -(2.0 ** (_KEPT_BITS[kind] - 1)) * scales
    return scales.reshape(len(rows), -1), biases.reshape(len(rows), -1)


def _pack(weights: Floats, scales: Floats, biases: Floats, bits: int) -> MlxTensor:
    """Returns the matrix of the levels q for which w = scale q + bias is nearest to each weight."""
    groups, steps = weights.reshape(*scales.shape, GROUP_SIZE), scales[..., None]
    levels = np.divide(groups - biases[..., None], steps, out=np.zeros_like(groups), where=steps != 0)
    levels = np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8)
    packed = _pack_levels(levels.reshape(weights.shape), bits)
    return {"weight": packed, "scales": scales.astype(np.float16), "biases": biases.astype(np.float16)}
