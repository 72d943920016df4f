"""CURVE keys, and the folder that keeps them.

A key is 32 bytes, written in base64 on one line, as WireGuard writes its own. `Keyring`: a folder that only its owner
may enter, with three files, a line for each entry: `secret` holds the own secret key, `allowed` a role, a key and a
name, `servers` a place and a key. Files that others could have read or written are refused. Opens no socket; who may
connect with a key is for `orchestrator.auth` to decide.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from outrider.protocol.errors import KeyFault

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An identity: the `public` key is for everybody, the `secret` one for its owner."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """With whose key an endpoint is served, and the name of the ZAP `domain` whose keys are let in."""

    own: KeyPair
    domain: str


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Who connects, and the public key of the `server` that it must turn out to be."""

    own: KeyPair
    server: str


def make_pair() -> KeyPair:
    """A new pair."""
    return pair_of(from_zmq(zmq.curve_keypair()[1]))


def pair_of(secret: str) -> KeyPair:
    """The pair that this secret key belongs to."""
    return KeyPair(from_zmq(zmq.curve_public(z85.encode(raw(secret)))), secret)


def parse_key(text: str) -> str:
    """The key as it is written everywhere. Raises KeyFault when `text` is none."""
    try:
        bare = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        bare = b""
    if len(bare) != KEY_BYTES:
        raise KeyFault(
            f"{text.strip()[:60]!r} is not a key; expected 44 characters, as `outrider keys show` prints them"
        )
    return base64.b64encode(bare).decode()


def raw(key: str) -> bytes:
    """A key's bytes, as ZeroMQ takes them."""
    return base64.b64decode(key)


def from_zmq(key: bytes) -> str:
    """The key that ZeroMQ names in its Z85, half of whose signs a shell takes for its own."""
    return base64.b64encode(z85.decode(key)).decode()


def key_shown(frame: zmq.Frame) -> str:
    """The key of this message's sender; empty: none was asked for."""
    try:
        return from_zmq(str(frame.get("User-Id")).encode())
    except zmq.ZMQError:
        return ""


CLIENT, DRAFTER, PREFILL = ROLES = ("client", "drafter", "prefill")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class AllowedKey:
    """Whoever has the secret of `key` may ask (client), draft (drafter) or read prompts for the target (prefill)."""

    role: str
    key: str
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.key} {self.name}"


@dataclass(frozen=True, slots=True)
class KnownServer:
    """The server at `place` (HOST, HOST:PORT, or a name) has this `key`."""

    place: str
    key: str

    def __str__(self) -> str:
        return f"{self.place} {self.key}"


def default_folder() -> Path:
    """Where a user's keys lie unless something else is said."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "outrider" / "keys"


class Keyring:
    """The keys in `folder`; nothing is read before it is asked for.

    Raises:
        KeyFault: of every method: something is missing, unreadable, or open to others.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self.allowed_file = self.folder / "allowed"
        self._secret = self.folder / "secret"
        self._servers = self.folder / "servers"

    def make(self, anew: bool = False) -> KeyPair:
        """A pair of one's own, kept from now on. `anew`: in the place of the one there is."""
        pair = make_pair()
        if self.has_own and not anew:
            raise KeyFault(f"{self._secret} already holds a key; --force replaces it")
        self._write(self._secret, [pair.secret])
        return pair

    @property
    def has_own(self) -> bool:
        return self._secret.exists()

    def own(self) -> KeyPair:
        """The pair that was made here."""
        found = list(self._lines(self._secret))
        if not found:
            raise KeyFault(f"there is no key in {self.folder}; create one with `outrider keys make`")
        if len(found) != 1:
            raise KeyFault(f"{self._secret} holds {len(found)} lines; expected one secret key")
        try:
            return pair_of(parse_key(found[0]))
        except KeyFault:  # whose words would tell the line
            raise KeyFault(f"{self._secret} holds no key; expected one that `outrider keys make` wrote") from None

    def allowed(self) -> tuple[AllowedKey, ...]:
        """Who is let in, in the order in which they were allowed."""
        found = []
        for line in self._lines(self.allowed_file):
            role, key, name = (*line.split(None, 2), "", "")[:3]
            if role not in ROLES or not key:
                raise KeyFault(f"{self.allowed_file} has the line {line[:60]!r}; expected ROLE KEY NAME")
            found.append(AllowedKey(role, parse_key(key), name))
        return tuple(found)

    def allow(self, one: AllowedKey) -> None:
        """Lets `one` in, by this name from now on."""
        others = [other for other in self.allowed() if (other.role, other.key) != (one.role, one.key)]
        taken = next((other for other in others if other.name == one.name and other.key != one.key), None)
        if taken is not None:
            raise KeyFault(f"the name {one.name} is that of the {taken.role} {taken.key}; choose another, or revoke it")
        self._write(self.allowed_file, [*map(str, others), str(one)])

    def revoke(self, key_or_name: str) -> list[AllowedKey]:
        """Lets a key, or whoever has the name, in no more; what was taken away."""
        allowed = self.allowed()
        gone = [one for one in allowed if key_or_name in (one.key, one.name)]
        if not gone:
            raise KeyFault(f"no allowed key is called {key_or_name!r}; `outrider keys list` lists them all")
        self._write(self.allowed_file, [str(one) for one in allowed if one not in gone])
        return gone

    def servers(self) -> tuple[KnownServer, ...]:
        """The servers whose keys are known."""
        found = []
        for line in self._lines(self._servers):
            place, _, key = line.partition(" ")
            found.append(KnownServer(place, parse_key(key)))
        return tuple(found)

    def trust(self, server: KnownServer) -> None:
        """Takes whoever has this key for the server at that place from now on."""
        others = [str(other) for other in self.servers() if other.place != server.place]
        self._write(self._servers, [*others, str(server)])

    def forget(self, place: str) -> None:
        """Knows no key of the server at that place any more."""
        left = [server for server in self.servers() if server.place != place]
        if len(left) == len(self.servers()):
            raise KeyFault(f"no trusted key for a server at {place!r}; `outrider keys list` lists them all")
        self._write(self._servers, list(map(str, left)))

    def _lines(self, path: Path) -> Iterator[str]:
        """What is written there; nothing where there is no such file."""
        try:
            self._check(self.folder, "700")
            self._check(path, "600")
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFault(f"{path} can't be read ({error}); expected a file of `outrider keys`") from None
        yield from filter(None, map(str.strip, lines))

    def _check(self, path: Path, mode: str) -> None:
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise KeyFault(f"{path} belongs to another user; expected a file of your own (--keys sets the folder)")
        if found.st_mode & _OTHERS:
            raise KeyFault(
                f"{path} can be read by other users (mode {stat.S_IMODE(found.st_mode):o}); close it"
                f" with `chmod {mode} {path}`,"
                " and create a new key if it may have been read"
            )

    def _write(self, path: Path, lines: Sequence[str]) -> None:
        """Writes the file whole or not at all, so that a reader meanwhile reads the old one."""
        part = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check(self.folder, "700")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise KeyFault(f"{path} can't be written ({error.strerror}); expected a folder of your own") from None
