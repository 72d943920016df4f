"""A host's network on its own: processes started inside see its devices and no others.

It has no name and no file: nothing of it is left once this process and those inside have ended, however they end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.protocol.errors import OutriderError, WorkerError

CLONE_NEWNET = 0x40000000
OWN = "/proc/thread-self/ns/net"


def why_not() -> str | None:
    """Why this machine makes none, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    if shutil.which("ip") is None:
        return "ip is missing (iproute2)"
    try:
        Namespace().close()
    except OutriderError as error:
        return str(error)
    return None


class Namespace:
    """Made empty but for `lo`.

    Raises:
        WorkerError: the system does not let us.
    """

    def __init__(self) -> None:
        with _back_again():
            _call("unshare", CLONE_NEWNET)
            self._fd = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """How another process of this machine names it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread opens and starts meanwhile belongs to this namespace, for as long as it lives."""
        with _back_again():
            _call("setns", self._fd, CLONE_NEWNET)
            yield

    def ip(self, *arguments: str) -> None:
        """`ip` of iproute2, inside."""
        self.run("ip", *arguments)

    def run(self, *command: str) -> str:
        """What the command says, inside.

        Raises:
            WorkerError: the command failed; the message has what it said.
        """
        with self.entered():
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise WorkerError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def _back_again() -> Iterator[None]:
    before = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _call("setns", before, CLONE_NEWNET)
        os.close(before)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise WorkerError(f"this system makes no network namespaces here: {os.strerror(ctypes.get_errno())}")
