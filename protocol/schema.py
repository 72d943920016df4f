"""What a message field may hold, read from its type once: the codec, the documentation and the tests all build on this.

Knows dataclasses and the markers of `protocol.fields`, some of which are shapes; knows nothing of bytes or messages.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from outrider.protocol.fields import Array, OneOf, Range, Size

MAX_ITEMS = 2**16
MAX_CHARACTERS = 2**26
MAX_AXIS = 2**24


@dataclass(frozen=True, slots=True)
class Real:
    """A finite float; an int stands for the float of the same value."""


@dataclass(frozen=True, slots=True)
class Flag:
    """True or False."""


@dataclass(frozen=True, slots=True)
class String:
    """At most `limit` characters."""

    limit: int = MAX_CHARACTERS


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of at most `limit` items of one shape."""

    item: Shape
    limit: int = MAX_ITEMS


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tuple with one item of each shape."""

    items: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """None, or `inner`."""

    inner: Shape


@dataclass(frozen=True, slots=True)
class Record:
    """A message, or a dataclass inside one."""

    cls: type


Shape = Range | Real | Flag | String | OneOf | Array | Many | Fixed | Maybe | Record

_PLAIN: dict[object, Shape] = {int: Range(), float: Real(), bool: Flag(), str: String()}


@cache
def fields_of(cls: type) -> dict[str, Shape]:
    """What each field of a dataclass may hold, in order. TypeError for a field type that no message may use."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: shape_of(hints[field.name]) for field in dataclasses.fields(cls)}


def shape_of(hint: Any) -> Shape:
    """What a value of this type hint may be. TypeError when no shape is known for it."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _marked(*arguments)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return Maybe(shape_of(arguments[0]))
    if origin is tuple and arguments[-1] is Ellipsis:
        return Many(shape_of(arguments[0]))
    if origin is tuple:
        return Fixed(tuple(shape_of(argument) for argument in arguments))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Record(hint)
    raise TypeError(f"no message field may be a {hint!r}; see protocol.fields for what it may be")


def _marked(base: Any, marker: object) -> Shape:
    match marker:
        case Range() | OneOf() | Array():
            return marker
        case Size(limit) if isinstance(sized := shape_of(base), String | Many):
            return dataclasses.replace(sized, limit=limit)
    raise TypeError(f"{marker!r} marks no field type")


def words(shape: Shape) -> str:
    """What a value of this shape is, as errors and the documentation put it."""
    match shape:
        case Range(low, high):
            return f"a whole number from {_power(low)} to {_power(high)}"
        case Real():
            return "a finite number"
        case Flag():
            return "true or false"
        case String(limit):
            return f"text of at most {limit:,} characters"
        case OneOf(choices):
            return f"one of {', '.join(choices)}"
        case Array(dtype, axes, low):
            sign = "" if low is None else f", none under {low}"
            return f"an array of {dtype}, {axes} {'axis' if axes == 1 else 'axes'} of at most {MAX_AXIS:,}{sign}"
        case Many(item, limit):
            return f"at most {limit:,} of: {words(item)}"
        case Fixed(items):
            return f"({'; '.join(map(words, items))})"
        case Maybe(inner):
            return f"nil, or {words(inner)}"
        case Record(cls):
            return f"a {cls.__name__}"


def _power(value: int) -> str:
    """2^31-1 rather than 2147483647."""
    for bits in (31, 63):
        if value == 2**bits - 1:
            return f"2^{bits}-1"
        if value == -(2**bits):
            return f"-2^{bits}"
    return f"{value:,}"
