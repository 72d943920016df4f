"""The files of a server's sockets: a private directory, and the lock on a socket's path. Knows nothing of ZeroMQ."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import zmq

from outrider.protocol.errors import EndpointError

MAX_PATH_BYTES = zmq.IPC_PATH_MAX_LEN or 103
"""The maximum length of an endpoint's path: 107 bytes on Linux, 103 on macOS."""

MAX_NAME_CHARACTERS = 28
"""The maximum length of a socket's name in the directory."""

_PREFIX = "outrider-run-"
_MARKER = ".outrider"  # in a directory that is locked; without it another process may not remove the directory


class SocketLock:
    """The right to bind `path` until `release`, by a lock on a file beside it; `release` removes this file and the
    socket of `bind`. The kernel releases the lock when its process ends, so a killed server blocks no other, and of two
    that start together only one wins.

    Raises:
        EndpointError: a live server holds the path, the path is no socket, or the directory can't be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = f"{path}.lock"
        self._inode: int | None = None  # of the socket
        self._descriptor: int | None = self._acquire()
        if problem := _path_problem(path):
            self._unlock()
            raise EndpointError(problem)

    def bind(self, listener: socket.socket) -> None:
        """Binds `listener` to the path, and replaces a dead server's socket. Raises OSError if that fails."""
        _remove(self.path)
        listener.bind(self.path)
        self._inode = _inode(self.path)

    def release(self) -> None:
        """Releases the path. A second call does nothing."""
        if self._descriptor is not None:
            if self._inode is not None and _inode(self.path) == self._inode:
                _remove(self.path)
            self._unlock()

    def _acquire(self) -> int:
        while True:
            try:
                descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise EndpointError(
                    f"the socket {self.path} can't be created: {error.strerror}; choose a directory you may write to"
                ) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise EndpointError(_served_message(self.path)) from None
            if _is_file_at(descriptor, self._lock):
                return descriptor
            os.close(descriptor)  # its last holder removed the file between our open and our lock: try again

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _remove(self._lock)  # while we hold the lock, so that the file is ours
            os.close(descriptor)


def _path_problem(path: str) -> str | None:
    """Returns why the path can't be bound although its lock is free; None if it is free or left by a dead server."""
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
    return _served_message(path)


def _served_message(path: str) -> str:
    return f"ipc://{path} is already served by a running process; connect to it or choose another path"


def _is_file_at(descriptor: int, path: str) -> bool:
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
    with suppress(OSError):  # already removed, perhaps with its directory
        os.unlink(path)


class PrivateDirectory(AbstractContextManager["PrivateDirectory"]):
    """A directory of mode 0700 in the temporary folder, or in /tmp if no endpoint can have that path: it is too long
    (macOS), or not printable.

    `close` removes it with its contents. The process that created it holds a lock on it; directories of killed
    processes are removed when the next one is created. A context manager.

    Raises:
        EndpointError: it can't be created.
    """

    def __init__(self) -> None:
        root = _choose_root()
        _remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._descriptor: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            (self.path / _MARKER).touch()
        except OSError as error:
            raise EndpointError(
                f"can't create a directory for sockets in {root}: {error.strerror}; free some space, or"
                " set TMPDIR to another folder"
            ) from None

    def endpoint(self, name: str) -> str:
        """Returns an ipc endpoint in the directory. `name`: a word of at most `MAX_NAME_CHARACTERS`."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Removes the directory. A second call does nothing."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def _choose_root() -> Path:
    try:
        root = Path(tempfile.gettempdir()).absolute()
    except OSError:  # no folder is writable for files; a directory can perhaps still be created
        return Path("/tmp")
    longest = root / (_PREFIX + "x" * 8) / ("x" * MAX_NAME_CHARACTERS)
    return root if len(os.fsencode(longest)) <= MAX_PATH_BYTES and str(root).isprintable() else Path("/tmp")


def _remove_abandoned(root: Path) -> None:
    """Removes the directories of processes that have ended, whose locks are free."""
    for marker in root.glob(f"{_PREFIX}*/{_MARKER}"):
        with suppress(OSError):  # it is not ours, a live process holds the lock, or it was already removed
            descriptor = os.open(marker.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(marker.parent)
            finally:
                os.close(descriptor)
