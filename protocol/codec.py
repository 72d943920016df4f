"""Converts messages to ZeroMQ frames and back, by functions generated from the types of their fields.

Frame 0, the header, is msgpack: [protocol version, message name, [value of each field, in order]]. A numpy array is
[dtype, shape] in the header; its little-endian bytes, last axis fastest, follow in a separate frame, in field order.
Messages that are sent together follow one another. Received frames are checked completely: see `decode`.

`loader` and `dumper`: two functions for each message, generated from its field types as `dataclasses` generates
`__init__`. `loader` converts what msgpack has read to a dataclass, `dumper` a dataclass to what msgpack writes. Both
check every value and raise ProtocolError with the field's path, the value and what was expected.
"""

from __future__ import annotations

import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, count
from typing import Any, TypeAlias

import msgpack
import numpy as np

from outrider.protocol.errors import InvalidRequest, ProtocolError, RefusedRequest, VersionMismatch
from outrider.protocol.messages import Message
from outrider.protocol.schema import (
    MAX_AXIS,
    MAX_FRAME,
    MAX_ITEMS,
    Array,
    Fixed,
    Flag,
    Many,
    Maybe,
    OneOf,
    Range,
    Real,
    Record,
    Shape,
    String,
    fields_of,
    words,
)
from outrider.protocol.version import PACKAGE_VERSION, PROTOCOL_VERSION

Buffer: TypeAlias = bytes | memoryview
FEW = 64


def read_array(size: tuple[int, ...], array: Array, place: str, frames: Iterator[Buffer]) -> np.ndarray[Any, Any]:
    """Returns an array of this size, a read-only view of the next frame."""
    raw = next(frames, None)
    if raw is None:
        raise ProtocolError(f"{place} has no frame; expected its bytes in a separate frame")
    wire = _wire(array.dtype)
    if len(raw) != math.prod(size) * wire.itemsize:
        raise ProtocolError(f"{place} has {len(raw)} bytes; expected {words(array)}, of size {size}")
    items: np.ndarray[Any, Any] = np.ndarray(size, wire, raw)
    _check_items(items, array, place)
    return items


def write_array(value: np.ndarray[Any, Any], array: Array, place: str, frames: list[Buffer]) -> tuple[Any, ...]:
    """Returns an array's entry in the header, and appends its bytes to the frames, without a copy if possible."""
    _check_items(value, array, place)
    frames.append(np.ascontiguousarray(value, _wire(array.dtype)).reshape(-1).view(np.uint8).data)
    return array.dtype, value.shape


