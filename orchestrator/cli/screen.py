"""Progress on stderr: one line that changes on a terminal and is wiped; elsewhere only the log has it (level info)."""

from __future__ import annotations

import logging
import os
import shutil
import sys

log = logging.getLogger(__name__)


def say(text: str, end: str = "\n") -> None:
    """Writes to stderr; one that is full or gone keeps no command from its work, and hears no more."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Screen:
    """Whoever prints to stdout calls `clear` first, so that no half line stays before the text."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """The newest state of things."""
        if text == self._shown:
            return
        self._shown = text
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            say(f"\r\x1b[K{text[:width]}", end="")
        else:
            log.info("%s", text)

    def clear(self) -> None:
        """Takes the changing line away."""
        if self._live and self._shown:
            say("\r\x1b[K", end="")
        self._shown = ""

    @property
    def live(self) -> bool:
        return self._live
