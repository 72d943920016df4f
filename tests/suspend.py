"""Suspends real worker processes, so that a test can act in the middle of a text on a machine of any speed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.orchestrator.client.client import Client, Stream
from outrider.orchestrator.client.dialogue import Chunk

SUSPENDED_S, RUNNING_S, SETTLE_S = 0.05, 0.01, 0.1


def pid_of(client: Client, role: str) -> int:
    """Returns the process id of the first worker with this role."""
    return next(worker.pid for worker in client.stats().workers if worker.role == role)


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspends a process (SIGSTOP) for the duration of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_active_once_settled(client: Client) -> bool:
    """Returns whether a request is still active after the server has handled all messages of a suspended target.

    The target may have sent the last token of a text just before it was suspended.
    """
    generated, stats = -1, client.stats()
    while stats.active and stats.generated != generated:
        time.sleep(SETTLE_S)
        generated, stats = stats.generated, client.stats()
    return stats.active > 0


@contextmanager
def suspended_text(client: Client, start: Callable[[], Stream]) -> Iterator[tuple[Stream, Iterator[Chunk]]]:
    """Starts a request, and suspends the target in the middle of its text for the duration of the block.

    If the text ends before the target is suspended, the request is started again. The cluster must have no other
    requests.
    """
    while True:
        stream = start()
        chunks = iter(stream)
        next(chunks)
        with suspended(pid_of(client, "target")):
            if is_active_once_settled(client):
                yield stream, chunks
                return
        for _ in chunks:
            pass


@contextmanager
def throttled(pid: int, suspended_s: float = SUSPENDED_S, running_s: float = RUNNING_S) -> Iterator[None]:
    """Slows a process down by suspending it most of the time, so that messages of other processes reach it in time."""
    over = threading.Event()

    def suspend_repeatedly() -> None:
        while not over.is_set():
            with suspended(pid):
                over.wait(suspended_s)
            over.wait(running_s)

    thread = threading.Thread(target=suspend_repeatedly)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
