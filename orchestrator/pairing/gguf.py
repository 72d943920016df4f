"""Reads GGUF files: the header, the places of the tensors, and blocks as MLX's quantised matrices.

`GgufFile`: the metadata and the place of each tensor. Every length is checked against the file's size before it is
used, so a truncated or foreign file ends in an error of one sentence. Knows the container and its block types; knows
no architecture and no tokenizer.

`Parts`: a tensor in MLX's form: levels, scales and biases in groups of 32, w = scale q + bias. Q4_0, Q4_1, Q5_0, Q5_1
and Q8_0 keep their exact numbers. Q4_K and Q5_K keep their levels; the scale and minimum of a group, products of two
numbers in the file, are rounded to half precision. Other block types have no such form (groups of 16, curves): they are
quantised again, with two bits more than they had, or kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias

import ml_dtypes  # noqa: F401  (gives numpy the dtype bfloat16)
import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

Value: TypeAlias = "bool | int | float | str | list[str] | NDArray[np.generic]"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorPlace:
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
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._of(key, default, int, "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number; a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
        return float(self._of(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._of(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._of(key, default, str, "a text"))

    def texts(self, key: str) -> list[str]:
        texts: list[str] = self._of(key, None, list, "a list of texts")
        return texts

    def numbers(self, key: str) -> NDArray[np.generic] | None:
        """Returns the list, or None if there is no such key."""
        if key not in self.metadata:
            return None
        numbers: NDArray[np.generic] = self._of(key, None, np.ndarray, "a list of numbers")
        return numbers

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Reads a tensor's bytes [rows, bytes of a row], where the last dimension of the tensor is a row."""
        place = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, place.size, offset=place.offset)
        if len(data) < place.size:
            raise cut_short(self.path)
        return data.reshape(prod(place.shape[:-1]), -1)

    def _of(self, key: str, default: Value | None, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} has no {key} in its metadata; choose another file of this model")
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(f"{self.path}: {key} is {_describe(value)}; expected {expected}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a file.

    Raises:
        ModelError: the file is no GGUF file, is truncated, or has unknown types.
    """
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None


def cut_short(path: Path) -> ModelError:
    return ModelError(f"{path} is truncated; download it again")


class _Header:
    """Reads a header once, from its first byte to its last."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> GgufFile:
        if self._file.read(4) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: its first four bytes are not GGUF")
        version = self._number(4)
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; expected version 2 or 3, in little-endian byte order"
            )
        tensors, keys = self._number(8), self._number(8)
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._number(4), key)
        places = dict(self._tensor() for _ in range(tensors))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            described = _describe(alignment)
            raise ModelError(f"{self._path}: general.alignment is {described}; expected a whole number above 0")
        start = -(-self._file.tell() // alignment) * alignment
        placed = {name: replace(place, offset=start + place.offset) for name, place in places.items()}
        if any(place.offset + place.size > self._size for place in placed.values()):
            raise cut_short(self._path)
        return GgufFile(self._path, metadata, placed)

    def _tensor(self) -> tuple[str, TensorPlace]:
        """Reads a tensor's name and place, whose offset is from the end of the header."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # deferred: takes half a second

        name, dimensions = self._string(), self._number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: the tensor {name} has {dimensions} dimensions; expected 1 to 4")
        shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
        if not all(shape) or prod(shape) > 8 * self._size:  # every type has at least one bit for each number
            raise ModelError(f"{self._path} is too small for the tensor {name} of shape {shape}")
        number, offset = self._number(4), self._number(8)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self._path}: the tensor {name} has the unknown type {number}") from None
        block, width = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{self._path}: the tensor {name} has rows of {shape[-1]} numbers; expected a multiple of {block}"
            )
        return name, TensorPlace(shape, kind.name, offset, prod(shape) // block * width)

    def _value(self, kind: int, key: str) -> Value:
        from gguf import GGUFReader, GGUFValueType

        numbers = {int(known): number for known, number in GGUFReader.gguf_scalar_to_np.items()}
        if kind in numbers:
            number = self._numbers(numbers[kind], 1)[0]
            return float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            raise ModelError(f"{self._path}: {key} has the unknown type {kind}")
        inner, count = self._number(4), self._number(8)
        if inner == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        if inner not in numbers:
            raise ModelError(f"{self._path}: {key} is a list of the unknown type {inner}")
        return self._numbers(numbers[inner], count)

    def _numbers(self, kind: type[np.generic], count: int) -> NDArray[np.generic]:
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(self._take(dtype.itemsize * count), dtype)

    def _number(self, size: int) -> int:
        """Reads an unsigned number of `size` bytes."""
        return int.from_bytes(self._take(size), "little")

    def _string(self) -> str:
        data = self._take(self._number(8))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self._path} holds a text that is not UTF-8; download it again") from None

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) < count:
            raise cut_short(self._path)
        return data


def _describe(value: Value) -> str:
    """Describes a value for a message, without the contents of lists."""
    if isinstance(value, list):
        return "a list of texts"
    if isinstance(value, np.ndarray):
        return "a list of numbers"
    return f"the text {value[:40]!r}" if isinstance(value, str) else repr(value)


GROUP = 32
PLAIN = ("F32", "F16", "BF16")
_AT_ONCE = 2**24
"""Weights unpacked at a time: each takes about ten bytes meanwhile."""
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


Parts: TypeAlias = "dict[str, NDArray[Any]]"
"""A tensor as MLX stores it: `weight`; if it is quantised, packed, and `scales` and `biases`, a float16 per group."""


def bits_of(kind: str, keep_precision: bool) -> int | None:
    """Returns the bits in which MLX holds a type of the file; None: not quantised."""
    if kind in _GRIDS:
        return _GRIDS[kind][0]
    return None if keep_precision or kind in PLAIN else _ANEW.get(kind)


def convert(file: GgufFile, name: str, bits: int | None, dtype: str) -> Parts:
    """Converts a tensor of one or two dimensions to `bits`; None: to `dtype` ("float16", "bfloat16" or "float32").

    Raises:
        ModelError: its type can't be read, or it holds numbers beyond half precision.
    """
    place = file.tensors[name]
    pieces = _pieces(file.bytes_of(name), place.shape)
    if bits is None or len(place.shape) == 1:
        dense = np.concatenate([_dense(file, name, place.kind, rows).astype(dtype) for rows in pieces])
        return {"weight": dense.reshape(place.shape)}
    quantised = [_quantised(file, name, place.kind, rows, bits) for rows in pieces]
    return {part: np.concatenate([piece[part] for piece in quantised]) for part in quantised[0]}


def _packed(levels: Bytes, bits: int) -> NDArray[np.uint32]:
    """Packs levels in `bits` bits each, lowest bits first, as MLX does."""
    if bits == 8:
        return levels.view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(levels[:, ::2] | levels[:, 1::2] << 4).view(np.uint32)
    single = np.unpackbits(levels[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(single.reshape(len(levels), -1), axis=-1, bitorder="little").view(np.uint32)


def requantized(weights: Floats, bits: int) -> Parts:
    """Quantises weights on an even grid from the least to the greatest weight of each group."""
    groups = weights.reshape(len(weights), -1, GROUP)
    biases = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - biases.astype(np.float32)) / (2**bits - 1)).astype(np.float16)
    step, least = scales.astype(np.float32)[..., None], biases.astype(np.float32)[..., None]
    levels = np.divide(groups - least, step, out=np.zeros_like(groups), where=step > 0)
    levels = np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8)
    return {"weight": _packed(levels.reshape(weights.shape), bits), "scales": scales, "biases": biases}


def _pieces(raw: Bytes, shape: tuple[int, ...]) -> Iterator[Bytes]:
    rows = max(1, _AT_ONCE // shape[-1])
    for first in range(0, len(raw), rows):
        yield raw[first : first + rows]


def _dense(file: GgufFile, name: str, kind: str, rows: Bytes) -> Floats:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: the tensor {name} is of type {kind}, which can't be read; choose a file with another"
            " quantization, such as Q4_K_M or Q8_0"
        ) from None


def _quantised(file: GgufFile, name: str, kind: str, rows: Bytes, bits: int) -> Parts:
    if kind not in _GRIDS:
        return requantized(_dense(file, name, kind, rows), bits)
    width = _GRIDS[kind][1]
    with np.errstate(over="ignore", invalid="ignore"):
        levels, scales, biases = _GRIDS[kind][2](rows.reshape(-1, width))
        halves = [part.astype(np.float16).reshape(len(rows), -1) for part in (scales, biases)]
    if not all(np.isfinite(part).all() for part in halves):
        raise ModelError(f"{file.path}: the tensor {name} holds numbers beyond half precision; download the file again")
    return {"weight": _packed(levels.reshape(len(rows), -1), bits), "scales": halves[0], "biases": halves[1]}


_Unpacked = tuple[Bytes, Floats, Floats]


def _half(blocks: Bytes, first: int) -> Floats:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed_bytes: Bytes) -> Bytes:
    """Unpacks ggml's order in a block: all low halves, then all high halves."""
    return np.concatenate([packed_bytes & np.uint8(15), packed_bytes >> np.uint8(4)], axis=-1)


def _of_32(blocks: Bytes, bits: int, has_bias: bool) -> _Unpacked:
    """Unpacks a block of 32 weights: its scale, its bias if it has one, the fifth bits if it has them, nibbles."""
    at, scale = 4 if has_bias else 2, _half(blocks, 0)
    levels = _nibbles(blocks[:, at + 4 * (bits == 5) :])
    if bits == 5:
        levels |= np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << np.uint8(4)
    return levels, scale, _half(blocks, 2) if has_bias else -(2.0 ** (bits - 1)) * scale


def _q8_0(blocks: Bytes) -> _Unpacked:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Returns scale and bias of each of the eight groups in a block of 256."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _k_nibbles(packed_bytes: Bytes) -> Bytes:
    """Unpacks groups of which two share 32 bytes: one in the low halves, the next in the high halves."""
    return _nibbles(packed_bytes.reshape(-1, 32)).reshape(len(packed_bytes), 256)


def _q4_k(blocks: Bytes) -> _Unpacked:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> _Unpacked:
    group_bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> group_bits & np.uint8(1)).reshape(len(blocks), 256) << np.uint8(4)
    return _k_nibbles(blocks[:, 48:]) | fifth, *_k_scales(blocks)


_GRIDS: dict[str, tuple[int, int, Callable[[Bytes], _Unpacked]]] = {
    "Q4_0": (4, 18, partial(_of_32, bits=4, has_bias=False)),
    "Q4_1": (4, 20, partial(_of_32, bits=4, has_bias=True)),
    "Q5_0": (5, 22, partial(_of_32, bits=5, has_bias=False)),
    "Q5_1": (5, 24, partial(_of_32, bits=5, has_bias=True)),
    "Q8_0": (8, 34, _q8_0),
    "Q4_K": (4, 144, _q4_k),
    "Q5_K": (5, 176, _q5_k),
}
"""Types that MLX's form can hold: bits, bytes per block, and the function that unpacks blocks."""
_ANEW = {
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), 4),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S"), 5),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"), 6),
    "Q6_K": 8,
}
"""All other types, and the bits in which they are quantised again."""
