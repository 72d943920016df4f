"""The drafter's messages: a queue that can be inspected, over its link or a simulated slow one.

`Inbox` lets a worker look at new messages while it reads a long prompt; messages that are not yet handled stay in
order. It knows which request a message belongs to, and handles none. `SlowLink` simulates a distant drafter: every
message takes the profile's time each way. It has no thread of its own: messages that are due are sent whenever the
worker sends, receives or naps.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from outrider.engine.pace import AWAKE_SECONDS
from outrider.protocol.messages import Close, Commit, Message, Open, Shutdown
from outrider.protocol.worker_link import WorkerLink


class DraftLink(Protocol):
    """The part of `protocol.worker_link.WorkerLink` that the worker needs."""

    @property
    def name(self) -> str: ...

    def send(self, message: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...

    def expect(self, milliseconds: float) -> None:
        """Sets how long the next piece of work should take at most; 0: not known."""
        ...


class ReadCancelled(Exception):
    """The prompt that is being read is no longer needed."""


class Inbox:
    """The messages of `link`, in the order of their arrival."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        self._kept: deque[Message] = deque()

    def next(self, wait: bool) -> Message | None:
        """Returns the oldest message; if there is none, waits, or returns None if `wait` is False."""
        return self._kept.popleft() if self._kept else self._link.receive(wait=wait)

    def clear(self) -> None:
        """Drops the messages that are not yet handled."""
        self._kept.clear()

    def look(self, request: str) -> None:
        """Receives the messages that arrived while a prompt of `request` was read.

        Raises:
            ReadCancelled: the worker shuts down, or the request was closed or opened again; earlier messages about it
                are dropped.
        """
        while (message := self._link.receive(wait=False)) is not None:
            self._kept.append(message)
        for index, message in enumerate(self._kept):
            if isinstance(message, Shutdown):
                raise ReadCancelled
            if isinstance(message, Open | Close) and message.request == request:
                kept = list(self._kept)
                others = [earlier for earlier in kept[:index] if getattr(earlier, "request", None) != request]
                self._kept = deque([*others, *kept[index:]])
                raise ReadCancelled

    def of_others(self, request: str) -> list[Commit | Close]:
        """Removes and returns messages about other open requests; messages that follow an OPEN stay."""
        waiting, taken, kept = {request}, list[Commit | Close](), list(self._kept)
        self._kept.clear()
        for message in kept:
            if isinstance(message, Commit | Close) and message.request not in waiting:
                taken.append(message)
                continue
            self._kept.append(message)
            if isinstance(message, Open):
                waiting.add(message.request)
        return taken


# How long a message may wait while this thread sleeps.
SLICE_SECONDS = 0.0003


class SlowLink:
    """Delays messages of `link` by `link_ms` each way.

    `heard`: when the message last returned by `receive` arrived, in seconds of `time.perf_counter`.
    """

    def __init__(self, link: WorkerLink, link_ms: float) -> None:
        self.heard = 0.0
        self._link = link
        self._delay = link_ms / 1000
        self._coming: deque[tuple[float, Message]] = deque()
        self._going: deque[tuple[float, Message]] = deque()

    @property
    def name(self) -> str:
        return self._link.name

    def send(self, message: Message) -> None:
        self._going.append((time.perf_counter() + self._delay, message))
        self._deliver()

    def receive(self, wait: bool) -> Message | None:
        while True:
            self._deliver()
            if self._coming and self._coming[0][0] <= time.perf_counter():
                self.heard, message = self._coming.popleft()
                return message
            if not wait:
                return None
            if self._coming or self._going:
                time.sleep(SLICE_SECONDS)
            else:
                self._arrived(self._link.receive(wait=True))

    def expect(self, milliseconds: float) -> None:
        self._link.expect(milliseconds)

    def nap(self, seconds: float) -> None:
        """Sleeps, and delivers messages meanwhile."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._deliver()
            if left > AWAKE_SECONDS:
                time.sleep(min(left - AWAKE_SECONDS, SLICE_SECONDS))

    def _deliver(self) -> None:
        now = time.perf_counter()
        while self._going and self._going[0][0] <= now:
            self._link.send(self._going.popleft()[1])
        while (message := self._link.receive(wait=False)) is not None:
            self._arrived(message)

    def _arrived(self, message: Message | None) -> None:
        if message is not None:
            self._coming.append((time.perf_counter() + self._delay, message))
