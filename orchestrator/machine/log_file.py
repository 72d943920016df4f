"""The log of a process that this one starts: a file, or nothing where none can be written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)


def log_file(path: Path, mode: str) -> BinaryIO:
    """Opened; a process that can't be heard is better than none."""
    try:
        return open(path, mode)  # type: ignore[return-value]
    except OSError as error:
        log.warning("can't write %s (%s): that process runs without a log", path, error.strerror)
        return open("/dev/null", "wb")
