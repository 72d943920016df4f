"""A simulated network in one thread with seeded faults: frames are delayed, dropped, duplicated, reordered, corrupted.

It is worse than ZeroMQ, which keeps the order of a link, duplicates nothing and loses messages only with their
connection. It knows frames and ticks, and nothing about requests.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Message

MAX_LINES = 80


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """Probabilities of a bundle to be dropped, duplicated, reordered or corrupted. It takes 1 to 1 + `delay` ticks."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay: int = 0


NO_FAULTS = LinkFaults()


@dataclass(frozen=True, slots=True)
class Bundle:
    """Messages that were sent together and have not arrived yet. `corrupted`: the frames differ from the messages."""

    frames: tuple[bytes, ...]
    messages: tuple[Message, ...]
    due: int
    corrupted: bool = False


@dataclass(slots=True)
class EventLog:
    """The latest events, to explain a failure, and the counts of all events."""

    tick: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _lines: deque[tuple[int, str, str, tuple[object, ...]]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def write(self, event: str, where: str = "", about: Sequence[object] = ()) -> None:
        self.counts[event] += 1
        self._lines.append((self.tick, event, where, tuple(about)))

    def __str__(self) -> str:
        lines = (
            f"{tick:5} {what} {where} {' '.join(map(summarize, about))}" for tick, what, where, about in self._lines
        )
        return "\n".join(lines)


class OneWayLink:
    """One direction of a link.

    `authenticated`: corrupted messages never arrive, as with TCP and CURVE; else they arrive if the codec accepts them,
    and `forged` counts them.
    """

    def __init__(self, name: str, rng: random.Random, log: EventLog, authenticated: bool) -> None:
        self.name = name
        self.faults = NO_FAULTS
        self.cut = False
        self._rng, self._log, self._authenticated = rng, log, authenticated
        self.forged = 0
        self._in_flight: list[Bundle] = []
        self._last_due = 0

    @property
    def is_empty(self) -> bool:
        return not self._in_flight

    def send(self, *messages: Message) -> None:
        """Sends messages together."""
        rng, faults = self._rng, self.faults
        if rng.random() < faults.drop:
            self._log.write("lost", self.name, messages)
            return
        frames = tuple(bytes(frame) for frame in encode_all(messages))
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            due = self._log.tick + 1 + rng.randint(0, faults.delay)
            if rng.random() >= faults.reorder:
                due = self._last_due = max(due, self._last_due)
            if rng.random() < faults.corrupt:
                self._in_flight.append(Bundle(corrupted(frames, rng), messages, due, corrupted=True))
            else:
                self._in_flight.append(Bundle(frames, messages, due))

    def receive(self) -> list[Message]:
        """Returns the messages that arrive in this tick."""
        if self.cut or not self._in_flight:
            return []
        due = [bundle for bundle in self._in_flight if bundle.due <= self._log.tick]
        self._in_flight = [bundle for bundle in self._in_flight if bundle.due > self._log.tick]
        return [message for bundle in sorted(due, key=lambda b: b.due) for message in self._decode(bundle)]

    def drop_all(self) -> None:
        """Drops all messages in flight, as when the connection is lost."""
        if self._in_flight:
            self._log.write("lost", self.name, [message for bundle in self._in_flight for message in bundle.messages])
        self._in_flight.clear()

    def _decode(self, bundle: Bundle) -> list[Message]:
        try:
            received = decode_all(bundle.frames)
        except ProtocolError:
            self._log.write("refused", self.name, bundle.messages)
            return []
        if bundle.corrupted and self._authenticated:
            self._log.write("altered", self.name, bundle.messages)
            return []
        self.forged += len(received) if bundle.corrupted else 0
        self._log.write("forged" if bundle.corrupted else "received", self.name, received)
        return received


def corrupted(frames: Sequence[bytes], rng: random.Random) -> tuple[bytes, ...]:
    """Returns frames with some bytes changed, one cut short, one missing, or one too many."""
    found = list(frames)
    at = rng.randrange(len(found))
    match rng.randrange(6):
        case 0:
            found[at] = found[at][: rng.randrange(len(found[at]) + 1)]
        case 1:
            del found[at]
        case 2:
            found.insert(at, rng.randbytes(rng.randrange(12)))
        case _:
            data = bytearray(found[at])
            for _ in range(rng.randint(1, 3) if data else 0):
                data[rng.randrange(len(data))] = rng.randrange(256)
            found[at] = bytes(data)
    return tuple(found)


def summarize(message: object) -> str:
    """Describes a message briefly: its type, request, epoch/round/base_len and tokens."""
    if isinstance(message, str):
        return message
    place = [getattr(message, name, None) for name in ("epoch", "round", "base_len")]
    numbers = "/".join(str(number) for number in place if number is not None)
    extra = []
    for name in ("chain", "accepted", "bonus", "next_proposal", "tokens", "verifying", "autonomous"):
        value = getattr(message, name, None)
        if value is not None and value is not False and not hasattr(value, "dtype"):
            extra.append(f"{name}={value}")
    return f"{type(message).__name__}({' '.join([str(getattr(message, 'request', '')), numbers, *extra])})"
