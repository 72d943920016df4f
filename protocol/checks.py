"""Two functions a message, one for each direction, written out from its field types as `dataclasses` writes `__init__`.

`loader` turns what msgpack read into a dataclass, `dumper` a dataclass into what msgpack writes. Both hold every value
to its shape and raise ProtocolError with its place, the value and what was expected. Array bytes are taken from, or
appended to, the raw frames in field order.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, count
from typing import Any, TypeAlias

import numpy as np

from outrider.protocol.arrays import read_array, write_array
from outrider.protocol.errors import ProtocolError
from outrider.protocol.fields import Array, OneOf, Range
from outrider.protocol.schema import MAX_AXIS, Fixed, Flag, Many, Maybe, Real, Record, Shape, String, fields_of, words

Check: TypeAlias = Callable[[Any, Any], Any]
"""(value, raw frames) -> value. The frames are an iterator when loading, a list to append to when dumping."""

_EXACT = 2**53  # whole numbers up to here are floats without loss
_view = reprlib.Repr()
_view.maxstring = _view.maxother = 60


def wrong(place: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"{place} is {_view.repr(value)}; expected {expected}")


@cache
def loader(cls: type) -> Check:
    """Checks what msgpack read of a `cls`, a tuple of its fields, and returns the `cls`."""
    return _Writer(loads=True).function(cls)


@cache
def dumper(cls: type) -> Check:
    """Checks a `cls` and returns the tuple of its fields."""
    return _Writer(loads=False).function(cls)


class _Writer:
    """Writes one function. `_known` is what its code refers to; all else are its own variables."""

    def __init__(self, loads: bool) -> None:
        self._loads = loads
        self._numbers = count()
        self._known: dict[str, Any] = {
            "wrong": wrong, "isfinite": math.isfinite, "new": object.__new__, "ndarray": np.ndarray,
            "read_array": read_array, "write_array": write_array,
        }  # fmt: skip

    def function(self, cls: type) -> Check:
        code = self._code(Record(cls), "value", cls.__name__)
        exec("\n ".join(["def function(value, frames):", *code, "return value"]), self._known)
        function: Check = self._known["function"]
        return function

    def _code(self, shape: Shape, value: str, place: str) -> list[str]:
        """The lines that hold the variable `value` to its shape and put into it what the other side has for it."""
        if isinstance(shape, Maybe):
            return [f"if {value} is not None:", *_indented(self._code(shape.inner, value, place))]
        expected = words(shape)
        if isinstance(shape, Record) and self._loads:
            expected += f": {', '.join(fields_of(shape.cls))}"
        refused = f"raise wrong({place!r}, {value}, {expected!r})"
        return [f"if not ({self._outline(shape, value)}): {refused}", *self._inside(shape, value, place)]

    def _outline(self, shape: Shape, value: str) -> str:
        """What must hold of a value before one looks into it."""
        match shape:
            case Range(low, high):  # `type`, because a bool is an int
                return f"type({value}) is int and {low} <= {value} <= {high}"
            case Real():
                exact = f"type({value}) is int and {-_EXACT} <= {value} <= {_EXACT}"
                return f"isinstance({value}, float) and isfinite({value}) or {exact}"
            case Flag():
                return f"type({value}) is bool"
            case String(limit):
                return f"type({value}) is str and len({value}) <= {limit}"
            case OneOf(choices):
                return f"type({value}) is str and {value} in {choices}"
            case Many(_, limit):
                return f"type({value}) is tuple and len({value}) <= {limit}"
            case Fixed(items):
                return f"type({value}) is tuple and len({value}) == {len(items)}"
            case Record(cls) if self._loads:
                return f"type({value}) is tuple and len({value}) == {len(fields_of(cls))}"
            case Record(cls):
                return f"type({value}) is {self._name(cls)}"
            case Array(dtype, axes) if self._loads:
                described = f"type({value}) is tuple and len({value}) == 2 and {value}[0] == {dtype!r}"
                return f"{described} and {_sized(f'{value}[1]', axes)}"
            case Array(dtype, axes):
                kind = f"isinstance({value}, ndarray) and {value}.dtype == {self._name(np.dtype(dtype))}"
                return f"{kind} and {_sized(f'{value}.shape', axes)}"
        raise TypeError(f"{shape} has no outline")

    def _inside(self, shape: Shape, value: str, place: str) -> list[str]:
        """The lines for what is in a value whose outline is right."""
        match shape:
            case Real():
                return [f"{value} = float({value})"]
            case Many(item):
                return self._items(item, value, place)
            case Fixed(items):
                places = [f"{place}[{i}]" for i in range(len(items))]
                parts, code = self._parts(items, places)
                return [f"[{', '.join(parts)}] = {value}", *code, f"{value} = {_tuple(parts)}"]
            case Record(cls):
                fields = fields_of(cls)
                parts, code = self._parts(list(fields.values()), [f"{place}.{name}" for name in fields])
                if self._loads:
                    return [f"[{', '.join(parts)}] = {value}", *code, *self._made(cls, value, parts)]
                read = [f"{part} = {value}.{name}" for part, name in zip(parts, fields, strict=True)]
                return [*read, *code, f"{value} = {_tuple(parts)}"]
            case Array() if self._loads:
                return [f"{value} = read_array({value}[1], {self._name(shape)}, {place!r}, frames)"]
            case Array():
                return [f"{value} = write_array({value}, {self._name(shape)}, {place!r}, frames)"]
        return []

    def _items(self, item: Shape, value: str, place: str) -> list[str]:
        one, found = self._variable(), self._variable()
        loop = [f"for {one} in {value}:", *_indented(self._code(item, one, f"{place}[]"))]
        if _is_kept(item):
            return loop
        return [f"{found} = []", *loop, f" {found}.append({one})", f"{value} = tuple({found})"]

    def _parts(self, shapes: Sequence[Shape], places: Sequence[str]) -> tuple[list[str], list[str]]:
        """A variable for each part, and the lines for all of them."""
        parts = [self._variable() for _ in shapes]
        codes = map(self._code, shapes, parts, places)
        return parts, list(chain.from_iterable(codes))

    def _made(self, cls: type, value: str, parts: Sequence[str]) -> list[str]:
        """The lines that make a `cls` of its fields: a frozen dataclass's own `__init__` takes twice the time."""
        if hasattr(cls, "__post_init__"):
            return [f"{value} = {self._name(cls)}{_tuple(parts)}"]
        setters = [self._name(cls.__dict__[name].__set__) for name in fields_of(cls)]
        sets = [f"{setter}({value}, {part})" for setter, part in zip(setters, parts, strict=True)]
        return [f"{value} = new({self._name(cls)})", *sets]

    def _variable(self) -> str:
        return f"v{next(self._numbers)}"

    def _name(self, known: object) -> str:
        """A name by which the code may refer to this."""
        name = f"k{next(self._numbers)}"
        self._known[name] = known
        return name


def _indented(code: Sequence[str]) -> list[str]:
    return [f" {line}" for line in code]


def _tuple(parts: Sequence[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _is_kept(shape: Shape) -> bool:
    """Whether values of this shape are the same on both sides."""
    match shape:
        case Many(inner) | Maybe(inner):
            return _is_kept(inner)
    return isinstance(shape, Range | Flag | String | OneOf)


def _sized(value: str, axes: int) -> str:
    lengths = "".join(f" and type({value}[{i}]) is int and 0 <= {value}[{i}] <= {MAX_AXIS}" for i in range(axes))
    return f"type({value}) is tuple and len({value}) == {axes}{lengths}"
