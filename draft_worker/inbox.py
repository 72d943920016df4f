"""The drafter's messages, one after the other with a look ahead, over its link or a slower one.

`Inbox` lets a long prompt's reading look ahead; messages that are not handled yet are kept in order. It knows which
request a message belongs to and does nothing about it. `SlowLink` simulates a drafter that is farther away: every
message takes the profile's time each way. It works in one thread, like the link it wraps: messages that are due go out
whenever the worker sends, receives or naps.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from outrider.engine.pace import AWAKE_SECONDS
from outrider.protocol.messages import Close, Commit, Message, Open, Shutdown
from outrider.protocol.worker_link import WorkerLink


class DraftLink(Protocol):
    """What the worker needs of a link: `protocol.worker_link.WorkerLink`, or one that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, message: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...

    def expect(self, milliseconds: float) -> None:
        """What is done next should take so long at most; 0: not known."""
        ...


class ReadCancelled(Exception):
    """The prompt that is being read is not needed any more."""


class Inbox:
    """Messages of `link`, in the order in which they came."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        self._kept: deque[Message] = deque()

    def next(self, wait: bool) -> Message | None:
        """The oldest message; without one it waits if `wait`, else returns None."""
        return self._kept.popleft() if self._kept else self._link.receive(wait=wait)

    def clear(self) -> None:
        """Drops the messages that are kept."""
        self._kept.clear()

    def look(self, request: str) -> None:
        """Takes in messages that came while a prompt of `request` was read.

        Raises:
            ReadCancelled: the worker shuts down, or the request was closed or opened anew; earlier messages about it
                are dropped.
        """
        while (message := self._link.receive(wait=False)) is not None:
            self._kept.append(message)
        for index, message in enumerate(self._kept):
            if isinstance(message, Shutdown):
                raise ReadCancelled
            if isinstance(message, Open | Close) and message.request == request:
                news = list(self._kept)
                others = [earlier for earlier in news[:index] if getattr(earlier, "request", None) != request]
                self._kept = deque([*others, *news[index:]])
                raise ReadCancelled

    def of_others(self, request: str) -> list[Commit | Close]:
        """Takes out messages about other requests that are open; what has to wait for an OPEN stays."""
        waiting, taken, news = {request}, list[Commit | Close](), list(self._kept)
        self._kept.clear()
        for message in news:
            if isinstance(message, Commit | Close) and message.request not in waiting:
                taken.append(message)
                continue
            self._kept.append(message)
            if isinstance(message, Open):
                waiting.add(message.request)
        return taken


# How long a message may lie unseen while this thread sleeps.
SLICE_SECONDS = 0.0003


class SlowLink:
    """Delays messages of `link` by `link_ms` each way.

    `heard`: when the message that `receive` returned last arrived, in seconds of `time.perf_counter`.
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
        self._pass_on()

    def receive(self, wait: bool) -> Message | None:
        while True:
            self._pass_on()
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
        """Sleeps while messages travel on."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._pass_on()
            if left > AWAKE_SECONDS:
                time.sleep(min(left - AWAKE_SECONDS, SLICE_SECONDS))

    def _pass_on(self) -> None:
        now = time.perf_counter()
        while self._going and self._going[0][0] <= now:
            self._link.send(self._going.popleft()[1])
        while (message := self._link.receive(wait=False)) is not None:
            self._arrived(message)

    def _arrived(self, message: Message | None) -> None:
        if message is not None:
            self._coming.append((time.perf_counter() + self._delay, message))
