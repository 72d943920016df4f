"""The end of a log file as one line, for an error message."""

from __future__ import annotations

import os
from pathlib import Path

TAIL_BYTES = 4096
TAIL_LINES = 3


def log_tail(path: Path) -> str:
    """The last lines; empty when there are none, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())
