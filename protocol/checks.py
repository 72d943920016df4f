"""One checking function a field, compiled when the protocol is imported, for each direction.

`loader` turns what msgpack read into a dataclass, `dumper` a dataclass into what msgpack writes. Both hold every value
to its shape and raise ProtocolError with the field's place, the value and what was expected. Array bytes are taken
from, or appended to, the raw frames in field order.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np

from outrider.protocol.errors import ProtocolError
from outrider.protocol.fields import Array
from outrider.protocol.schema import Fixed, Flag, Many, Maybe, Raw, Real, Record, Shape, String, Whole, Word, fields_of

Buffer: TypeAlias = bytes | memoryview
Check: TypeAlias = Callable[[Any, Any], Any]
"""(value, raw frames) -> value. The frames are an iterator when loading, a list to append to when dumping."""

MAX_AXIS = 2**24
_EXACT = 2**53  # whole numbers up to here are floats without loss
_view = reprlib.Repr()
_view.maxstring = _view.maxother = 60


@dataclass(frozen=True, slots=True)
class _Direction:
    """What differs between loading and dumping; every other check is the same."""

    record: Callable[[type[Any], str], Check]
    array: Callable[[Array, str], Check]


def loader(cls: type[Any]) -> Check:
    """Checks a dict read by msgpack (tuples for arrays) and returns the `cls` it says."""
    return _load_record(cls, cls.__name__)


def dumper(cls: type[Any]) -> Check:
    """Checks a `cls` and returns the dict that says it."""
    return _dump_record(cls, cls.__name__)


def wrong(place: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"{place} is {_view.repr(value)}; expected {expected}")


def _compile(shape: Shape, place: str, direction: _Direction) -> Check:
    match shape:
        case Whole(low, high):
            return _whole(low, high, place)
        case Real():
            return _real(place)
        case Flag():
            return _flag(place)
        case String(limit):
            return _string(limit, place)
        case Word(words):
            return _word(frozenset(words), place)
        case Raw(array):
            return direction.array(array, place)
        case Many(item, limit):
            return _many(_compile(item, f"{place}[]", direction), limit, place)
        case Fixed(items):
            return _fixed([_compile(item, f"{place}[{i}]", direction) for i, item in enumerate(items)], place)
        case Maybe(inner):
            return _maybe(_compile(inner, place, direction))
        case Record(cls):
            return direction.record(cls, place)


def _whole(low: int, high: int, place: str) -> Check:
    def check(value: Any, _frames: Any) -> Any:
        if type(value) is int and low <= value <= high:  # `type`, because a bool is an int
            return value
        raise wrong(place, value, f"a whole number from {low} to {high}")

    return check


def _real(place: str) -> Check:
    def check(value: Any, _frames: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if type(value) is int and -_EXACT <= value <= _EXACT:
            return float(value)
        raise wrong(place, value, "a finite number")

    return check


def _flag(place: str) -> Check:
    def check(value: Any, _frames: Any) -> Any:
        if type(value) is bool:
            return value
        raise wrong(place, value, "true or false")

    return check


def _string(limit: int, place: str) -> Check:
    def check(value: Any, _frames: Any) -> Any:
        if type(value) is str and len(value) <= limit:
            return value
        raise wrong(place, value, f"text of at most {limit} characters")

    return check


def _word(words: frozenset[str], place: str) -> Check:
    def check(value: Any, _frames: Any) -> Any:
        if type(value) is str and value in words:
            return value
        raise wrong(place, value, f"one of {', '.join(sorted(words))}")

    return check


def _many(item: Check, limit: int, place: str) -> Check:
    def check(value: Any, frames: Any) -> Any:
        if type(value) is tuple and len(value) <= limit:
            return tuple(map(item, value, repeat(frames)))
        raise wrong(place, value, f"a sequence of at most {limit} items")

    return check


def _fixed(items: list[Check], place: str) -> Check:
    def check(value: Any, frames: Any) -> Any:
        if type(value) is tuple and len(value) == len(items):
            return tuple(item(one, frames) for item, one in zip(items, value, strict=True))
        raise wrong(place, value, f"exactly {len(items)} items")

    return check


def _maybe(inner: Check) -> Check:
    def check(value: Any, frames: Any) -> Any:
        return None if value is None else inner(value, frames)

    return check


def _load_record(cls: type[Any], place: str) -> Check:
    checks = [(field.name, _compile(field.shape, f"{place}.{field.name}", _LOAD)) for field in fields_of(cls)]
    names = frozenset(name for name, _ in checks)

    def load(value: Any, frames: Iterator[Buffer]) -> Any:
        if type(value) is not dict:
            raise wrong(place, value, f"the fields of a {cls.__name__}")
        if value.keys() != names:
            raise _other_fields(place, value.keys(), names)
        return cls(*[check(value[name], frames) for name, check in checks])

    return load


def _other_fields(place: str, found: Any, names: frozenset[str]) -> ProtocolError:
    missing = ", ".join(sorted(names - found)) or "none"
    unknown = ", ".join(_view.repr(name) for name in sorted(found - names, key=repr)[:8]) or "none"
    return ProtocolError(f"{place} has other fields than this version knows: missing {missing}; unknown {unknown}")


def _dump_record(cls: type[Any], place: str) -> Check:
    checks = [(field.name, _compile(field.shape, f"{place}.{field.name}", _DUMP)) for field in fields_of(cls)]

    def dump(value: Any, frames: list[Buffer]) -> Any:
        if type(value) is not cls:
            raise wrong(place, value, f"a {cls.__name__}")
        return {name: check(getattr(value, name), frames) for name, check in checks}

    return dump


def _load_array(array: Array, place: str) -> Check:
    wire = np.dtype(array.dtype).newbyteorder("<")
    expected = f"a {_kind(array)} as (dtype, shape)"

    def load(value: Any, frames: Iterator[Buffer]) -> Any:
        described = type(value) is tuple and len(value) == 2 and value[0] == array.dtype
        if not described or not _is_shape(value[1], array.axes):
            raise wrong(place, value, expected)
        raw = next(frames, None)
        if raw is None:
            raise ProtocolError(f"{place} has no frame; expected its bytes in a frame of their own")
        size = memoryview(raw).nbytes
        if size != math.prod(value[1]) * wire.itemsize:
            raise ProtocolError(f"{place} has {size} bytes; expected {_kind(array)} of shape {value[1]}")
        loaded = np.frombuffer(raw, wire).reshape(value[1])
        _check_items(loaded, array, place)
        return loaded

    return load


def _dump_array(array: Array, place: str) -> Check:
    wire = np.dtype(array.dtype).newbyteorder("<")

    def dump(value: Any, frames: list[Buffer]) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype != array.dtype or not _is_shape(value.shape, array.axes):
            raise wrong(place, value, f"a {_kind(array)}")
        _check_items(value, array, place)
        frames.append(np.ascontiguousarray(value, wire).reshape(-1).view(np.uint8).data)
        return array.dtype, value.shape

    return dump


def _is_shape(value: Any, axes: int) -> bool:
    return (
        type(value) is tuple
        and len(value) == axes
        and all(type(length) is int and 0 <= length <= MAX_AXIS for length in value)
    )


def _check_items(value: np.ndarray[Any, Any], array: Array, place: str) -> None:
    if array.low is not None and value.size and value.min() < array.low:
        raise ProtocolError(f"{place} holds {value.min()}; expected no number under {array.low}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ProtocolError(f"{place} holds a number that is not finite; expected finite numbers")


def _kind(array: Array) -> str:
    return f"{array.dtype} array with {array.axes} axes, none longer than {MAX_AXIS}"


_LOAD = _Direction(_load_record, _load_array)
_DUMP = _Direction(_dump_record, _dump_array)
