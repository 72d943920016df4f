"""The types of message fields, with their ranges and sizes.

The codec, the documentation and the tests are derived from them; the codec enforces ranges and sizes for senders, too.
Knows dataclasses; knows nothing of bytes or messages.

`Logprobs`: log-probabilities of tokens, in Outcome and in chunks of requests that asked for them. `Origin`: where a
committed token came from, a number for each token of a chunk.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Annotated, Any

import numpy as np


class Origin(IntEnum):
    """Where a token came from. All but TARGET were drafted and accepted: `draft_n_accepted` counts them."""

    TARGET = 0
    """The target: plain decoding, or the bonus token after the accepted part of a chain."""
    PREPARED = 1
    """A branch that was drafted for this outcome before it was known."""
    DRAFTED = 2
    """A draft worker, just in time, once the tokens before it were known."""
    COPIED = 3
    """The text itself: what followed the same n-gram before."""
    HEAD = 4
    """A head that reads the target, in its process, just in time."""
    GUESSED = 5
    """An alternative to a chain's token, which its drafter ranked next best."""


@dataclass(frozen=True, slots=True)
class Range:
    """A whole number (never a bool) from `low` to `high`, both included."""

    low: int = -(2**63)
    high: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Size:
    """A string or a sequence of at most `limit` characters or items."""

    limit: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array of this dtype and number of axes, sent as a raw frame; `low`: the least allowed item."""

    dtype: str
    axes: int
    low: int | None = None


MAX_TOKENS = 2**24
MAX_FRAME = 2**26
"""Bytes of a frame: `MAX_TOKENS` tokens. A peer that announces more is disconnected before memory is allocated."""
# Usually a chain and its bonus token; more if a drafter was left out for a while.
MAX_COMMIT = 4096
MAX_CHAIN = 64
MAX_BESIDE = 16
MAX_BRANCHES = 1024

Token = Annotated[int, Range(0, 2**31 - 1)]
Count = Annotated[int, Range(0, 2**31 - 1)]
Serial = Annotated[int, Range(0, 2**63 - 1)]
Nanoseconds = Annotated[int, Range(0, 2**63 - 1)]
Depth = Annotated[int, Range(0, MAX_CHAIN)]
"""The number of tokens of a chain, bounded to bound a worker's work."""
Breadth = Annotated[int, Range(0, MAX_BRANCHES)]
"""The number of branches."""
RequestId = Annotated[str, Size(64)]
Name = Annotated[str, Size(4096)]
ClientName = Annotated[str, Size(64)]
Text = Annotated[str, Size(2**26)]
Chain = Annotated[tuple[Token, ...], Size(MAX_CHAIN)]
Node = Annotated[int, Range(-1, MAX_CHAIN - 1)]
"""A token of a tree or a chain by its index; -1: the text before them."""
Parents = Annotated[tuple[Node, ...], Size(MAX_CHAIN)]
"""The parents of a tree (`protocol.trees`): the node that each token follows, or -1; (): the tokens are a chain."""
Path = Annotated[tuple[Annotated[int, Range(0, MAX_CHAIN - 1)], ...], Size(MAX_CHAIN)]
"""Nodes of a tree, from the text down."""
Final = Annotated[tuple[Token, ...], Size(MAX_CHAIN + 1)]
"""A commit: the accepted tokens of a chain, then the bonus token."""
Committed = Annotated[tuple[Token, ...], Size(MAX_COMMIT)]
ChunkTokens = Annotated[tuple[Token, ...], Size(2**16)]
"""The tokens of a chunk, in the header: to a client that was asleep, an array costs as much as the rest."""
Tokens = Annotated[np.ndarray[Any, np.dtype[np.int32]], Array("int32", 1, low=0)]
Bytes = Annotated[np.ndarray[Any, np.dtype[np.uint8]], Array("uint8", 1)]
Ids = Annotated[np.ndarray[Any, np.dtype[np.int32]], Array("int32", 2, low=0)]
Floats = Annotated[np.ndarray[Any, np.dtype[np.float32]], Array("float32", 2)]
Halves = Annotated[np.ndarray[Any, np.dtype[np.float16]], Array("float16", 2)]
Probabilities = Annotated[np.ndarray[Any, np.dtype[np.float32]], Array("float32", 2, low=0)]
Origins = Annotated[tuple[Annotated[int, Range(int(min(Origin)), int(max(Origin)))], ...], Size(2**16)]
"""The `Origin` of each token."""
Mode = Annotated[str, OneOf(("auto", "ar", "sd", "ssd"))]
Role = Annotated[str, OneOf(("target", "draft", "prefill"))]


MAX_ITEMS = 2**16
MAX_CHARACTERS = 2**26
MAX_AXIS = 2**24


@dataclass(frozen=True, slots=True)
class Real:
    """A finite float; an int is accepted as the float of the same value."""


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
    """Returns the shape of each field of a dataclass, in order. Raises TypeError for a type that no message may use."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: shape_of(hints[field.name]) for field in dataclasses.fields(cls)}


def shape_of(hint: Any) -> Shape:
    """Returns the shape of a type hint. Raises TypeError for a type that no message may use."""
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
    raise TypeError(f"no message field may be a {hint!r}; see protocol.schema for what it may be")


def _marked(base: Any, marker: object) -> Shape:
    match marker:
        case Range() | OneOf() | Array():
            return marker
        case Size(limit) if isinstance(sized := shape_of(base), String | Many):
            return dataclasses.replace(sized, limit=limit)
    raise TypeError(f"{marker!r} marks no field type")


def words(shape: Shape) -> str:
    """Describes a value of this shape, for errors and the documentation."""
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
    """Formats 2147483647 as 2^31-1."""
    for bits in (31, 63):
        if value == 2**bits - 1:
            return f"2^{bits}-1"
        if value == -(2**bits):
            return f"-2^{bits}"
    return f"{value:,}"


NEVER = float(np.finfo(np.float32).min)
"""The log-probability of an impossible token."""


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """One row per token, [N, 1 + n]: the token itself, then the n likeliest at its position, the likeliest first.

    `values` are natural logarithms of the target's own probabilities after penalties, bias and grammar, before
    temperature and filters; -3.4e38 marks an impossible token.
    """

    ids: Ids
    values: Floats

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> Logprobs:
        """Returns the rows [start, end)."""
        return Logprobs(self.ids[start:end], self.values[start:end])


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenates rows that have the same number of columns."""
    return Logprobs(np.concatenate([p.ids for p in parts]), np.concatenate([p.values for p in parts]))
