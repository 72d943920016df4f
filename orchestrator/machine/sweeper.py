"""Removes what a killed server leaves behind: its run directory and its socket file.

A shell waits at the end of a pipe that only the server holds; when the server is gone without a word, the pipe ends and
the shell sweeps. A server that ends in order removes its files itself and dismisses the sweeper first.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from outrider.protocol.claim import PathClaim

# $1: the run directory. $2: a socket elsewhere, $3: what its lock file holds and $4: its inode while it is still ours.
_SCRIPT = """
while read -r _; do :; done
rm -rf -- "$1"
[ -n "$2" ] && [ "$(cat -- "$2.lock")" = "$3" ] && [ "$(ls -di -- "$2")" = "$4 $2" ] && rm -f -- "$2" "$2.lock"
"""


class Sweeper:
    """Waits beside the server for its end, to remove `directory` and the socket of `claim`; what others made stays."""

    def __init__(self, directory: Path, claim: PathClaim | None) -> None:
        elsewhere = [claim.path, claim.token, str(claim.inode)] if claim is not None else ["", "", ""]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "outrider-sweeper", str(directory), *elsewhere],
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
