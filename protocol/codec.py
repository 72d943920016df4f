"""Messages to ZeroMQ frames and back.

Frame 0 is msgpack: [protocol version, message name, [value of each field, in order]]. Each numpy array stands in the
header as [dtype, shape], and its little-endian bytes follow as a frame of their own, in field order. Messages that
leave together stand one after the other. Nothing that arrives is trusted: see `decode`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgpack

from outrider.protocol.arrays import Buffer
from outrider.protocol.checks import dumper, loader, wrong
from outrider.protocol.errors import InvalidRequest, ProtocolError, RefusedRequest, VersionMismatch
from outrider.protocol.fields import MAX_FRAME
from outrider.protocol.messages import Message
from outrider.protocol.schema import MAX_ITEMS, fields_of
from outrider.protocol.version import PACKAGE_VERSION, PROTOCOL_VERSION

MESSAGES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Message)}
"""Every message that may cross a socket, by the name it has in the header."""


def encode(message: Message) -> list[Buffer]:
    """The frames that say `message`, for `send_multipart`. Array frames share memory with the message's arrays.

    Raises:
        ProtocolError: a field is out of its type or range, so that the sender hears of it and not the receiver.
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
            f"{cls.__name__} holds text that can't be UTF-8 ({error.reason}); expected Unicode"
        ) from None
    if longest := max((len(frame) for frame in frames if len(frame) > MAX_FRAME), default=0):
        raise ProtocolError(f"{cls.__name__} has a frame of {longest:,} bytes; expected at most {MAX_FRAME:,}")
    return frames


def encode_all(messages: Iterable[Message]) -> list[Buffer]:
    """The frames that say `messages`, in this order; see `encode`."""
    return [frame for message in messages for frame in encode(message)]


def decode(frames: Sequence[Buffer]) -> Message:
    """The message that `frames` say, and no other; its arrays are read-only views of the frames.

    Raises:
        ProtocolError: not a message of this version: another version (a VersionMismatch), an unknown name, too many or
            too few fields, ill-typed ones, a value out of range, a sequence or array of a wrong size, a number that is
            not finite.
        RefusedRequest: (a ProtocolError and an InvalidRequest) a well-formed message asks for sampling out of range;
            the words are SamplingParams's own. Use `request_of` to answer whoever sent it.
    """
    rest = iter(frames)
    message = _first(rest)
    if extra := len(list(rest)):
        name = type(message).__name__
        raise ProtocolError(f"{name} has {extra} frames too many; expected one a present array and no other")
    return message


def decode_all(frames: Sequence[Buffer]) -> list[Message]:
    """The messages that `frames` say, one at least; raises as `decode` when one of them is none: then none is taken."""
    rest = iter(frames)
    return [_first(rest), *(_message(header, rest) for header in rest)]


def request_of(frames: Sequence[Buffer]) -> str | None:
    """The request a refused message was about, when that can be read: so that its sender can be told what was wrong."""
    try:
        _, name, fields = _unpack(frames[0])
        request = fields[list(fields_of(MESSAGES[name])).index("request")]
    except (ProtocolError, LookupError, TypeError, ValueError):
        return None
    return request if type(fields) is tuple and type(request) is str and len(request) <= 64 else None


def _first(rest: Iterator[Buffer]) -> Message:
    header = next(rest, None)
    if header is None:
        raise ProtocolError("no frame arrived; expected a header and the arrays it names")
    return _message(header, rest)


def _message(frame: Buffer, rest: Iterator[Buffer]) -> Message:
    """The message of the header in this frame; its arrays are taken from `rest`."""
    header = _unpack(frame)
    if len(header) != 3 or type(header[0]) is not int or header[0] != PROTOCOL_VERSION:
        raise _refused(header)
    _, name, fields = header
    if type(name) is not str or name not in MESSAGES:
        raise wrong("the message name", name, "the name of a message of protocol.messages")
    try:
        message: Message = loader(MESSAGES[name])(fields, rest)
    except InvalidRequest as error:
        raise RefusedRequest(str(error)) from None
    return message


def _refused(header: tuple[Any, ...]) -> ProtocolError:
    """What is wrong with a header that is not of this version."""
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
    longest = min(MAX_ITEMS, len(frame))  # msgpack makes room for the length claimed, unseen
    try:
        header = msgpack.unpackb(
            frame, use_list=False, max_array_len=longest, max_map_len=0, max_bin_len=0, max_ext_len=0
        )
    except ValueError as error:  # what every error of msgpack is, broken UTF-8 included
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"the header is not msgpack ({reason}); expected a message of outrider") from None
    if type(header) is not tuple:
        raise wrong("the header", header, "version, message name and fields")
    return header
