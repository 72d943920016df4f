"""A descriptor that can be waited for beside sockets, and wakes whoever waits when one of our processes has ended.

Linux has that; elsewhere the core looks at its processes a few times a second. Reaps nobody: the process id stays the
process's until its owner asks for the exit code.
"""

from __future__ import annotations

import os
import select
import sys


class Exits:
    """Watches processes of this one by id. `fileno` is None where that can't be waited for."""

    def __init__(self) -> None:
        self._waiting = select.epoll() if sys.platform == "linux" else None
        self._watched: dict[int, int] = {}

    @property
    def fileno(self) -> int | None:
        return self._waiting.fileno() if self._waiting is not None else None

    def watch(self, pid: int) -> None:
        """From now on its end wakes; where the system refuses that, nothing happens."""
        if self._waiting is None:
            return
        try:
            self._watched[pid] = os.pidfd_open(pid)
        except OSError:
            return
        self._waiting.register(self._watched[pid], select.EPOLLIN)

    def forget(self, pid: int) -> None:
        """Its end is known, or nobody's business any more."""
        held = self._watched.pop(pid, None)
        if held is not None:
            os.close(held)  # and so it is waited for no more

    def close(self) -> None:
        for pid in list(self._watched):
            self.forget(pid)
        if self._waiting is not None:
            self._waiting.close()
