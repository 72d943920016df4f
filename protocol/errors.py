"""The named errors that cross rooms, sockets and pipes. Each message says what was wrong, what was expected, what to
do.

`ModelFault`: any failure in a model's code is one request's failure: a named error that a worker can report.

`kind_of` and `as_error`: across a socket or a pipe an error is a class name and a sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class OutriderError(Exception):
    """Base of every error Outrider raises on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class InvalidRequest(OutriderError):
    """A request or a setting asks for something out of range."""

    exit_code = 2


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context, or in the memory for texts."""


class UnknownDrafter(InvalidRequest):
    """A request names a drafter that the server does not have."""


class ModelError(OutriderError):
    """A model can't be found, read or paired."""

    exit_code = 3


class CannotDraft(ModelError):
    """A model is sound and can't draft; what it was to draft for can go on without."""


class EndpointError(OutriderError):
    """A socket can't be bound or reached."""

    exit_code = 4


class WorkerError(OutriderError):
    """A worker failed, died or froze."""

    exit_code = 5


class ServerStopped(WorkerError):
    """The server ended before the text was complete; the next one can go on with it."""


class ProtocolError(OutriderError):
    """Bytes on a socket are not a message of this protocol version."""

    exit_code = 6


class ServerBusy(OutriderError):
    """The server has all the requests or connections that it takes; ask again later."""

    exit_code = 7


class VersionMismatch(ProtocolError):
    """The other side is of another release, whose messages are others."""


class KeyFault(OutriderError):
    """A key is missing, unreadable, readable by others, none at all, or not let in."""

    exit_code = 8


class OtherModel(InvalidRequest):
    """A text is to go on with another model, or other numbers, than it began with."""


class RefusedRequest(InvalidRequest, ProtocolError):
    """A well-formed message asks for something out of range. It is dropped like an invalid one, but answered."""


log = logging.getLogger(__name__)


class ModelFault(ModelError):
    """A model's own code failed in the middle of its work, or computed what is no number."""


@contextmanager
def named_errors(doing: str, level: int = logging.WARNING) -> Iterator[None]:
    """Errors of Outrider pass; any other becomes a ModelFault: "`doing` failed: TypeError: ...". The log has all of it.

    Models are other people's code, a class a model type, and fail with whatever they like. `level`: where that is
    tried for, it is no warning.
    """
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        log.log(level, "%s failed", doing, exc_info=error)
        raise ModelFault(f"{doing} failed: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The error's first line, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def kind_of(error: OutriderError) -> str:
    """The name of this error's class, or of its nearest base here, by which it crosses a socket or a pipe."""
    named = (cls for cls in type(error).__mro__ if globals().get(cls.__name__) is cls)
    return next(named, OutriderError).__name__


def as_error(kind: str, message: str) -> OutriderError:
    """The exception that `kind` names; a kind that this version doesn't know is a plain OutriderError."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, OutriderError):
        return found(message)
    return OutriderError(message)
