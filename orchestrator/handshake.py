"""What a starting server tells whoever started it, and how errors cross a socket or a pipe.

The same socket ends the server when the parent goes: its end of the line is the end of the parent.

`kind_of`: errors across a socket or a pipe: there they are a class name and a sentence, on either side an exception.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from outrider.protocol import errors
from outrider.protocol.errors import OutriderError


@dataclass(frozen=True, slots=True)
class Stage:
    """How far the start is, for a person to read."""

    text: str


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Clients may connect at `endpoint`, further drafters at `workers`; `notes` are worth a line each. `http` is where
    HTTP is served, if it is.

    `joining`: where drafters of other machines join. `key`: the server's, where keys are asked for. `own`: where its
    owner's processes on this machine connect without any.
    """

    endpoint: str
    workers: str = ""
    notes: tuple[str, ...] = ()
    http: str = ""
    joining: str = ""
    key: str = ""
    own: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The server can't go on; `kind` names a class of protocol.errors."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The server has ended as it was asked to, but for this; `kind` as above."""

    kind: str
    message: str


Announcement = Stage | ServerReady | Failure | Unfinished
_KINDS: dict[str, type[Announcement]] = {cls.__name__: cls for cls in (Stage, ServerReady, Failure, Unfinished)}


def announce(line: socket.socket, announcement: Announcement) -> None:
    """Tells the parent; a parent that is gone is no error here, its end is noticed by `wait_for_end`."""
    text = json.dumps([type(announcement).__name__, asdict(announcement)])
    try:
        line.sendall(text.encode() + b"\n")
    except OSError:
        return


def wait_for_end(line: socket.socket) -> None:
    """Returns when the parent's end of the line is closed, however the parent went."""
    try:
        while line.recv(1):
            pass
    except OSError:
        return


def announcements(line: socket.socket) -> Iterator[Announcement]:
    """What the server tells, until it goes. TimeoutError when the socket has a timeout and nothing comes."""
    rest = b""
    while data := line.recv(4096):
        *lines, rest = (rest + data).split(b"\n")
        for one in lines:
            kind, fields = json.loads(one, object_hook=_tuples)
            yield _KINDS[kind](**fields)


def _tuples(fields: dict[str, object]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def kind_of(error: OutriderError) -> str:
    """The name that stands for this error's class in protocol.errors."""
    named = (cls for cls in type(error).__mro__ if vars(errors).get(cls.__name__) is cls)
    return next(named, OutriderError).__name__


def as_error(kind: str, message: str) -> OutriderError:
    """The exception that `kind` names; one that this version doesn't know is a plain OutriderError."""
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, OutriderError):
        return found(message)
    return OutriderError(message)
