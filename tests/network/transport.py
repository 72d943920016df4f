"""A network in one thread with seeded faults: frames are delayed, lost, repeated, reordered and altered, links cut.

Worse than ZeroMQ, which keeps a link's order, repeats nothing and loses messages only with their connection. It
handles frames and ticks, not requests.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Message

REMEMBERED = 80


@dataclass(frozen=True, slots=True)
class Weather:
    """The probabilities that a bundle is lost, repeated, reordered or altered; it takes up to 1 + `delay` ticks."""

    lose: float = 0.0
    twice: float = 0.0
    overtake: float = 0.0
    alter: float = 0.0
    delay: int = 0


CLEAR = Weather()


@dataclass(frozen=True, slots=True)
class Bundle:
    """Messages that were sent together, on their way; `altered`: the frames are no longer theirs."""

    frames: tuple[bytes, ...]
    messages: tuple[Message, ...]
    due: int
    altered: bool = False


@dataclass(slots=True)
class Journal:
    """The latest events, to explain a failure, and counts of all."""

    tick: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _lines: deque[tuple[int, str, str, tuple[object, ...]]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def write(self, event: str, where: str = "", about: Sequence[object] = ()) -> None:
        self.counts[event] += 1
        self._lines.append((self.tick, event, where, tuple(about)))

    def __str__(self) -> str:
        lines = (f"{tick:5} {what} {where} {' '.join(map(brief, about))}" for tick, what, where, about in self._lines)
        return "\n".join(lines)


class Way:
    """One direction of a link. `sealed`: altered messages never arrive, as with TCP and CURVE; else they arrive if the
    codec accepts them, and `forged` counts them."""

    def __init__(self, name: str, rng: random.Random, journal: Journal, sealed: bool) -> None:
        self.name = name
        self.weather = CLEAR
        self.cut = False
        self._rng, self._journal, self._sealed = rng, journal, sealed
        self.forged = 0
        self._going: list[Bundle] = []
        self._last_due = 0

    @property
    def is_empty(self) -> bool:
        return not self._going

    def put(self, *messages: Message) -> None:
        """Sends messages together."""
        rng, weather = self._rng, self.weather
        if rng.random() < weather.lose:
            self._journal.write("lost", self.name, messages)
            return
        frames = tuple(bytes(frame) for frame in encode_all(messages))
        for _ in range(2 if rng.random() < weather.twice else 1):
            due = self._journal.tick + 1 + rng.randint(0, weather.delay)
            if rng.random() >= weather.overtake:
                due = self._last_due = max(due, self._last_due)
            if rng.random() < weather.alter:
                self._going.append(Bundle(altered(frames, rng), messages, due, altered=True))
            else:
                self._going.append(Bundle(frames, messages, due))

    def arrived(self) -> list[Message]:
        """Returns the messages that arrive now."""
        if self.cut or not self._going:
            return []
        due = [bundle for bundle in self._going if bundle.due <= self._journal.tick]
        self._going = [bundle for bundle in self._going if bundle.due > self._journal.tick]
        return [message for bundle in sorted(due, key=lambda b: b.due) for message in self._opened(bundle)]

    def lose_all(self) -> None:
        """Drops all messages on their way, as when the connection is lost."""
        if self._going:
            self._journal.write("lost", self.name, [message for bundle in self._going for message in bundle.messages])
        self._going.clear()

    def _opened(self, bundle: Bundle) -> list[Message]:
        try:
            received = decode_all(bundle.frames)
        except ProtocolError:
            self._journal.write("refused", self.name, bundle.messages)
            return []
        if bundle.altered and self._sealed:
            self._journal.write("altered", self.name, bundle.messages)
            return []
        self.forged += len(received) if bundle.altered else 0
        self._journal.write("forged" if bundle.altered else "received", self.name, received)
        return received


def altered(frames: Sequence[bytes], rng: random.Random) -> tuple[bytes, ...]:
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


def brief(message: object) -> str:
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
