"""The connections between the ranks of one target: how they find each other, their messages, and their common end.

`LocalRanks`: further ranks on this machine, processes that rank 0 starts and that end with it. They form MLX's ring
over loopback, and find each other by a file of addresses. Other ranks are started by mlx.launch.

Rank 0 (`RankLeader`) sends its address through the collective, so that the launcher need not know it. From then on the
ranks use ZeroMQ. A rank that waits in a collective receives nothing, not even that another rank has died, so a second
thread watches a connection to rank 0 and ends the process with it. Knows nothing of texts, and does not import MLX,
because a process starts its ranks first.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ModelError, OutriderError, WorkerError
from outrider.protocol.messages import Fault, Message, Ping, Pong, RankHello, Shutdown, Welcome

if TYPE_CHECKING:
    from outrider.engine.ranks import Ranks

RANK, HOSTS = "MLX_RANK", "MLX_HOSTFILE"
END_SECONDS = 5.0
FAREWELL_MS = 5_000
# A lost host is noticed after 2 s of silence and four probes of a second each.
IDLE = getattr(socket, "TCP_KEEPIDLE", 0x10)  # macOS has another name for it
KEPT_ALIVE = {IDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 4}

log = logging.getLogger(__name__)


class LocalRanks:
    """Ranks 1 to `size` - 1, each this program with `arguments`; this process becomes rank 0.

    Each ends when rank 0's end of a pipe closes, however rank 0 ends.
    """

    def __init__(self, size: int, arguments: Sequence[str], inherited: Sequence[int]) -> None:
        """`inherited`: further descriptors for the ranks. Raises WorkerError if a rank can't be started."""
        self._ending = False
        theirs, self._lifeline = os.pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        hosts = Path(self._folder.name, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]), encoding="utf-8")
        os.environ.update({HOSTS: str(hosts), RANK: "0"})
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "outrider.target_worker", *arguments, "--parent-fd", str(theirs)],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, RANK: str(rank)},
                        pass_fds=[theirs, *inherited],
                    )
                )
        except OSError as error:
            self.kill()
            raise WorkerError(f"a rank can't be started ({error}); expected {sys.executable} to run") from None
        finally:
            os.close(theirs)
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank {rank}").start()

    def met(self) -> None:
        """Removes the file of addresses, once all ranks have found each other."""
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends the ranks at once, also suspended ones."""
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
                process.wait(END_SECONDS)
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
    """Returns this host's address for other ranks: the one that the launcher set, else that of the host's name."""
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if name in os.environ:
            return os.environ[name].partition(":")[0]
    with suppress(OSError, ValueError, LookupError):
        with open(os.environ[HOSTS], encoding="utf-8") as file:
            first = json.load(file)[0]
        return str(first if isinstance(first, str) else first[0]).rpartition(":")[0]
    return socket.gethostbyname(socket.gethostname())


class RankLink:
    """A rank's side: a socket for messages, and connections that close when another rank ends.

    `when_lost` is called before this process ends because another rank has ended.
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
        """Allows other ranks to end from now on."""
        self._ending = True

    def close(self) -> None:
        self.end()
        self._socket.close()
        for lifeline in self._lifelines:
            with suppress(OSError):
                lifeline.shutdown(socket.SHUT_RDWR)

    def _watch(self, lifeline: socket.socket) -> None:
        """Ends this process when the connection closes, whatever its main thread waits for."""
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
    """Returns a rank's routing id."""
    return str(rank).encode()


ANSWER_MS = 10_000
STRANGER_SECONDS = 5.0


