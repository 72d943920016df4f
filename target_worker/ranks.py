"""The ranks of a sharded target: rank 0 leads and serves, the others run every forward that it runs.

Rank 0 (`RankLeader`) sends its address through the collective, so that the launcher need not know it. From then on the
ranks exchange messages by ZeroMQ. The other ranks (`follow`) load and check the model like rank 0, and then run what
rank 0 sends. They know nothing of requests, of how tokens are chosen, or of the orchestrator.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import zmq
from msgspec.structs import replace

from outrider import __version__
from outrider.engine import memory
from outrider.engine.kv_cache import ModelRows
from outrider.engine.load_checks import open_kv_cache, probe_abilities
from outrider.engine.loading import LoadedModel, load
from outrider.engine.ranks import MirroredKVCache, RankFollower, Ranks
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import OutriderError, WorkerError
from outrider.protocol.messages import (
    Fault,
    KvMemory,
    Message,
    Ping,
    Pong,
    RankHello,
    Shutdown,
    TextChange,
    TextForward,
    Welcome,
)
from outrider.target_worker.rank_link import LocalRanks, RankLink, own_address

log = logging.getLogger(__name__)

FORWARDS_PER_CACHE_CLEAR = 256
ANSWER_TIMEOUT_MS = 10_000
SHUTDOWN_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_SECONDS = 30.0


class RankLeader(RankLink):
    """Rank 0 of `ranks`; `local`: the ranks that it started itself. `ranks_here`: the number on this machine."""

    def __init__(self, ranks: Ranks, local: LocalRanks | None = None) -> None:
        """Waits until all ranks have joined the collective. Raises WorkerError if no socket can be opened."""
        super().__init__(zmq.ROUTER, ranks, local.kill if local is not None else lambda: None)
        self._local, self.ranks_here = local, 1
        address = own_address()
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise WorkerError(
                f"rank 0 can't listen at {address} ({error}); expected an address of this host first in the hostfile"
            ) from None
        # The collective gives the key to ranks only, so only ranks are admitted.
        ranks.broadcast(json.dumps([address, port, self._key]).encode())
        if local is not None:
            local.remove_hostfile()

    @property
    def note(self) -> str:
        return f"{self.ranks.size} ranks, {self.ranks_here} on this machine"

    def load(self, model: str, report: Callable[[str], None]) -> LoadedModel:
        """Loads this rank's part. Raises OutriderError if a rank can't load its part, or differs from rank 0."""
        folder = Path(model)
        report(f"waiting for {self.ranks.size - 1} more ranks")
        self._hello = _make_hello(self.ranks, folder)
        self.admit(self._hello)
        return load(folder, progress=report, ranks=self.ranks)

    def open_shared_kv_cache(self, model: LoadedModel) -> MirroredKVCache:
        """Opens a KV cache that all ranks share. Raises WorkerError if the ranks measured different abilities."""
        own = open_kv_cache(model)
        self.receive_hellos(replace(self._hello, found=_describe_abilities(model, own)))
        return MirroredKVCache(own, self.ranks, self.broadcast, self.ranks_here)

    def admit(self, own: RankHello) -> None:
        """Waits until all ranks have joined and match `own`, then lets them load the model. Sets `ranks_here`."""
        self.ranks_here += sum(other.host == own.host for other in self.receive_hellos(own))
        self.broadcast(Welcome("rank"))

    def receive_hellos(self, own: RankHello) -> list[RankHello]:
        """Waits for each other rank's hello, and returns them.

        Raises:
            WorkerError: a rank failed, or it differs from `own`.
        """
        others = []
        for _ in range(1, self.ranks.size):
            identity, *frames = self._socket.recv_multipart()
            (message,) = decode_all(frames)
            if isinstance(message, Fault):
                raise WorkerError(f"rank {identity.decode()}: {message.message}")
            if not isinstance(message, RankHello):
                raise WorkerError(f"a rank began with {type(message).__name__}; expected RankHello: restart all ranks")
            _require_same(own, message)
            others.append(message)
        return others

    def broadcast(self, *messages: Message) -> None:
        """Sends messages to all ranks, in this order."""
        frames = encode_all(messages)
        for rank in range(1, self.ranks.size):
            self._socket.send_multipart([b"%d" % rank, *frames])

    def check_ranks(self) -> None:
        """Returns when all ranks have handled all messages; ends all ranks if one is lost.

        The loss of another rank may fail a forward on rank 0, and is then no request's fault.
        """
        self.broadcast(Ping(0))
        if not self._wait_for_answers(Pong, ANSWER_TIMEOUT_MS):
            self._exit_after_loss()

    def close(self) -> None:
        """Shuts the other ranks down, and waits a while for their answers."""
        self.expect_end()
        if self._local is not None:
            self._local.expect_end()
        with suppress(zmq.ZMQError):
            self.broadcast(Shutdown())
            self._wait_for_answers(Shutdown, SHUTDOWN_TIMEOUT_MS)
        super().close()
        if self._local is not None:
            self._local.close()

    def _wait_for_answers(self, kind: type[Message], wait_ms: int) -> bool:
        """Waits until each rank has sent such a message; returns False if no message comes for `wait_ms`."""
        left = self.ranks.size - 1
        while left:
            if not self._socket.poll(wait_ms):
                return False
            left -= isinstance(decode_all(self._socket.recv_multipart()[1:])[0], kind)
        return True


def _require_same(own: RankHello, other: RankHello) -> None:
    """Raises WorkerError if this rank can't work with rank 0."""
    for what, mine, theirs in (
        ("number of ranks", own.size, other.size),
        ("releases", own.runs, other.runs),
        ("weights", own.weights[:12], other.weights[:12]),
        ("abilities of the model", own.found, other.found),
    ):
        if mine != theirs:
            raise WorkerError(
                f"rank {other.rank} and rank 0 differ in the {what}: {theirs} and {mine}; expected the same, on"
                " machines of the same kind"
            )


