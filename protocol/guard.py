"""Whatever goes wrong in a model's code is one request's failure: it becomes a named error that a worker can report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.protocol.errors import ModelError, OutriderError

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
