"""Removes what a killed server leaves behind: its run directory and its socket file.

A shell waits at the end of a pipe that only the server holds; when the server is gone without a word, the pipe ends and
the shell sweeps. A server that ends in order removes its files itself and dismisses the sweeper first.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = 'while read -r _; do :; done; rm -rf -- "$@"'


class Sweeper:
    """Waits beside the server for its end."""

    def __init__(self, paths: list[Path]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "outrider-sweeper", *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the server's group must not end the one who sweeps after it
        )

    def dismiss(self) -> None:
        """Nothing is left to sweep."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
