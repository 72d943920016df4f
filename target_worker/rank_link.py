"""The processes of the ranks of one target: how they find each other, and how they end together.

Knows nothing of messages, and does not import MLX, because a process starts its ranks first.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from outrider.protocol.endpoints import receive_event
from outrider.protocol.errors import EndpointError, WorkerError

if TYPE_CHECKING:
    from outrider.engine.ranks import Ranks

RANK_VARIABLE, HOSTFILE_VARIABLE = "MLX_RANK", "MLX_HOSTFILE"
EXIT_TIMEOUT_SECONDS = 5.0
# A lost host, or a process that was stopped, is noticed after ten seconds.
HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 1_000, 10_000
_OPENED, _CLOSED = (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED), zmq.EVENT_DISCONNECTED
_JOINED, _STOPPED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_MONITOR_STOPPED

log = logging.getLogger(__name__)


class LocalRanks:
    """Ranks 1 to `size` - 1 on this machine, each this program with `arguments`; this process becomes rank 0. Other
    ranks are started by mlx.launch.

    They form MLX's ring over loopback, and find each other by a file of addresses. Each ends when its stdin closes, and
    so with rank 0, however that ends.
    """

    def __init__(self, size: int, arguments: Sequence[str], inherited: Sequence[int]) -> None:
        """`inherited`: further descriptors for the ranks. Raises WorkerError if a rank can't be started."""
        self._ending = False
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        hosts = Path(self._folder.name, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]), encoding="utf-8")
        os.environ.update({HOSTFILE_VARIABLE: str(hosts), RANK_VARIABLE: "0"})
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-P", "-m", "outrider.target_worker", *arguments, "--parent-fd", "0"]
        try:
            for rank in range(1, size):
                environment = {**os.environ, RANK_VARIABLE: str(rank)}
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=inherited)
                self._processes.append(process)
        except OSError as error:
            self.kill()
            raise WorkerError(f"a rank can't be started ({error}); expected {sys.executable} to run") from None
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank {rank}").start()

    def remove_hostfile(self) -> None:
        """Removes the file of addresses, once all ranks have found each other."""
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends the ranks at once, including suspended ones."""
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def expect_end(self) -> None:
        """Allows the ranks to end from now on."""
        self._ending = True

    def close(self) -> None:
        """Waits until the ranks end, and kills those that don't."""
        for process in self._processes:
            try:
                process.wait(EXIT_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Ends all ranks when one ends early, because others may wait for it in a collective forever."""
        code = process.wait()
        if not self._ending:
            log.error("rank %d ended with code %d; all ranks end", rank, code)
            self.kill()
            os._exit(WorkerError.exit_code)


def free_ports(count: int) -> list[int]:
    """Returns `count` free ports."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def own_address() -> str:
    """Returns this host's address for other ranks: the one that the launcher set, else that of the host's name.

    Raises EndpointError: the name has no address.
    """
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if name in os.environ:
            return os.environ[name].partition(":")[0]
    with suppress(OSError, ValueError, LookupError):
        with open(os.environ[HOSTFILE_VARIABLE], encoding="utf-8") as file:
            first = json.load(file)[0]
        return str(first if isinstance(first, str) else first[0]).rpartition(":")[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise EndpointError(
            f"this host's name {socket.gethostname()} has no address ({error.strerror}), which other ranks need; add it"
            " to /etc/hosts, or start the ranks with mlx.launch --hostfile"
        ) from None


class RankLink:
    """A rank's side: a socket for messages, whose connections close when another rank ends. A collective does not fail
    then, so a second thread watches the connections and ends the process when one closes, after calling `on_lost`."""

    def __init__(self, kind: int, ranks: Ranks, on_lost: Callable[[], None] = lambda: None) -> None:
        self.ranks = ranks
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS  # a TTL would end while a computer sleeps
        key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._key, self._socket.curve_publickey = key.decode(), key
        self._ending, self._when_lost = False, on_lost
        self._joined = threading.Semaphore(0)  # released for each rank that has connected
        events = sum(_OPENED) | _CLOSED | _JOINED | _STOPPED
        threading.Thread(target=self._watch, args=(self._socket.get_monitor_socket(events),), daemon=True).start()

    def expect_end(self) -> None:
        """Allows other ranks to end from now on."""
        self._ending = True

    def close(self) -> None:
        self.expect_end()
        self._socket.close()

    def _watch(self, monitor: zmq.Socket[Any]) -> None:
        """Ends this process when the connection of a rank closes, whatever its main thread waits for.

        Connections of strangers, which fail to join, may open and close.
        """
        opened = joined = 0
        while (event := receive_event(monitor)[0]) != _STOPPED:
            opened += (event in _OPENED) - (event == _CLOSED)
            if event == _JOINED:
                joined += 1
                self._joined.release()
            elif opened < joined and not self._ending:
                self._exit_after_loss()
        monitor.close(linger=0)

    def _exit_after_loss(self) -> None:
        log.error("rank %d of %d lost another rank; all ranks end", self.ranks.rank, self.ranks.size)
        self._when_lost()
        os._exit(WorkerError.exit_code)
