"""The ranks of a sharded target: rank 0 leads and serves, the others run every forward that it runs.

A follower loads and checks the model like rank 0, and then does what rank 0 sends. It knows nothing of requests, of how
tokens are chosen, or of the orchestrator.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from msgspec.structs import replace

from outrider.engine import memory
from outrider.engine.kv_cache import KVCache
from outrider.engine.load_checks import abilities, open_kv_cache
from outrider.engine.loading import LoadedModel, find, load
from outrider.engine.ranks import MirroredKVCache, RankFollower, Ranks
from outrider.protocol.digest import digest
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import KvMemory, Ping, Pong, RankHello, Shutdown, TextChange, TextForward
from outrider.protocol.version import PACKAGE_VERSION
from outrider.target_worker.rank_link import LocalRanks, RankLeader, RankMember

log = logging.getLogger(__name__)

CLEAR_EVERY = 256  # forwards


class RankZero:
    """Rank 0 of `ranks`; `local`: the ranks that it started itself."""

    def __init__(self, ranks: Ranks, local: LocalRanks | None) -> None:
        """Raises WorkerError if rank 0 can't listen for the others."""
        self.ranks = ranks
        self.leader = RankLeader(ranks, local.kill if local is not None else lambda: None)
        self._local = local
        if local is not None:
            local.met()

    @property
    def note(self) -> str:
        return f"{self.ranks.size} ranks, {self.leader.here} on this machine"

    def load(self, model: str, report: Callable[[str], None]) -> LoadedModel:
        """Loads this rank's part. Raises OutriderError if a rank can't load its part, or differs from rank 0."""
        folder = find(model)
        report(f"waiting for {self.ranks.size - 1} more ranks")
        self._hello = _hello(self.ranks, folder)
        self.leader.admit(self._hello)
        return load(folder, progress=report, ranks=self.ranks)

    def texts(self, model: LoadedModel) -> KVCache:
        """Opens a KV cache that all ranks share. Raises ModelError if the ranks measured different abilities."""
        own = open_kv_cache(model)
        self.leader.agree(replace(self._hello, found=_found(model, own)))
        return MirroredKVCache(own, self.ranks, self.leader.broadcast, self.leader.here)

    def close(self) -> None:
        """Ends the other ranks in order."""
        if self._local is not None:
            self._local.expect_end()
        self.leader.close()
        if self._local is not None:
            self._local.close()


def follow(ranks: Ranks, model: str) -> int:
    """Follows rank 0 until it ends; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process at once, even in a collective
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends in order, and this rank with it
    member = RankMember(ranks)
    try:
        folder = find(model)
        hello = _hello(ranks, folder)
        member.enter(hello)
        loaded = load(folder, ranks=ranks)
        kv_cache = open_kv_cache(loaded)
        member.send(replace(hello, found=_found(loaded, kv_cache)))
    except OutriderError as error:
        return member.failed(error)
    _serve(member, loaded, kv_cache)
    member.close()
    return 0


def _hello(ranks: Ranks, folder: Path) -> RankHello:
    """Returns what must be equal on all ranks, before any loads."""
    runs = f"outrider {PACKAGE_VERSION}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return RankHello(ranks.rank, ranks.size, socket.gethostname(), runs, digest(folder))


def _found(model: LoadedModel, kv_cache: KVCache) -> str:
    """Returns what must be equal on all ranks once they have loaded and checked the model."""
    sizes = model.vocab_size, model.context_length, model.parameters, model.weight_bytes
    return f"{sizes}, {abilities(model)}, texts {'share a forward' if kv_cache.together else 'have separate forwards'}"


def _serve(member: RankMember, model: LoadedModel, kv_cache: KVCache) -> None:
    follower, forwards = RankFollower(kv_cache, member.ranks), 0
    while True:
        for message in member.receive():
            match message:
                case TextForward():
                    follower.forward(message)
                    forwards += 1
                    if forwards % CLEAR_EVERY == 0:
                        mx.clear_cache()
                case TextChange():
                    follower.change(message)
                case KvMemory(limit=limit):
                    memory.set_limits(model.weight_bytes, limit)
                case Ping(serial=serial):
                    mx.eval(kv_cache.state())
                    member.send(Pong("rank", serial, forwards))
                case Shutdown():
                    return
                case _:
                    log.warning("a rank can't handle %s", type(message).__name__)
