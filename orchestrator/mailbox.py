"""A queue between two threads of the orchestrator that a ZeroMQ poller can wait on."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import zmq

T = TypeVar("T")
_names = itertools.count()


class Mailbox(Generic[T]):
    """Threads put, one other thread takes. Register `wake` with the taker's poller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._putting = threading.Lock()
        address = f"inproc://mailbox-{next(_names)}"
        self.wake: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.wake.bind(address)
        self._bell: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._bell.connect(address)

    def put(self, item: T) -> None:
        """Never waits. The bell rings for the first item; who comes for that takes the others along."""
        with self._putting:
            self._items.put(item)
            if self._items.qsize() <= 1:
                with contextlib.suppress(zmq.Again):
                    self._bell.send(b"", zmq.NOBLOCK)

    def take(self) -> Iterator[T]:
        """Everything put so far, without waiting."""
        while self.wake.poll(0):
            self.wake.recv()
        while True:
            try:
                yield self._items.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        self._bell.close(linger=0)
        self.wake.close(linger=0)
