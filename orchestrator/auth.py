"""Which peers may connect, and which client a request comes from.

`CurveAuth`: the allow-list of the server's keyring, read again when it changes, less the keys refused since. ZeroMQ
asks it at each handshake, on a thread of its own. Knows keys and endpoints' roles; knows nothing of messages.

`client_key`: the common beginning of the routing ids of one client, whose requests have a socket each.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import KeyFault
from outrider.protocol.keys import CLIENT, DRAFTER, PREFILL, AllowedKey, Keyring, ServerKeys, from_zmq

log = logging.getLogger(__name__)

# Which roles an endpoint admits: all workers of other machines have one.
_ADMITTED = {CLIENT: (CLIENT,), DRAFTER: (DRAFTER, PREFILL)}


class CurveAuth:
    """Decides for all sockets of `context` that are bound with `keys`, from creation to `close`.

    Raises:
        KeyFault: there is no own key, or the keyring can't be used.
    """

    def __init__(self, context: zmq.Context[Any], keyring: Keyring) -> None:
        self.own = keyring.own()
        self._keyring = keyring
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._refused: dict[str, str] = {}
        self._allowed: tuple[AllowedKey, ...] = ()
        self._read()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        for role in _ADMITTED:
            self._authenticator.configure_curve_callback(role, self)

    def keys(self, role: str) -> ServerKeys:
        """What a socket is bound with, to admit the keys that are allowed this role; workers connect as drafters."""
        return ServerKeys(self.own, role)

    def refuse(self, key: str, why: str) -> None:
        """Refuses this key from now on, as long as this server runs; open connections stay. From any thread."""
        with self._lock:
            self._refused[key] = why
        log.warning("the key %s is now refused: %s", key, why)

    def is_allowed(self, role: str, key: str) -> bool:
        """Whether `key` is admitted as `role` now. From any thread."""
        with self._lock:
            try:
                self._read()
            except KeyFault as fault:
                log.error("no client is accepted: %s", fault)
                self._seen, self._allowed = None, ()
            allowed = any((one.role, one.key) == (role, key) for one in self._allowed)
            return allowed and key not in self._refused

    def callback(self, domain: str, key: bytes) -> bool:
        """The same as ZeroMQ's authentication asks it."""
        shown = from_zmq(key)
        let_in = any(self.is_allowed(role, shown) for role in _ADMITTED[domain])
        log.info("the key %s is %s as %s", shown, "let in" if let_in else "refused", domain)
        return let_in

    def close(self) -> None:
        """Admits no more keys."""
        self._authenticator.stop()

    def _read(self) -> None:
        seen = self._state()
        if seen != self._seen or seen is None:
            self._allowed, self._seen = self._keyring.allowed(), seen

    def _state(self) -> tuple[int, ...] | None:
        """What changes when the allow-list does; None: not known."""
        try:
            found = os.stat(self._keyring.allowed_file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def curve_auth_for(settings: ServeSettings, context: zmq.Context[Any]) -> CurveAuth | None:
    """What a server's endpoints ask keys by; None: only this machine reaches them, and no keys are wanted.

    Raises:
        KeyFault: they need one and the keyring has no own key, or can't be used.
    """
    asked = [endpoint for endpoint in (settings.endpoint, settings.workers_endpoint) if endpoint is not None]
    served = [endpoint for endpoint in asked if settings.asks_for_keys(endpoint)]
    if not served:
        return None
    try:
        return CurveAuth(context, Keyring(settings.keys))
    except KeyFault as fault:
        raise KeyFault(f"{served[0]} can't be served without keys: {fault}") from None


CLIENT_KEY_BYTES = 9


def client_key() -> bytes:
    """Begins the routing ids of one client, so that the server queues fairly by client and not by request."""
    return b"c" + os.urandom(CLIENT_KEY_BYTES - 1)  # a routing id must not begin with a zero byte


def client_of(routing_id: bytes) -> bytes:
    """Which client a routing id belongs to."""
    return routing_id[:CLIENT_KEY_BYTES]
