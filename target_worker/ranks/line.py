"""What lies between the ranks of one target: how they find each other, what they say, and what ends all of them.

Rank 0 tells where it listens through the collective, so that whatever started the ranks need not know; from then on
they speak by ZeroMQ. A rank that waits in a collective hears nothing, not even that another has died: a second thread
watches a connection between the two, and ends the process with it. Knows nothing of texts.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

from outrider.engine.ranks import Ranks
from outrider.protocol.errors import WorkerError

FAREWELL_MS = 5_000
# A host that is gone without a word is missed after 2 s of silence and four questions, a second each.
IDLE = getattr(socket, "TCP_KEEPIDLE", 0x10)  # macOS has it by another name
KEPT_ALIVE = {IDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 4}

log = logging.getLogger(__name__)


def own_address() -> str:
    """Where other ranks reach this host: what the launcher said, else what it is called."""
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if name in os.environ:
            return os.environ[name].partition(":")[0]
    with suppress(OSError, ValueError, LookupError):
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as file:
            first = json.load(file)[0]
        return str(first if isinstance(first, str) else first[0]).rpartition(":")[0]
    return socket.gethostbyname(socket.gethostname())


class Line:
    """A rank's end of what is between ranks: a socket for words, and a connection whose end is another rank's.

    `when_lost` is done before this process ends with another rank.
    """

    def __init__(self, kind: int, ranks: Ranks, when_lost: Callable[[], None] = lambda: None) -> None:
        self.ranks = ranks
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 500)
        key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._key, self._socket.curve_publickey = key.decode(), key
        self._lifelines: list[socket.socket] = []
        self._ending, self._when_lost = False, when_lost

    def end(self) -> None:
        """From now on nobody minds who goes."""
        self._ending = True

    def close(self) -> None:
        self.end()
        self._socket.close()
        for lifeline in self._lifelines:
            with suppress(OSError):
                lifeline.shutdown(socket.SHUT_RDWR)

    def _watch(self, lifeline: socket.socket) -> None:
        """From now on the end of this connection ends this process, whatever its first thread waits for."""
        lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEPT_ALIVE.items():
            lifeline.setsockopt(socket.IPPROTO_TCP, option, value)
        self._lifelines.append(lifeline)
        threading.Thread(target=self._wait_for_end, args=(lifeline,), daemon=True, name="rank").start()

    def _wait_for_end(self, lifeline: socket.socket) -> None:
        with lifeline, suppress(OSError):
            lifeline.recv(1)
        if not self._ending:
            self._lose()

    def _lose(self) -> None:
        log.error("rank %d of %d lost another rank; all ranks end", self.ranks.rank, self.ranks.size)
        self._when_lost()
        os._exit(WorkerError.exit_code)


def name_of(rank: int) -> bytes:
    """A rank's routing id."""
    return str(rank).encode()
