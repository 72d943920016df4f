"""The files of a server's sockets: a private directory for them, and the lock on a socket's path.

`PrivateDirectory`: a fresh directory that only this user may enter, with a short path. Its maker holds a lock on it;
what a killed maker left is removed when the next one is made.

`SocketLock`: whoever holds the lock on the file beside a path may serve it. The kernel drops the lock with the process
that held it, so a killed server blocks nobody, and two that start together can't both win. Knows nothing of ZeroMQ.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import zmq

from outrider.protocol.errors import EndpointError

MAX_PATH = zmq.IPC_PATH_MAX_LEN or 103
"""Bytes a unix socket's path may have on this system: 107 on Linux, 103 on macOS."""


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
        with suppress(OSError):  # on a full disk the file is not known as ours, and is not swept
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
        """Puts a socket at the path that accepts no connections; open ones stay. Again does nothing."""
        if self._shut is None and self.inode is not None:
            os.rename(self._path, self._aside)
            self._shut = socket.socket(socket.AF_UNIX)
            self._shut.bind(self._path)
            self._shut.listen()

    def open(self) -> None:
        """Restores the socket that `bind` put there; waiting connections are cut, and ZeroMQ tries again."""
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
    """Why the path can't be bound although its lock is free; None when it is free or a dead server's."""
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


MAX_NAME = 32
"""Characters of a socket's name in the directory."""
_PREFIX = "outrider-run-"
_UNBORN = ".outrider-run-"  # under this name until its lock is held, so that no sweep takes it for abandoned


class PrivateDirectory:
    """Mode 0700; `close` removes it with everything inside. Also a context manager.

    Raises:
        EndpointError: it can't be made.
    """

    def __init__(self) -> None:
        root = _root()
        _sweep(root)
        unborn = _made(root)
        self._descriptor: int | None = os.open(unborn, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self.path = unborn.rename(root / (_PREFIX + unborn.name.removeprefix(_UNBORN)))

    def endpoint(self, name: str) -> str:
        """An ipc endpoint in the directory. ValueError for a name that is no plain file name of MAX_NAME characters."""
        if not name.isascii() or not name.isidentifier() or len(name) > MAX_NAME:
            raise ValueError(f"{name!r} is not a socket name; expected letters, digits and _")
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Removes the directory. Again does nothing."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def private_directory() -> PrivateDirectory:
    """A fresh private directory in the temporary folder, or in /tmp where that folder's path is long (macOS)."""
    return PrivateDirectory()


def _made(root: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_UNBORN, dir=root))
    except OSError as error:
        raise EndpointError(
            f"can't create a directory for sockets in {root}: {error.strerror}; free some space, or"
            " set TMPDIR to another folder"
        ) from None


def _root() -> Path:
    try:
        root = Path(tempfile.gettempdir()).absolute()
    except OSError:  # no file can be written in any; a directory may still be made
        return Path("/tmp")
    longest = root / (_PREFIX + "x" * 8) / ("x" * MAX_NAME)
    return root if len(os.fsencode(longest)) <= MAX_PATH else Path("/tmp")


def _sweep(root: Path) -> None:
    """Removes the directories of makers that are gone, whose locks are free."""
    for left in root.glob(_PREFIX + "*"):
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # not ours, or gone since
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(left)
        except OSError:  # held by a living maker, or holds more than was made here
            continue
        finally:
            os.close(descriptor)


def _empty(left: Path) -> None:
    """Removes the sockets, locks and workers' logs in a directory, and then it; with anything else in it it stays."""
    for entry in left.iterdir():
        if entry.is_socket() or entry.suffix in (".lock", ".log"):
            entry.unlink()
    left.rmdir()
