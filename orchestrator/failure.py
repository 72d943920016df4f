"""Errors across a socket or a pipe: there they are a class name and a sentence, on either side an exception."""

from __future__ import annotations

from outrider.protocol import errors
from outrider.protocol.errors import OutriderError


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
