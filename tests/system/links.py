"""Fake links between workers and the scheduler, and a virtual clock, for clusters in one thread without sockets."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from outrider.orchestrator.core.scheduler import Scheduler
from outrider.protocol.codec import decode, decode_all, encode, encode_all
from outrider.protocol.messages import Message, Outcome

Handle = Callable[[str, Message, int], None]


class VirtualClock:
    """A clock that advances by a random time at each reading, so that every strategy seems the fastest at times."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._now_ns = 0

    def __call__(self) -> int:
        return self.skip(self._rng.choice((200_000, 1_000_000, 5_000_000)))

    def skip(self, nanoseconds: int) -> int:
        self._now_ns += nanoseconds
        return self._now_ns


class Idle(Exception):
    """Raised when a worker would block, because it has no messages and nothing to do."""


class FakeReceiver:
    """The receiving half of a worker's link, without a socket and a supervisor."""

    inbox: deque[Message]

    def receive(self, wait: bool) -> Message | None:
        if self.inbox:
            return self.inbox.popleft()
        if wait:
            raise Idle
        return None

    def expect(self, milliseconds: float) -> None:
        """Does nothing."""

    def poll(self, milliseconds: float) -> None:
        """Does nothing: no message arrives by itself."""


@dataclass
class FakeLink(FakeReceiver):
    """A worker's link without a socket. `inbox`: the messages to receive. `sent`: the messages that it sent."""

    name: str
    inbox: deque[Message] = field(default_factory=deque)
    sent: deque[Message] = field(default_factory=deque)

    def send(self, *messages: Message) -> None:
        self.sent += decode_all([bytes(frame) for frame in encode_all(messages)])


class WorkerLoop(Protocol):
    def turn(self) -> bool: ...


def run_worker(worker: WorkerLoop, link: FakeLink, messages: Sequence[Message], turns: int = 1000) -> list[Any]:
    """Delivers messages to a worker, runs up to `turns` turns of its loop until it is idle; returns what it sent."""
    link.inbox += messages
    before = len(link.sent)
    try:
        for _ in range(turns):
            worker.turn()
    except Idle:
        pass
    return list(link.sent)[before:]


def deliver_during_a_forward(worker: Any, link: FakeLink, make: Callable[[], Message], after: int = 0) -> None:
    """Delivers a message to a target worker during a forward, after that many other forwards."""
    advance, forwards = worker.runner.advance, count()

    def advance_and_deliver(running: Any) -> Any:
        result = advance(running)
        link.inbox.extend([make()] if next(forwards) == after else [])
        return result

    worker.runner.advance = advance_and_deliver


def drafted_chain(outcome: Outcome) -> tuple[int, ...]:
    """Returns the in-process drafter's tokens; () if it did not draft."""
    return outcome.drafted.chain if outcome.drafted is not None else ()


def intercept(scheduler: Scheduler, hook: Handle) -> Handle:
    """Passes each message to `hook` instead of the scheduler. Returns a function that passes one to the scheduler."""
    handle = scheduler.handle

    def handle_each(arrived: Iterable[tuple[str, Message]], now_ns: int) -> None:
        for sender, message in arrived:
            hook(sender, message, now_ns)

    scheduler.handle = handle_each  # type: ignore[method-assign]
    return lambda sender, message, now_ns: handle([(sender, message)], now_ns)


def codec_round_trip(message: Message) -> Message:
    return decode([bytes(frame) for frame in encode(message)])
