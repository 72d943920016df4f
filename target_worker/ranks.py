"""What each rank of a sharded target does: rank 0 leads and serves, the others make every forward that it makes.

A follower does what rank 0 does up to rank 0's first text, and then what rank 0 sends. Knows nothing of requests, of
how tokens are chosen, or of the orchestrator.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from outrider.engine import memory
from outrider.engine.kv_cache import KVCache
from outrider.engine.load_checks import abilities, open_kv_cache
from outrider.engine.loading import LoadedModel, find, load
from outrider.engine.ranks import MirroredKVCache, RankFollower, Ranks
from outrider.protocol.digest import digest
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Hello, KvMemory, Ping, Pong, RankHello, Shutdown, TextChange, TextForward
from outrider.protocol.version import PACKAGE_VERSION
from outrider.target_worker.rank_link import LocalRanks, RankLeader, RankMember

log = logging.getLogger(__name__)

CLEAR_EVERY = 256  # forwards


class RankZero:
    """Rank 0 of `ranks`; `local`: those that it started itself."""

    def __init__(self, ranks: Ranks, local: LocalRanks | None) -> None:
        """Raises WorkerError: rank 0 can't listen for the others."""
        self.ranks = ranks
        self.leader = RankLeader(ranks, local.kill if local is not None else lambda: None)
        self._local = local
        if local is not None:
            local.met()

    @property
    def note(self) -> str:
        return f"{self.ranks.size} ranks, {self.leader.here} on this machine"

    def load(self, model: str, tell: Callable[[str], None]) -> LoadedModel:
        """Loads this rank's part. Raises OutriderError: a rank can't load its part, or runs something else."""
        folder = find(model, tell)
        tell(f"waiting for {self.ranks.size - 1} more ranks")
        self.leader.admit(_hello(self.ranks, folder))
        return load(folder, progress=tell, ranks=self.ranks)

    def texts(self, name: str, model: LoadedModel) -> KVCache:
        """A KV cache that all ranks share. Raises ModelError: the ranks measured different abilities."""
        own = open_kv_cache(model)
        self.leader.agree(_found(self.ranks, name, model, own))
        return MirroredKVCache(own, self.ranks, self.leader.broadcast, self.leader.here)

    def close(self) -> None:
        """Ends the others in order."""
        if self._local is not None:
            self._local.expect_end()
        self.leader.close()
        if self._local is not None:
            self._local.close()


def follow(ranks: Ranks, model: str) -> int:
    """Follows rank 0 until it ends; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, in a collective too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends in order, and this one with it
    member = RankMember(ranks)
    try:
        folder = find(model, log.info)
        member.enter(_hello(ranks, folder))
        loaded = load(folder, ranks=ranks)
        kv_cache = open_kv_cache(loaded)
        member.send(_found(ranks, model, loaded, kv_cache))
    except OutriderError as error:
        return member.failed(error)
    _serve(member, loaded, kv_cache)
    member.close()
    return 0


def _hello(ranks: Ranks, folder: Path) -> RankHello:
    """What all ranks must have in common, before any loads."""
    runs = f"outrider {PACKAGE_VERSION}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return RankHello(ranks.rank, ranks.size, socket.gethostname(), runs, digest(folder))


def _found(ranks: Ranks, name: str, model: LoadedModel, kv_cache: KVCache) -> Hello:
    """What this rank holds and has measured; the note says how texts are held."""
    return Hello(
        "target",
        f"rank {ranks.rank}",
        0,
        os.getpid(),
        "mlx",
        name,
        model.vocab_size,
        model.context_length,
        model.parameters,
        model.weight_bytes,
        "texts share a forward" if kv_cache.together else "texts one after the other",
        abilities(model),
    )


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
