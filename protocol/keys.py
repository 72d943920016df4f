"""CURVE keys, and the folder that holds them.

A key is 32 bytes, written in base64 on one line, like WireGuard's. Opens no socket; `orchestrator.auth` decides what a
key may connect to.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import shlex
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from outrider.protocol.digest import replace_file, user_folder
from outrider.protocol.errors import KeyFault

KEY_BYTES = 32
CLIENT, DRAFTER, PREFILL = ROLES = ("client", "drafter", "prefill")
SERVER = "server"
_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair: the `public` key may be shared, the `secret` one stays with its owner."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The key pair of a connecting process, and the public key that the `server` must have."""

    own: KeyPair
    server: str


def make_pair() -> KeyPair:
    """Creates a new key pair."""
    return derive_pair(from_zmq(zmq.curve_keypair()[1]))


def derive_pair(secret: str) -> KeyPair:
    """Returns the pair of a secret key."""
    return KeyPair(from_zmq(zmq.curve_public(z85.encode(key_bytes(secret)))), secret)


def parse_key(text: str) -> str:
    """Returns the key in its canonical form. Raises KeyFault if `text` is not a key."""
    try:
        bare = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        bare = b""
    if len(bare) != KEY_BYTES:
        raise KeyFault(
            f"{text.strip()[:60]!r} is not a key; expected 44 characters, as `outrider keys show` prints them"
        )
    return base64.b64encode(bare).decode()


def key_bytes(key: str) -> bytes:
    """Returns a key's bytes, for ZeroMQ."""
    return base64.b64decode(key)


def from_zmq(key: bytes) -> str:
    """Converts a key from ZeroMQ's Z85, many of whose characters are special in a shell."""
    return base64.b64encode(z85.decode(key)).decode()


def sender_key(frame: zmq.Frame) -> str:
    """Returns the public key of a message's sender; "" if the endpoint requires none."""
    try:
        return from_zmq(str(frame.get("User-Id")).encode())
    except zmq.ZMQError:
        return ""


@dataclass(frozen=True, slots=True)
class AllowedKey:
    """A key and its `role`: client (sends requests), drafter, or prefill (reads prompts for the target); or server, to
    which this side connects, and whose `name` is HOST or HOST:PORT."""

    role: str
    key: str
    name: str

    @property
    def identity(self) -> tuple[str, str]:
        """What no two entries share: a key in its role, or the name of a server."""
        return self.role, self.name if self.role == SERVER else self.key

    def __str__(self) -> str:
        return f"{self.role} {self.key} {self.name}"


def default_folder() -> Path:
    """Returns the default folder of a user's keys."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "keys"


def check_private(path: Path, mode: str, what: str = "key", flag: str = "--keys") -> None:
    """Checks that only this user can read a file or enter a folder. Raises KeyFault or OSError.

    The error says how: `chmod` to `mode`, a new `what`, or the `flag` that sets the folder.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise KeyFault(f"{path} belongs to another user; expected a file of your own ({flag} sets the folder)")
    if status.st_mode & _OTHER_USERS:
        raise KeyFault(
            f"{path} can be read by other users (mode {stat.S_IMODE(status.st_mode):o}); run `chmod {mode} {path}`,"
            f" and create a new {what} if it may have been read"
        )


