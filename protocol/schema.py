"""What a message field may hold, read from its type once: the codec, the documentation and the tests all build on this.

Knows dataclasses and the markers of `protocol.fields`; knows nothing of bytes or messages.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from outrider.protocol.fields import Array, OneOf, Range, Size

MAX_ITEMS = 2**16
MAX_CHARACTERS = 2**26


@dataclass(frozen=True, slots=True)
class Whole:
    """An int (never a bool) from `low` to `high`."""

    low: int = -(2**63)
    high: int = 2**63 - 1


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
class Word:
    """One of `words`."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """A numpy array, sent as a frame of its own."""

    array: Array


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
    """A dataclass inside a message."""

    cls: type[Any]


Shape = Whole | Real | Flag | String | Word | Raw | Many | Fixed | Maybe | Record

_PLAIN: dict[object, Shape] = {int: Whole(), float: Real(), bool: Flag(), str: String()}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its name, what it may hold and the type as it is written in the dataclass."""

    name: str
    shape: Shape
    written: str
    default: object = dataclasses.MISSING


def fields_of(cls: type[Any]) -> tuple[Field, ...]:
    """The fields of a dataclass in order. TypeError for a field type that no message may use."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        Field(field.name, shape_of(hints[field.name]), str(field.type), field.default)
        for field in dataclasses.fields(cls)
    )


def shape_of(hint: Any) -> Shape:
    """What a value of this type hint may be. TypeError when no shape is known for it."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _marked(arguments[0], arguments[1])
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
        case Range(low, high):
            return Whole(low, high)
        case OneOf(words):
            return Word(words)
        case Array():
            return Raw(marker)
        case Size(limit) if base is str:
            return String(limit)
        case Size(limit):
            return Many(shape_of(typing.get_args(base)[0]), limit)
    raise TypeError(f"{marker!r} marks no field type")
