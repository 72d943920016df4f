"""Who may serve a unix socket path: whoever holds the lock on the file beside it.

The kernel drops the lock with the process that held it, so a killed server blocks nobody, and two that start together
can't both win. Knows paths; knows nothing of ZeroMQ.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress

from outrider.protocol.errors import EndpointError


class SocketLock:
    """The right to bind `path`, until `release`, which removes the lock file and the socket that `bind` put there.

    `token` is what the lock file holds and `inode` the socket's: by them others can tell that both are still ours.

    Raises:
        EndpointError: a live server holds the path, or what lies there is no socket, or the directory can't be used.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = f"{path}.lock"
        self.token = f"{os.getpid()}-{os.urandom(8).hex()}"
        self.inode: int | None = None
        self._aside = f"{path}.inside"
        self._shut: socket.socket | None = None
        descriptor = self._acquire()
        self._descriptor: int | None = descriptor
        problem = _occupied(path)
        if problem:
            self._unlock()
            raise EndpointError(problem)
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk nobody else can tell that it is ours, and so nobody sweeps it
            os.write(descriptor, self.token.encode())

    @property
    def path(self) -> str:
        return self._path

    def bind(self, listener: socket.socket) -> None:
        """Binds it to the path, in the place of what a dead server left there. OSError when that can't be."""
        _remove(self._path)
        listener.bind(self._path)
        self.inode = _inode(self._path)

    def shut(self) -> None:
        """Puts a socket that nobody is let in by at the path; who is connected stays so. Again does nothing."""
        if self._shut is None and self.inode is not None:
            os.rename(self._path, self._aside)
            self._shut = socket.socket(socket.AF_UNIX)
            self._shut.bind(self._path)
            self._shut.listen()

    def open(self) -> None:
        """The socket that `bind` put there again; who waits is cut off and, as ZeroMQ does, tries again."""
        if self._shut is not None:
            os.rename(self._aside, self._path)
            self._shut.close()
            self._shut = None

    def release(self) -> None:
        """Gives the path back. Again does nothing."""
        self.open()
        if self._descriptor is not None:
            if self.inode is not None and _inode(self._path) == self.inode:
                _remove(self._path)
            self._unlock()

    def _acquire(self) -> int:
        while True:
            descriptor = self._lock_file()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise EndpointError(_served(self._path)) from None
            if _is_at(descriptor, self._lock):
                return descriptor
            os.close(descriptor)  # its holder removed the file between our open and our lock: take the new one

    def _lock_file(self) -> int:
        try:
            return os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except PermissionError:
            reason = "no permission to write there"
        except OSError as error:
            reason = error.strerror or str(error)
        raise EndpointError(f"the socket {self._path} can't be made: {reason}; choose a directory you may write to")

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _remove(self._lock)  # while it is still locked, so that it is ours
            os.close(descriptor)


def _occupied(path: str) -> str | None:
    """Why the path can't be bound although nobody holds its lock; None when it is free or a dead server's."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if not stat.S_ISSOCK(mode):
        return f"{path} exists and is not a socket; choose another path"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            return f"{path} is another program's socket ({error.strerror or error}); choose another path"
    return _served(path)


def _served(path: str) -> str:
    return f"ipc://{path} is already served by a running process; connect to that one or choose another path"


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # gone already, with its directory perhaps