@cache
def _wire(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _check_items(value: np.ndarray[Any, Any], array: Array, place: str) -> None:
    if array.low is not None and value.size and _least(value) < array.low:
        raise ProtocolError(f"{place} holds {value.min()}; expected no number under {array.low}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ProtocolError(f"{place} holds a number that is not finite; expected finite numbers")


def _least(value: np.ndarray[Any, Any]) -> Any:
    """Returns the least item; for a few tokens numpy's `min` would cost more than all other checks together."""
    return min(value.tolist()) if value.ndim == 1 and value.size <= FEW else value.min()


Check: TypeAlias = Callable[[Any, Any], Any]
"""(value, raw frames) -> value. The frames are an iterator when loading, a list to append to when dumping."""

_EXACT = 2**53  # whole numbers up to this one are exact as floats
_view = reprlib.Repr()
_view.maxstring = _view.maxother = 60


def wrong(place: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"{place} is {_view.repr(value)}; expected {expected}")


@cache
def loader(cls: type) -> Check:
    """Returns the function that checks a tuple of fields, as msgpack reads it, and makes a `cls` of it."""
    return _Writer(loads=True).function(cls)


@cache
def dumper(cls: type) -> Check:
    """Returns the function that checks a `cls` and makes a tuple of its fields."""
    return _Writer(loads=False).function(cls)


class _Writer:
    """Generates one function. `_known`: the objects that its code uses; all other names are its variables."""

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
        """Returns the lines that check the variable `value` against its shape, and convert it in place."""
        if isinstance(shape, Maybe):
            return [f"if {value} is not None:", *_indented(self._code(shape.inner, value, place))]
        expected = words(shape)
        if isinstance(shape, Record) and self._loads:
            expected += f": {', '.join(fields_of(shape.cls))}"
        refused = f"raise wrong({place!r}, {value}, {expected!r})"
        return [f"if not ({self._outline(shape, value)}): {refused}", *self._inside(shape, value, place)]

    def _outline(self, shape: Shape, value: str) -> str:
        """Returns the condition that a value must meet before its parts are checked."""
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
        """Returns the lines that check and convert the parts of a value whose outline is right."""
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
        element, converted = self._variable(), self._variable()
        loop = [f"for {element} in {value}:", *_indented(self._code(item, element, f"{place}[]"))]
        if _is_kept(item):
            return loop
        return [f"{converted} = []", *loop, f" {converted}.append({element})", f"{value} = tuple({converted})"]

    def _parts(self, shapes: Sequence[Shape], places: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns a variable for each part, and the lines for all of them."""
        parts = [self._variable() for _ in shapes]
        codes = map(self._code, shapes, parts, places)
        return parts, list(chain.from_iterable(codes))

    def _made(self, cls: type, value: str, parts: Sequence[str]) -> list[str]:
        """Returns the lines that make a `cls` of its fields; a frozen dataclass's `__init__` takes twice the time."""
        if hasattr(cls, "__post_init__"):
            return [f"{value} = {self._name(cls)}{_tuple(parts)}"]
        setters = [self._name(cls.__dict__[name].__set__) for name in fields_of(cls)]
        sets = [f"{setter}({value}, {part})" for setter, part in zip(setters, parts, strict=True)]
        return [f"{value} = new({self._name(cls)})", *sets]

    def _variable(self) -> str:
        return f"v{next(self._numbers)}"

    def _name(self, known: object) -> str:
        """Returns a name for this object in the code."""
        name = f"k{next(self._numbers)}"
        self._known[name] = known
        return name


def _indented(code: Sequence[str]) -> list[str]:
    return [f" {line}" for line in code]


def _tuple(parts: Sequence[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _is_kept(shape: Shape) -> bool:
    """Returns whether values of this shape are the same in a dataclass and in msgpack."""
    match shape:
        case Many(inner) | Maybe(inner):
            return _is_kept(inner)
    return isinstance(shape, Range | Flag | String | OneOf)


def _sized(value: str, axes: int) -> str:
    lengths = "".join(f" and type({value}[{i}]) is int and 0 <= {value}[{i}] <= {MAX_AXIS}" for i in range(axes))
    return f"type({value}) is tuple and len({value}) == {axes}{lengths}"


MESSAGES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Message)}
"""Every message, by its name in the header."""


def encode(message: Message) -> list[Buffer]:
    """Returns the frames of `message`, for `send_multipart`. Array frames share memory with the message's arrays.

    Raises:
        ProtocolError: a field is of a wrong type or out of range; so the error appears at the sender.
    """
    cls: type = type(message)
    if MESSAGES.get(cls.__name__) is not cls:
        raise wrong("the message", message, "one of the messages of protocol.messages")
    frames: list[Buffer] = [b""]
    fields = dumper(cls)(message, frames)
    try:
        frames[0] = msgpack.packb((PROTOCOL_VERSION, cls.__name__, fields))
    except UnicodeEncodeError as error:
        raise ProtocolError(
            f"{cls.__name__} has text that can't be encoded as UTF-8 ({error.reason}); expected Unicode text"
        ) from None
    if longest := max((len(frame) for frame in frames if len(frame) > MAX_FRAME), default=0):
        raise ProtocolError(f"{cls.__name__} has a frame of {longest:,} bytes; expected at most {MAX_FRAME:,}")
    return frames


def encode_all(messages: Iterable[Message]) -> list[Buffer]:
    """Returns the frames of `messages`, in this order; see `encode`."""
    return [frame for message in messages for frame in encode(message)]


def decode(frames: Sequence[Buffer]) -> Message:
    """Returns the only message in `frames`; its arrays are read-only views of the frames.

    Raises:
        ProtocolError: not a message of this version: another version (a VersionMismatch), an unknown name, too many or
            too few fields, a field of a wrong type, a value out of range, a sequence or array of a wrong size, or a
            number that is not finite.
        RefusedRequest: (a ProtocolError and an InvalidRequest) a well-formed message has sampling parameters out of
            range; the message is that of SamplingParams. Use `request_of` to answer the sender.
    """
    rest = iter(frames)
    message = _first(rest)
    if extra := len(list(rest)):
        name = type(message).__name__
        raise ProtocolError(f"{name} has {extra} frames too many; expected one for each array that is not nil")
    return message


def decode_all(frames: Sequence[Buffer]) -> list[Message]:
    """Returns the messages in `frames`, at least one; raises as `decode` does if any of them is invalid."""
    rest = iter(frames)
    return [_first(rest), *(_message(header, rest) for header in rest)]


def request_of(frames: Sequence[Buffer]) -> str | None:
    """Returns the request of a refused message, to answer its sender; None if it can't be read."""
    try:
        _, name, fields = _unpack(frames[0])
        request = fields[list(fields_of(MESSAGES[name])).index("request")]
    except (ProtocolError, LookupError, TypeError, ValueError):
        return None
    return request if type(fields) is tuple and type(request) is str and len(request) <= 64 else None


def _first(rest: Iterator[Buffer]) -> Message:
    header = next(rest, None)
    if header is None:
        raise ProtocolError("the message has no frames; expected a header and a frame for each array")
    return _message(header, rest)


def _message(frame: Buffer, rest: Iterator[Buffer]) -> Message:
    """Returns the message whose header is in this frame; its arrays are taken from `rest`."""
    header = _unpack(frame)
    if len(header) != 3 or type(header[0]) is not int or header[0] != PROTOCOL_VERSION:
        raise _refused(header)
    _, name, fields = header
    if type(name) is not str or name not in MESSAGES:
        raise wrong("the message name", name, "the name of a message in protocol.messages")
    try:
        message: Message = loader(MESSAGES[name])(fields, rest)
    except InvalidRequest as error:
        raise RefusedRequest(str(error)) from None
    return message


def _refused(header: tuple[Any, ...]) -> ProtocolError:
    """Returns the error for a header that is not of this version."""
    version = header[0] if header else None
    if type(version) is not int:
        return wrong("the protocol version", version, "a whole number first in the header")
    if version != PROTOCOL_VERSION:
        return VersionMismatch(
            f"the other side speaks protocol version {version}, this side version {PROTOCOL_VERSION} (outrider"
            f" {PACKAGE_VERSION}); run the same release of outrider on both"
        )
    return ProtocolError(f"the header has {len(header)} parts; expected version, message name and fields")


def _unpack(frame: Buffer) -> tuple[Any, ...]:
    longest = min(MAX_ITEMS, len(frame))  # msgpack allocates the claimed length before it reads the items
    try:
        header = msgpack.unpackb(
            frame, use_list=False, max_array_len=longest, max_map_len=0, max_bin_len=0, max_ext_len=0
        )
    except ValueError as error:  # the base of every error of msgpack, broken UTF-8 included
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"the header is not msgpack ({reason}); expected a message of outrider") from None
    if type(header) is not tuple:
        raise wrong("the header", header, "version, message name and fields")
    return header