class RankLeader(RankLink):
    """Rank 0's side."""

    def __init__(self, ranks: Ranks, when_lost: Callable[[], None] = lambda: None) -> None:
        """Waits until all ranks have joined the collective. Raises WorkerError if no socket can be opened."""
        super().__init__(zmq.ROUTER, ranks, when_lost)
        self._secret, address = secrets.token_bytes(16), own_address()
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{address}")
            self._listener = socket.create_server((address, 0))
        except (zmq.ZMQError, OSError) as error:
            raise WorkerError(
                f"rank 0 can't listen at {address} ({error}); expected an address of this host first in the hostfile"
            ) from None
        threading.Thread(target=self._accept_all, daemon=True, name="ranks").start()
        # The collective gives the key and the secret to ranks only, so only ranks are admitted.
        invitation = [address, port, self._listener.getsockname()[1], self._key, self._secret.hex()]
        ranks.broadcast(json.dumps(invitation).encode())
        self.here = 1

    def _accept_all(self) -> None:
        """Accepts one connection of each rank, and closes others."""
        left = self.ranks.size - 1
        with self._listener, suppress(OSError):
            while left:
                lifeline, _ = self._listener.accept()
                if self._knows(lifeline):
                    self._watch(lifeline)
                    left -= 1
                else:
                    lifeline.close()

    def _knows(self, lifeline: socket.socket) -> bool:
        lifeline.settimeout(STRANGER_SECONDS)
        try:
            received = lifeline.recv(len(self._secret), socket.MSG_WAITALL)
        except OSError:
            return False
        lifeline.settimeout(None)
        return secrets.compare_digest(received, self._secret)

    def admit(self, own: RankHello) -> None:
        """Waits for each rank's hello; sets `here`, the number of ranks on this machine.

        Raises:
            WorkerError: a rank runs other releases or weights.
        """
        hosts = [own.host]
        for message in self._from_all():
            if not isinstance(message, RankHello):
                raise WorkerError(f"a rank began with {type(message).__name__}; expected RankHello: restart all ranks")
            why = unlike(own, message)
            if why is not None:
                raise WorkerError(why)
            hosts.append(message.host)
        self.here = hosts.count(own.host)
        self.broadcast(Welcome("rank"))

    def agree(self, own: RankHello) -> None:
        """Waits until all ranks have loaded and checked the model. Raises ModelError if their results differ."""
        for message in self._from_all():
            if not isinstance(message, RankHello) or message.found != own.found:
                raise ModelError(
                    f"the ranks measured different abilities of the same model ({message} and {own}); expected"
                    " machines of the same kind"
                )

    def broadcast(self, *messages: Message) -> None:
        """Sends messages to all ranks, in this order."""
        frames = encode_all(messages)
        for rank in range(1, self.ranks.size):
            self._socket.send_multipart([name_of(rank), *frames])

    def assure(self) -> None:
        """Returns when all ranks have handled all messages; ends all ranks if one is lost.

        The loss of another rank may fail a forward on rank 0, and is then no request's fault.
        """
        self.broadcast(Ping(0))
        left = self.ranks.size - 1
        while left:
            if not self._socket.poll(ANSWER_MS):
                self._lose()
            left -= isinstance(decode_all(self._socket.recv_multipart()[1:])[0], Pong)

    def close(self) -> None:
        """Ends the other ranks in order, and waits a while for their answers."""
        self.end()
        with suppress(zmq.ZMQError):
            self.broadcast(Shutdown())
            left = self.ranks.size - 1
            while left and self._socket.poll(FAREWELL_MS):
                left -= isinstance(decode_all(self._socket.recv_multipart()[1:])[0], Shutdown)
        super().close()

    def _from_all(self) -> Iterable[Message]:
        """Yields the next message of each other rank. Raises WorkerError if one is a fault."""
        for _ in range(1, self.ranks.size):
            identity, *frames = self._socket.recv_multipart()
            (message,) = decode_all(frames)
            if isinstance(message, Fault):
                raise WorkerError(f"rank {identity.decode()}: {message.message}")
            yield message


def unlike(own: RankHello, other: RankHello) -> str | None:
    """Returns why this rank can't work with rank 0; None if it can."""
    for what, mine, theirs in (
        ("number of ranks", own.size, other.size),
        ("releases", own.runs, other.runs),
        ("weights", own.weights[:12], other.weights[:12]),
    ):
        if mine != theirs:
            return f"rank {other.rank} and rank 0 differ in the {what}: {theirs} and {mine}; expected the same"
    return None


class RankMember(RankLink):
    """Another rank's side."""

    def __init__(self, ranks: Ranks) -> None:
        """Waits until all ranks have joined the collective. Raises WorkerError if rank 0 can't be reached."""
        super().__init__(zmq.DEALER, ranks)
        address, port, door, key, secret = json.loads(ranks.broadcast(b""))
        self._socket.setsockopt(zmq.IDENTITY, name_of(ranks.rank))
        self._socket.curve_serverkey = key.encode()
        self._socket.connect(f"tcp://{address}:{port}")
        try:
            lifeline = socket.create_connection((address, door))
            lifeline.sendall(bytes.fromhex(secret))
        except OSError as error:
            raise WorkerError(
                f"rank 0 can't be reached at {address} ({error}); expected an address that all hosts can connect to"
            ) from None
        self._watch(lifeline)

    def enter(self, own: RankHello) -> None:
        """Returns when all ranks may load the model. Ends this process if rank 0 rejects a rank."""
        self.send(own)
        if not isinstance(self.receive()[0], Welcome):
            raise SystemExit(0)

    def send(self, message: Message) -> None:
        self._socket.send_multipart(encode_all([message]))

    def receive(self) -> list[Message]:
        """Returns rank 0's next messages. Waits."""
        return decode_all(self._socket.recv_multipart())

    def close(self) -> None:
        """Ends this rank in order."""
        self.end()
        if not self._socket.closed:
            self.send(Shutdown())
        super().close()

    def failed(self, error: OutriderError) -> int:
        """Sends rank 0 the error, and waits a while so that it can report it. Returns the exit code."""
        log.error("%s", error)
        self.end()
        self.send(Fault(name_of(self.ranks.rank).decode(), None, str(error)))
        self._socket.poll(FAREWELL_MS)
        self.close()
        return error.exit_code
