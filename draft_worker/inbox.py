"""What was said to this drafter: one message after the other, and a look ahead while a long prompt is read.

What is looked at and not handled yet is kept, in its order. Knows whose a message is; does nothing about it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from outrider.protocol.messages import Close, Commit, Message, Open, Shutdown


class Link(Protocol):
    """The wire as the worker sees it: `protocol.worker_link.WorkerLink`, or something that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, message: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...

    def expect(self, milliseconds: float) -> None:
        """What is done next should take so long at most; 0: nobody knows."""
        ...


class Unwanted(Exception):
    """Nobody waits any more for what is being read."""


class Inbox:
    """Messages of `link`, in the order in which they came."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: deque[Message] = deque()

    def next(self, wait: bool) -> Message | None:
        """The oldest one; None: there is none yet, and nobody is to `wait`."""
        return self._kept.popleft() if self._kept else self._link.receive(wait=wait)

    def clear(self) -> None:
        """Forgets what was looked at."""
        self._kept.clear()

    def look(self, request: str) -> None:
        """Looks at what came while a prompt of `request` was read.

        Raises:
            Unwanted: the request was closed or opened anew; what was said of it before that is forgotten.
        """
        while (message := self._link.receive(wait=False)) is not None:
            self._kept.append(message)
        for index, message in enumerate(self._kept):
            if isinstance(message, Shutdown):
                raise Unwanted
            if isinstance(message, Open | Close) and message.request == request:
                news = list(self._kept)
                others = [earlier for earlier in news[:index] if getattr(earlier, "request", None) != request]
                self._kept = deque([*others, *news[index:]])
                raise Unwanted

    def of_others(self, request: str) -> list[Commit | Close]:
        """Takes out what was said of other requests that are open; what waits for an OPEN waits on."""
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