class Keyring:
    """The keys in `folder`, which only its owner may enter, in two files: `secret` has the user's secret
    key, `allowed` a line for each `AllowedKey`: role, key and name. Files are read when they are needed.

    Raises:
        KeyFault: raised by every method: a file is missing, unreadable or readable by other users.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self._secret, self.allowed_file = self.folder / "secret", self.folder / "allowed"

    def command(self, words: str) -> str:
        """Returns a command line of `outrider keys` for this folder, which messages recommend."""
        where = "" if self.folder == default_folder() else f" --keys {shlex.quote(str(self.folder))}"
        return f"`outrider keys {words}{where}`"

    def make(self, overwrite: bool = False) -> KeyPair:
        """Creates and saves the user's key pair. `overwrite`: replace an existing one."""
        pair = make_pair()
        with self._locked():
            if self.has_own and not overwrite:
                raise KeyFault(f"{self._secret} already has a key; --force replaces it")
            self._write(self._secret, [pair.secret])
        return pair

    @property
    def has_own(self) -> bool:
        return os.path.exists(self._secret)

    def own(self) -> KeyPair:
        """Returns the user's key pair."""
        lines = list(self._lines(self._secret))
        if not lines:
            raise KeyFault(f"there is no key in {self.folder}; create one with {self.command('make')}")
        if len(lines) != 1:
            raise KeyFault(f"{self._secret} has {len(lines)} lines; expected one secret key")
        try:
            return derive_pair(parse_key(lines[0]))
        except KeyFault:  # its message would show the line, which may be a secret
            raise KeyFault(f"{self._secret} holds no key; expected a file of {self.command('make')}") from None

    def allowed(self) -> tuple[AllowedKey, ...]:
        """Returns all entries, in the order in which they were made."""
        keys = []
        for line in self._lines(self.allowed_file):
            role, key, name = (*line.split(None, 2), "", "")[:3]
            if role not in (*ROLES, SERVER) or not key:
                raise KeyFault(f"{self.allowed_file} has the line {line[:60]!r}; expected ROLE KEY NAME")
            keys.append(AllowedKey(role, parse_key(key), name))
        return tuple(keys)

    def servers(self) -> dict[str, str]:
        """Returns the keys of the trusted servers, by HOST or HOST:PORT."""
        return {entry.name: entry.key for entry in self.allowed() if entry.role == SERVER}

    def allow(self, new: AllowedKey) -> None:
        """Allows a key under its name, or trusts a server; replaces an earlier entry for it."""
        if not new.name.isprintable() or new.name.split() != [new.name]:
            raise KeyFault(f"{new.name!r} is not a valid name; expected one word of printable characters")
        with self._locked():
            others = [other for other in self.allowed() if other.identity != new.identity]
            for other in others:
                if other.name == new.name and other.key != new.key and SERVER not in (other.role, new.role):
                    raise KeyFault(
                        f"the key {other.key} ({other.role}) has the name {new.name}; choose another name, or revoke it"
                    )
            self._write(self.allowed_file, [*map(str, others), str(new)])

    def revoke(self, key_or_name: str, roles: Collection[str] = ROLES) -> list[AllowedKey]:
        """Removes the entries of a key or a name in these roles, and returns them."""
        with self._locked():
            allowed = self.allowed()
            revoked = [entry for entry in allowed if key_or_name in (entry.key, entry.name) and entry.role in roles]
            if not revoked:
                where = f"{key_or_name!r} in the role {' or '.join(roles)}"
                raise KeyFault(f"no key is called {where}; {self.command('list')} lists them all")
            self._write(self.allowed_file, [str(entry) for entry in allowed if entry not in revoked])
            return revoked

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one thread of one process at a time read and rewrite a file; the lock ends with its holder."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                check_private(self.folder, "700")
                yield
            finally:
                os.close(folder)
        except OSError as error:
            raise KeyFault(f"{self.folder} can't be used ({error.strerror}); expected a folder of your own") from None

    def _lines(self, path: Path) -> Iterator[str]:
        """Yields the lines of a file; none if there is no file."""
        try:
            check_private(path, "600")
            check_private(self.folder, "700")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, FileNotFoundError | NotADirectoryError) and not self.folder.is_file():
                return
            raise KeyFault(f"{path} can't be read ({error}); expected a file of `outrider keys`") from None
        yield from filter(None, map(str.strip, lines))

    def _write(self, path: Path, lines: Sequence[str]) -> None:
        replace_file(path, "".join(f"{line}\n" for line in lines), 0o600)
