"""CURVE keys as they are written and handed around: 32 bytes each, in base64 on one line, as WireGuard writes its own.

Knows keys; knows nothing of the files they lie in (`keyring`) or of who may come in with one (`orchestrator.auth`).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from outrider.protocol.errors import KeyFault

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Who somebody is: the `public` key is for everybody, the `secret` one for nobody else."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """With whose key an endpoint is served, and the name of the `door` that visitors' keys have to open."""

    own: KeyPair
    door: str


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Who connects, and the public key of the `server` that it must turn out to be."""

    own: KeyPair
    server: str


def make_pair() -> KeyPair:
    """A pair that nobody has had before."""
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
    """The key that whoever sent this had to show; empty: nobody asked for one."""
    try:
        return from_zmq(str(frame.get("User-Id")).encode())
    except zmq.ZMQError:
        return ""
