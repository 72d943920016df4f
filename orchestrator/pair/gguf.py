"""A GGUF file's header: what the file says of its model, and where each tensor lies in it.

Every length is checked against the file before it is believed, so a file that is cut short or is something else ends in
one sentence. Knows the container and the types of its blocks; knows no architecture and no tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError

Value: TypeAlias = "bool | int | float | str | list[str] | NDArray[np.generic]"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape` in the order of numpy; `kind` is ggml's name of its type; `offset`: from the file's beginning."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The description in a GGUF file, and its tensors by name. The getters raise ModelError for what is missing or of
    another type than asked for."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._of(key, default, "a whole number", lambda value: isinstance(value, int))
        return int(value)  # type: ignore[arg-type]

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 comes as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
        value = self._of(key, default, "a number", lambda value: isinstance(value, int | float))
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self._of(key, default, "true or false", lambda value: value in (True, False), of=(bool,))
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._of(key, default, "a text", lambda value: isinstance(value, str)))

    def texts(self, key: str) -> list[str]:
        value = self._of(key, None, "a list of texts", lambda value: isinstance(value, list))
        return value  # type: ignore[return-value]

    def numbers(self, key: str) -> NDArray[np.generic] | None:
        """None: there is no such key."""
        if key not in self.metadata:
            return None
        value = self._of(key, None, "a list of numbers", lambda value: isinstance(value, np.ndarray))
        return value  # type: ignore[return-value]

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """A tensor as it lies in the file: a row of bytes for each row of the tensor."""
        place = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(place.offset)
            found = file.read(place.size)
        if len(found) < place.size:
            raise cut_short(self.path)
        rows = prod(place.shape[:-1])
        return np.frombuffer(found, np.uint8).reshape(rows, -1)

    def _of(
        self,
        key: str,
        default: Value | None,
        expected: str,
        fits: Callable[[Value], bool],
        of: tuple[type, ...] = (),
    ) -> Value:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} does not say {key}; choose another file of this model")
        if not fits(value) or isinstance(value, bool) is not (bool in of):
            raise ModelError(f"{self.path}: {key} is {_named(value)}; expected {expected}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """The header of a file.

    Raises:
        ModelError: it is no GGUF file, is cut short, or has types that are not known here.
    """
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None


def cut_short(path: Path) -> ModelError:
    return ModelError(f"{path} is incomplete: it ends before its contents do; download it again")


class _Header:
    """One reading of a header, from its first byte to its last."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def read(self) -> GgufFile:
        if self._file.read(4) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: its first four bytes are not GGUF")
        version = self._number("<u4")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; expected version 2 or 3, of a little-endian machine"
            )
        tensors, keys = self._number("<u8"), self._number("<u8")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._number("<u4"), key)
        places = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise ModelError(f"{self._path}: general.alignment is {_named(alignment)}; expected a whole number above 0")
        start = -(-self._file.tell() // alignment) * alignment
        return GgufFile(self._path, metadata, {name: self._placed(name, start, place) for name, place in places})

    def _placed(self, name: str, start: int, place: tuple[tuple[int, ...], int, int]) -> TensorPlace:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # deferred: takes half a second

        shape, number, offset = place
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self._path}: the tensor {name} has the unknown type {number}") from None
        block, width = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{self._path}: the tensor {name} has rows of {shape[-1]}, which no blocks of {block} fill"
            )
        size = prod(shape) // block * width
        if start + offset + size > self._size:
            raise cut_short(self._path)
        return TensorPlace(shape, kind.name, start + offset, size)

    def _tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, dimensions = self._string(), self._number("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: the tensor {name} has {dimensions} dimensions; expected 1 to 4")
        shape = tuple(self._number("<u8") for _ in range(dimensions))
        if not all(shape) or prod(shape) > 8 * self._size:  # no type has less than a bit a number
            raise ModelError(
                f"{self._path}: the tensor {name} has the shape {shape[::-1]}, for which the file is too small"
            )
        return name, (shape[::-1], self._number("<u4"), self._number("<u8"))

    def _value(self, kind: int, key: str) -> Value:
        if kind in _NUMBERS:
            found = self._numbers(_NUMBERS[kind], 1)[0]
            return float(str(found)) if kind == 6 else found.item()
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"{self._path}: {key} has the unknown type {kind}")
        inner, count = self._number("<u4"), self._number("<u8")
        if inner == _STRING:
            self._need(8 * count)
            return [self._string() for _ in range(count)]
        if inner not in _NUMBERS:
            raise ModelError(f"{self._path}: {key} is a list of the unknown type {inner}")
        return self._numbers(_NUMBERS[inner], count)

    def _numbers(self, kind: str, count: int) -> NDArray[np.generic]:
        return np.frombuffer(self._take(np.dtype(kind).itemsize * count), kind)

    def _number(self, kind: str) -> int:
        return int(struct.unpack("<I" if kind == "<u4" else "<Q", self._take(4 if kind == "<u4" else 8))[0])

    def _string(self) -> str:
        found = self._take(self._number("<u8"))
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self._path} holds a text that is not UTF-8; download it again") from None

    def _take(self, count: int) -> bytes:
        self._need(count)
        found = self._file.read(count)
        if len(found) < count:
            raise cut_short(self._path)
        return found

    def _need(self, count: int) -> None:
        if count > self._size:
            raise cut_short(self._path)


def _named(value: Value) -> str:
    """What a value is, for a message: lists may be long."""
    if isinstance(value, list):
        return "a list of texts"
    if isinstance(value, np.ndarray):
        return "a list of numbers"
    return f"the text {value[:40]!r}" if isinstance(value, str) else repr(value)
