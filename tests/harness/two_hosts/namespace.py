"""A network namespace: processes inside see only its network devices.

It has no name and no file, so nothing remains when this process and those inside have ended.
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
OWN_NAMESPACE = "/proc/thread-self/ns/net"


def unsupported_reason() -> str | None:
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
    """A new namespace with a loopback device only.

    Raises:
        WorkerError: the system can't create it.
    """

    def __init__(self) -> None:
        with _restoring_namespace():
            _system_call("unshare", CLONE_NEWNET)
            self._fd = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """The path by which other processes of this machine can enter it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, sockets and processes of this thread are created in this namespace."""
        with _restoring_namespace():
            _system_call("setns", self._fd, CLONE_NEWNET)
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
def _restoring_namespace() -> Iterator[None]:
    """Returns this thread to its present namespace after the block."""
    before = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _system_call("setns", before, CLONE_NEWNET)
        os.close(before)


def _system_call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise WorkerError(f"a network namespace can't be created: {os.strerror(ctypes.get_errno())}")
