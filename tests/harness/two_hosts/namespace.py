"""A network namespace: processes inside see only its devices.

It has no name and no file, so nothing remains after this process and those inside have ended.
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
    """Returns why this machine can't create namespaces, or None."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    if shutil.which("ip") is None:
        return "ip is missing (iproute2)"
    try:
        Namespace().close()
    except OutriderError as error:
        return str(error)
    return None


class Namespace:
    """A new namespace with only `lo`.

    Raises:
        WorkerError: the system refuses.
    """

    def __init__(self) -> None:
        with _back_again():
            _call("unshare", CLONE_NEWNET)
            self._fd = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """The path by which other processes of this machine refer to it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, sockets and processes of this thread are created in this namespace."""
        with _back_again():
            _call("setns", self._fd, CLONE_NEWNET)
            yield

    def ip(self, *arguments: str) -> None:
        """Runs iproute2's `ip` inside."""
        self.run("ip", *arguments)

    def run(self, *command: str) -> str:
        """Runs a command inside, and returns its output.

        Raises:
            WorkerError: the command failed; the message has its stderr.
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
        raise WorkerError(f"a network namespace can't be created: {os.strerror(ctypes.get_errno())}")
