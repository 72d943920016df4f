"""What replaces sockets in a cluster of one thread: virtual time and links."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.orchestrator.core.scheduler import Scheduler
from outrider.protocol.codec import decode, decode_all, encode, encode_all
from outrider.protocol.messages import Message, Outcome

Handle = Callable[[str, Message, int], None]


class VirtualClock:
    """Every look at it costs some time, at random: so all sorts of waits and fallbacks seem to pay now and then."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._now_ns = 0

    def __call__(self) -> int:
        return self.skip(self._rng.choice((200_000, 1_000_000, 5_000_000)))

    def skip(self, nanoseconds: int) -> int:
        self._now_ns += nanoseconds
        return self._now_ns


class Idle(Exception):
    """The worker would block."""


class Listening:
    """What a worker's link without a socket has to hear, and nobody who watches."""

    inbox: deque[Message]

    def receive(self, wait: bool) -> Message | None:
        if self.inbox:
            return self.inbox.popleft()
        if wait:
            raise Idle
        return None

    def expect(self, milliseconds: float) -> None:
        """Nobody watches."""

    def poll(self, milliseconds: float) -> None:
        """Nothing comes of itself."""


@dataclass
class FakeLink(Listening):
    """A worker's link: what it will receive, and what it sent."""

    name: str
    inbox: deque[Message] = field(default_factory=deque)
    sent: deque[Message] = field(default_factory=deque)

    def send(self, *messages: Message) -> None:
        self.sent += decode_all([bytes(frame) for frame in encode_all(messages)])


class Turning(Protocol):
    def turn(self) -> bool: ...


def answered(worker: Turning, link: FakeLink, messages: Sequence[Message], turns: int = 1000) -> list[Any]:
    """What the worker behind `link` answers to these, in so many turns of its loop or until it would wait."""
    link.inbox += messages
    before = len(link.sent)
    try:
        for _ in range(turns):
            worker.turn()
    except Idle:
        pass
    return list(link.sent)[before:]


def drafted_chain(outcome: Outcome) -> tuple[int, ...]:
    """The in-process drafter's tokens; (): it did not draft."""
    return outcome.drafted.chain if outcome.drafted is not None else ()


def intercept(scheduler: Scheduler, hook: Handle) -> Handle:
    """Gives each message to `hook` in place of the scheduler, and returns what gives one to the scheduler."""
    handle = scheduler.handle

    def handle_each(arrived: Iterable[tuple[str, Message]], now_ns: int) -> None:
        for sender, message in arrived:
            hook(sender, message, now_ns)

    scheduler.handle = handle_each  # type: ignore[method-assign]
    return lambda sender, message, now_ns: handle([(sender, message)], now_ns)


def through_the_codec(message: Message) -> Message:
    return decode([bytes(frame) for frame in encode(message)])
