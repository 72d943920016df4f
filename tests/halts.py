"""Real workers that stand still for a while: so what a test does in the middle of a text happens there at any pace."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.orchestrator.client.client import Client, Stream
from outrider.orchestrator.client.dialogue import Chunk

STILL_S, MOVING_S, SETTLE_S = 0.05, 0.01, 0.1


def pid_of(client: Client, role: str) -> int:
    """The process id of the first worker of this role."""
    return next(worker.pid for worker in client.stats().workers if worker.role == role)


@contextmanager
def still(pid: int) -> Iterator[None]:
    """A process that does nothing within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def runs_once_settled(client: Client) -> bool:
    """Whether requests run once the server has handled what a target sent before it stood still: a last token may be on
    its way while the text still counts as running."""
    generated, stats = -1, client.stats()
    while stats.active and stats.generated != generated:
        time.sleep(SETTLE_S)
        generated, stats = stats.generated, client.stats()
    return stats.active > 0


@contextmanager
def in_the_middle(client: Client, start: Callable[[], Stream]) -> Iterator[tuple[Stream, Iterator[Chunk]]]:
    """A text that has begun and is not over, for its target stands still within the block; one that was over before
    that is started again. Only for a cluster without other requests."""
    while True:
        stream = start()
        chunks = iter(stream)
        next(chunks)
        with still(pid_of(client, "target")):
            if runs_once_settled(client):
                yield stream, chunks
                return
        for _ in chunks:
            pass


@contextmanager
def slowed(pid: int, still_s: float = STILL_S, moving_s: float = MOVING_S) -> Iterator[None]:
    """A process that stands still nearly all the time: what it waits for is there sooner than on any machine."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            with still(pid):
                over.wait(still_s)
            over.wait(moving_s)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()
