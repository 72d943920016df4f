"""A folder for results: made when it is not there, and found to be writable before the work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider.protocol.errors import InvalidRequest


def writable(path: Path, instead: str) -> Path:
    """The folder itself; `instead` is the advice where it can't be used.

    Raises:
        InvalidRequest: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InvalidRequest(f"nothing can be written to {path}: {error.strerror}; {instead}") from None
