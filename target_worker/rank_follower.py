"""What a rank other than rank 0 does: loads its part of the model, then makes every forward it is told.

It runs what rank 0 runs, up to where rank 0 opens its first text; knows nothing of requests, tokens' choice or the
orchestrator.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from outrider.engine import memory
from outrider.engine.abilities import abilities
from outrider.engine.kv_cache import KVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, find, load
from outrider.engine.mirrored_kv_cache import RankFollower
from outrider.engine.ranks import Ranks
from outrider.protocol.digest import digest
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Hello, KvMemory, Ping, Pong, RankHello, Shutdown, TextChange, TextForward
from outrider.protocol.version import PACKAGE_VERSION
from outrider.target_worker.rank_link import RankMember

log = logging.getLogger(__name__)

CLEAR_EVERY = 256  # forwards


def follow(ranks: Ranks, model: str) -> int:
    """Serves rank 0 until that one ends; the code to exit with."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, in a collective too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends in order, and this one with it
    member = RankMember(ranks)
    try:
        folder = find(model, log.info)
        member.enter(rank_hello(ranks, folder))
        loaded = load(folder, ranks=ranks)
        kv_cache = open_kv_cache(loaded)
        member.send(rank_found(ranks, model, loaded, kv_cache))
    except OutriderError as error:
        return member.failed(error)
    _serve(member, loaded, kv_cache)
    member.close()
    return 0


def rank_hello(ranks: Ranks, folder: Path) -> RankHello:
    """Who this rank is, before it loads."""
    runs = f"outrider {PACKAGE_VERSION}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return RankHello(ranks.rank, ranks.size, socket.gethostname(), runs, digest(folder))


def rank_found(ranks: Ranks, name: str, model: LoadedModel, kv_cache: KVCache) -> Hello:
    """What this rank holds, and what it found the model able to do; in the note, how texts are held."""
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
