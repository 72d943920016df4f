"""How a server tells its clients apart: each request has a socket of its own, and their routing ids begin alike."""

from __future__ import annotations

import os

CLIENT_KEY_BYTES = 9


def client_key() -> bytes:
    """Begins the routing ids of one client, so that the server queues fairly by client and not by request."""
    return b"c" + os.urandom(CLIENT_KEY_BYTES - 1)  # a routing id must not begin with a zero byte


def client_of(routing_id: bytes) -> bytes:
    """Which client a routing id belongs to."""
    return routing_id[:CLIENT_KEY_BYTES]
