"""All error classes, and their form in messages. An error says what was wrong, what was expected and what to do.

Over a socket or a pipe an error is sent as a class name and a sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose; `exit_code`: the exit code of the command line."""

    exit_code = 1

    def __str__(self) -> str:
        """Returns the message. What can't be printed or sent, such as parts of names in files, is escaped."""
        return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in super().__str__())


class InvalidRequest(OutriderError):
    """A request or a setting asks for something out of range."""

    exit_code = 2


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context or in the memory for texts.

    Clients recognise it by the words "prompt is too long: N tokens > M maximum" and "maximum context length is".
    """


class UnknownDrafter(InvalidRequest):
    """A request names a drafter that the server does not have."""


class ModelError(OutriderError):
    """A model can't be found, read or paired."""

    exit_code = 3


class CannotDraft(ModelError):
    """A model works but can't draft; the target can run without it."""


class CacheError(ModelError):
    """A model can't be stored in the cache."""


class EndpointError(OutriderError):
    """A socket can't be bound or reached."""

    exit_code = 4


class WorkerError(OutriderError):
    """A worker failed, died or froze."""

    exit_code = 5


class ServerStopped(WorkerError):
    """The server ended before the text was complete; another server can continue it."""


class ProtocolError(OutriderError):
    """Bytes on a socket are not a message of this protocol version."""

    exit_code = 6


class ServerBusy(OutriderError):
    """The server has as many requests or connections as it accepts; try again later."""

    exit_code = 7


class VersionMismatch(ProtocolError):
    """The other side has another protocol version."""


class KeyFault(OutriderError):
    """A key is missing, malformed, unreadable, readable by other users, or not admitted."""

    exit_code = 8


class OtherModel(InvalidRequest):
    """A text can't be continued here: it began with another model or number format."""


class RefusedRequest(InvalidRequest, ProtocolError):
    """A well-formed message has a value out of range. It is dropped like an invalid message, but answered."""


class ModelFault(ModelError):
    """A model's code failed during a computation, or returned NaN or infinity. This ends only its request."""


@contextmanager
def wrap_model_errors(doing: str, level: int = logging.WARNING) -> Iterator[None]:
    """Turns every error but Outrider's own into a ModelFault: "`doing` failed: TypeError: ...", and logs its traceback.

    Models are third-party code, one class for each model type, and may raise anything. `level`: the level of the log
    line; lower than warning where a failure is expected.
    """
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        log.log(level, "%s failed", doing, exc_info=error)
        raise ModelFault(f"{doing} failed: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Returns the first line of the error's message, or its class name if it has none.

    MLX's "Missing 2 parameters:" is followed by the first of them, which is on the next line.
    """
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first.rstrip()} {others[0].strip(' ,.')}" if first.rstrip().endswith(":") and others else first


def make_error(kind: str, message: str) -> OutriderError:
    """Returns an error of the class `kind`; a kind that this version doesn't have becomes an OutriderError."""
    return (find_class(kind) or OutriderError)(message)


def find_class(kind: str) -> type[OutriderError] | None:
    """Returns the error class of this name; None if this version has none."""
    cls = globals().get(kind)
    return cls if isinstance(cls, type) and issubclass(cls, OutriderError) else None
