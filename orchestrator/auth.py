"""Decides which peers may connect, and which client a request comes from. Knows nothing of messages."""

from __future__ import annotations

import logging
import os
from typing import Any

import zmq

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import KeyFault
from outrider.protocol.keys import CLIENT, DRAFTER, PREFILL, Keyring, from_zmq

log = logging.getLogger(__name__)

# The roles that an endpoint admits, by the role it is bound with: all workers of other machines share one endpoint.
_ADMITTED_ROLES = {CLIENT: (CLIENT,), DRAFTER: (DRAFTER, PREFILL)}
CLIENT_ID_BYTES = 9


class CurveAuth:
    """Authenticates peers of all sockets of `context` that are bound with `own` keys, from creation to `close`.

    Admits the keys on the allow-list of the server's keyring, which is read each time, except for keys that were
    refused since. ZeroMQ calls it at each handshake, on its own thread.

    Raises:
        KeyFault: the server has no key, or the keyring can't be used.
    """

    def __init__(self, context: zmq.Context[Any], keyring: Keyring) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # deferred: imports asyncio

        self.own = keyring.own()
        self._keyring = keyring
        self._refused: set[str] = set()
        keyring.allowed()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        for role in _ADMITTED_ROLES:
            self._authenticator.configure_curve_callback(role, self)

    def refuse(self, key: str, why: str) -> None:
        """Refuses a key until this server ends; open connections stay open. May be called on any thread."""
        self._refused.add(key)
        log.warning("the key %s is now refused: %s", key, why)

    def is_allowed(self, role: str, key: str) -> bool:
        """Whether `key` is admitted as `role` now. May be called on any thread."""
        try:
            allowed = self._keyring.allowed()
        except KeyFault as fault:
            log.error("no key is accepted: %s", fault)
            return False
        return key not in self._refused and any((entry.role, entry.key) == (role, key) for entry in allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether a key is admitted; called by ZeroMQ's authentication at each handshake."""
        shown = from_zmq(key)
        admitted = any(self.is_allowed(role, shown) for role in _ADMITTED_ROLES[domain])
        log.info("the key %s is %s as %s", shown, "accepted" if admitted else "refused", domain)
        return admitted

    def close(self) -> None:
        """Admits no more keys."""
        self._authenticator.stop()


def create_curve_auth(settings: ServeSettings, context: zmq.Context[Any]) -> CurveAuth | None:
    """Returns the authentication of a server's endpoints, or None if none of them requires keys.

    Raises:
        KeyFault: an endpoint requires keys, and the server has none, or the keyring can't be used.
    """
    keyed = list(filter(settings.requires_keys, (settings.endpoint, settings.workers_endpoint)))
    if not keyed:
        return None
    try:
        return CurveAuth(context, Keyring(settings.keys))
    except KeyFault as fault:
        raise KeyFault(f"{keyed[0]} can't be served without keys: {fault}") from None


def new_client_id() -> bytes:
    """Returns a prefix for the routing ids of one client, which has a socket for each request, so that the server
    queues by client and not by request."""
    return b"c" + os.urandom(CLIENT_ID_BYTES - 1)  # a routing id must not begin with a zero byte


def client_id_of(routing_id: bytes) -> bytes:
    """Returns the client of a routing id."""
    return routing_id[:CLIENT_ID_BYTES]
