"""Converts messages to ZeroMQ frames and back: by msgpack, and checked by msgspec with the types of their fields
(`protocol.schema`).

Frame 0, the header, is msgpack: [protocol version, message]. The message is a map with its class's name ("type") and
the fields that differ from their defaults. A numpy array is [dtype, shape] in the header; its little-endian bytes, last
axis fastest, follow in a separate frame, in the order of the arrays in the header. Messages that are sent together
follow one another. Received frames are checked completely: see `decode`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgpack
import msgspec
import numpy as np

from outrider import __version__
from outrider.protocol.errors import InvalidRequest, ProtocolError, RefusedRequest, VersionMismatch
from outrider.protocol.messages import Message, clients, rounds, workers
from outrider.protocol.schema import MAX_AXIS_LENGTH, MAX_FRAME_BYTES, Array, RequestId
from outrider.protocol.version import PROTOCOL_VERSION

Buffer: TypeAlias = bytes | memoryview
MAX_REASON_CHARACTERS = 200

MESSAGES: dict[str, type[Message]] = {
    name: cls
    for module in (rounds, clients, workers)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, Message) and not cls.__subclasses__()
}
"""Every message, by its name in the header."""

for _cls in MESSAGES.values():
    # msgspec inspects a class on its first use; another thread that uses it at the same time crashes the process.
    msgspec.msgpack.Decoder(_cls)
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)  # msgpack's errors are ValueErrors


def _write_array(frames: list[Buffer], value: object) -> tuple[str, tuple[int, ...]]:
    """Returns an array's entry in the header, and appends its bytes to `frames`, without a copy if possible."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise ProtocolError(f"a field holds {reprlib.repr(value)}; expected a message's own types")
    frames.append(np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)
    return value.dtype.name, value.shape


def _read_array(unread: Iterator[Buffer], kind: Any, entry: Any) -> np.ndarray[Any, Any]:
    """Returns an array, a read-only view of the next frame. Raises ValueError, to which msgspec adds the field."""
    array: Array = kind.__args__[1]
    match entry:
        case [array.dtype, [*size]] if len(size) == array.axes and all(
            type(n) is int and 0 <= n <= MAX_AXIS_LENGTH for n in size
        ):
            raw, wire = next(unread, None), np.dtype(array.dtype).newbyteorder("<")
        case _:
            raise ValueError(f"Expected an array of {array.dtype}, {array.axes} axes of at most {MAX_AXIS_LENGTH:,}")
    if raw is None:
        raise ValueError("Expected the array's bytes in a separate frame")
    if len(raw) != math.prod(size) * wire.itemsize:
        raise ValueError(f"Expected {math.prod(size) * wire.itemsize} bytes for the size {size}, got {len(raw)}")
    items: np.ndarray[Any, Any] = np.ndarray(size, wire, raw)
    if array.low is not None and items.size and items.min() < array.low:
        raise ValueError(f"Expected no number under {array.low}, got {items.min()}")
    if items.dtype.kind == "f" and not np.isfinite(items).all():
        raise ValueError("Expected finite numbers")
    return items


def encode(message: Message) -> list[Buffer]:
    """Returns the frames of `message`, for `send_multipart`. Array frames share memory with the message's arrays.

    Raises:
        ProtocolError: a field is of a wrong type or out of range; so the error appears at the sender.
    """
    name = type(message).__name__
    frames: list[Buffer] = [b""]
    try:
        entries = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=partial(_write_array, frames))
        frames[0] = msgpack.packb((PROTOCOL_VERSION, entries))
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"{name} can't be encoded ({error}); expected Unicode text and numbers in range") from None
    if longest := max((len(frame) for frame in frames if len(frame) > MAX_FRAME_BYTES), default=0):
        raise ProtocolError(f"{name} has a frame of {longest:,} bytes; expected at most {MAX_FRAME_BYTES:,}")
    _parse_message(entries, iter(frames[1:]))  # what a receiver would refuse is refused here
    return frames


def encode_all(messages: Iterable[Message]) -> list[Buffer]:
    """Returns the frames of `messages`, in this order; see `encode`."""
    return [frame for message in messages for frame in encode(message)]


def decode(frames: Sequence[Buffer]) -> Message:
    """Returns the only message in `frames`; its arrays are read-only views of the frames.

    Raises:
        ProtocolError: not a message of this version: another version (a VersionMismatch), an unknown name, an unknown
            or missing field, a field of a wrong type, a value out of range, a sequence or array of a wrong size, or a
            number that is not finite.
        RefusedRequest: (a ProtocolError and an InvalidRequest) a well-formed message has sampling parameters out of
            range; the message is that of SamplingParams. Use `read_request_id` to answer the sender.
    """
    rest = iter(frames)
    message = _read_first(rest)
    if extra := len(list(rest)):
        name = type(message).__name__
        raise ProtocolError(f"{name} has {extra} frames too many; expected one for each array that is not nil")
    return message


def decode_all(frames: Sequence[Buffer]) -> list[Message]:
    """Returns the messages in `frames`, at least one; raises as `decode` does if any of them is invalid."""
    rest = iter(frames)
    return [_read_first(rest), *(_parse_message(_read_header(header), rest) for header in rest)]


def read_request_id(frames: Sequence[Buffer]) -> str | None:
    """Returns the request id in a refused message, to answer its sender; None if it can't be read."""
    try:
        _, message = msgpack.unpackb(frames[0])
        return msgspec.convert(message["request"], RequestId)
    except (*_DECODE_ERRORS, LookupError, TypeError):
        return None


def _read_first(rest: Iterator[Buffer]) -> Message:
    header = next(rest, None)
    if header is None:
        raise ProtocolError("the message has no frames; expected a header and a frame for each array")
    return _parse_message(_read_header(header), rest)


def _parse_message(entries: Any, rest: Iterator[Buffer]) -> Message:
    """Converts fields by name to a message, and checks them; its arrays are taken from `rest`."""
    name = entries.get("type") if isinstance(entries, dict) else ""
    cls = MESSAGES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(
            f"the message name is {str(name or '')[:60]!r}; expected the name of a message in protocol.messages"
        )
    try:
        return msgspec.convert(entries, cls, dec_hook=partial(_read_array, rest))
    except InvalidRequest as error:
        raise RefusedRequest(str(error)) from None
    except _DECODE_ERRORS as error:
        reason, _, place = _short_reason(error).partition(" - at `$")
        raise ProtocolError(f"{cls.__name__}{place[:-1]} is invalid: {reason}") from None


def _read_header(header: Buffer) -> Any:
    """Returns the fields of the message from its header; they are not checked yet."""
    try:
        found = msgpack.unpackb(header)
    except _DECODE_ERRORS as error:
        raise ProtocolError(
            f"the header is invalid: {_short_reason(error)}; expected [version, message] in msgpack"
        ) from None
    version = found[0] if isinstance(found, list) and found else None
    if type(version) is not int or (version == PROTOCOL_VERSION and len(found) != 2):
        raise ProtocolError(f"the header is invalid: it is {reprlib.repr(found)}; expected [version, message]")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the other side speaks protocol version {version}, this side version {PROTOCOL_VERSION}"
            f" (outrider {__version__}); run the same release of outrider on both"
        )
    return found[1]


def _short_reason(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason[:1].lower() + reason[1:MAX_REASON_CHARACTERS]
