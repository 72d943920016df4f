"""A text file that a flag names."""

from __future__ import annotations

from pathlib import Path

from outrider.protocol.errors import InvalidRequest


def read(path: Path, expected: str) -> str:
    """All of it. Raises InvalidRequest: it can't be read; `expected` goes on "expected"."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read ({error.strerror}); expected {expected}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} can't be read (it is not UTF-8); expected {expected}") from None
