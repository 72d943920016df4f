"""What a socket needs whose other end is on another machine, where a link breaks and nobody is told.

Both ends ask each other whether they are there, below our messages, and give a connection up that does not answer. Then
the end that connects tries again, a few times a second: so a link that is healed is back within that time, and not when
TCP next repeats itself, which is as much later as the cut was long.
"""

from __future__ import annotations

from typing import Any

import zmq

ASK_MS = 500
GIVE_UP_MS = 2000
"""A packet that is lost is sent again after some 200 ms, then after 400: a link that works is never silent so long."""
CONNECT_MS = 1000
AGAIN_MS, AGAIN_MOST_MS = 100, 400


def prepare(socket: zmq.Socket[Any]) -> None:
    """Before it is bound or connected; what was before keeps to what it was made with."""
    socket.heartbeat_ivl = ASK_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = GIVE_UP_MS
    socket.connect_timeout = CONNECT_MS
    socket.handshake_ivl = GIVE_UP_MS
    socket.reconnect_ivl = AGAIN_MS
    socket.reconnect_ivl_max = AGAIN_MOST_MS
    if socket.type == zmq.ROUTER:
        # Who comes again may come before its first connection is missed here; without this it would not be heard.
        socket.router_handover = True