class RankMember(RankLink):
    """Another rank's side."""

    def __init__(self, ranks: Ranks) -> None:
        """Waits until all ranks have joined the collective. Raises WorkerError if rank 0 can't be reached."""
        super().__init__(zmq.DEALER, ranks)
        address, port, key = json.loads(ranks.broadcast(b""))
        self._socket.setsockopt(zmq.IDENTITY, b"%d" % ranks.rank)
        self._socket.curve_serverkey = key.encode()
        self._socket.connect(f"tcp://{address}:{port}")
        if not self._joined.acquire(timeout=CONNECT_TIMEOUT_SECONDS):
            raise WorkerError(
                f"rank 0 can't be reached at {address}; expected an address that all hosts can connect to"
            )

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
        """Shuts this rank down."""
        self.expect_end()
        if not self._socket.closed:
            self.send(Shutdown())
        super().close()

    def failed(self, error: OutriderError) -> int:
        """Sends rank 0 the error, and waits a while so that it can report it. Returns the exit code."""
        log.error("%s", error)
        self.expect_end()
        self.send(Fault(None, str(error)))
        self._socket.poll(SHUTDOWN_TIMEOUT_MS)
        self.close()
        return error.exit_code


def follow(ranks: Ranks, model: str) -> int:
    """Follows rank 0 until it ends; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process at once, even in a collective
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 shuts down, and this rank with it
    member = RankMember(ranks)
    try:
        folder = Path(model)
        hello = _make_hello(ranks, folder)
        member.enter(hello)
        loaded = load(folder, ranks=ranks)
        kv_cache = open_kv_cache(loaded)
        member.send(replace(hello, found=_describe_abilities(loaded, kv_cache)))
    except OutriderError as error:
        return member.failed(error)
    _serve(member, loaded, kv_cache)
    member.close()
    return 0


def _make_hello(ranks: Ranks, folder: Path) -> RankHello:
    """Returns what must be equal on all ranks, before any loads."""
    runs = f"outrider {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return RankHello(ranks.rank, ranks.size, socket.gethostname(), runs, model_digest(folder))


def _describe_abilities(model: LoadedModel, kv_cache: ModelRows) -> str:
    """Returns what must be equal on all ranks once they have loaded and checked the model."""
    sizes = model.vocab_size, model.context_length, model.parameters, model.weight_bytes
    forwards = "share a forward" if kv_cache.together else "have separate forwards"
    return f"{sizes}, {probe_abilities(model)}, texts {forwards}"


def _serve(member: RankMember, model: LoadedModel, kv_cache: ModelRows) -> None:
    follower, forwards = RankFollower(kv_cache, member.ranks), 0
    while True:
        for message in member.receive():
            match message:
                case TextForward():
                    follower.apply(message)
                    forwards += 1
                    if forwards % FORWARDS_PER_CACHE_CLEAR == 0:
                        mx.clear_cache()
                case TextChange():
                    follower.apply(message)
                case KvMemory(limit=limit):
                    memory.set_limits(model.weight_bytes, limit)
                case Ping(serial=serial):
                    mx.eval(kv_cache.state())
                    member.send(Pong(serial, forwards))
                case Shutdown():
                    return
                case _:
                    log.warning("a rank can't handle %s", type(message).__name__)
