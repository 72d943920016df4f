"""A link to a drafter that is farther away than it is: every message takes the profile's time each way.

One thread, like the link it wraps: messages that are due go out whenever the worker sends, receives or naps.
"""

from __future__ import annotations

import time
from collections import deque

from outrider.engine.pace import AWAKE_SECONDS
from outrider.protocol.messages import Message
from outrider.protocol.worker_link import WorkerLink

# How long a message may lie unseen, which adds to its way, while this thread sleeps.
SLICE_SECONDS = 0.0003


class SlowLink:
    """Delays what `link` brings and what it takes by `link_ms`. `heard`: when the message last handed out arrived, in
    seconds of `time.perf_counter`.
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
        """Sleeps, while messages travel on."""
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
