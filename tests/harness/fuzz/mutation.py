"""Mutates frames of messages: changes, cuts and duplicates bytes, swaps fields, or returns noise."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from msgspec import msgpack

from outrider.protocol.codec import encode_all
from outrider.protocol.messages import Message
from tests.harness.fuzz.chance import some

Frames = list[bytes]

KEPT = 256
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), None),
    *(True, "", "r", "x" * 100, b"", b"\xff" * 9, (), ((),) * 40, {}, {"a": 1}),
)


class Mutator:
    """Mutates recently shown messages, and random messages of `names`."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self._rng, self._names = rng, names
        self._seen: deque[Frames] = deque(maxlen=KEPT)

    def show(self, *messages: Message) -> None:
        """Adds messages to mutate."""
        self._seen.append([bytes(frame) for frame in encode_all(messages)])

    def frames(self) -> Frames:
        rng = self._rng
        match rng.randrange(10):
            case 0:
                return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(4))]
            case 1:
                return self._any()
            case 2 | 3 | 4:
                return self._bytes(self._any())
            case 5:
                return [frame for _ in range(rng.randint(2, 4)) for frame in self._any()]
            case _:
                return self._fields(self._any())

    def _any(self) -> Frames:
        rng = self._rng
        if self._seen and rng.random() < 0.7:
            return list(rng.choice(self._seen))
        return [bytes(frame) for frame in encode_all([some(rng, rng.choice(self._names))])]

    def _bytes(self, frames: Frames) -> Frames:
        """Changes some bytes, or cuts, drops, duplicates or inserts a frame."""
        rng, at = self._rng, self._rng.randrange(len(frames))
        match rng.randrange(8):
            case 0:
                frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
            case 1:
                del frames[at]
            case 2:
                frames.insert(at, frames[at])
            case 3:
                frames.insert(at, rng.randbytes(rng.randrange(12)))
            case 4:
                frames[at] += rng.randbytes(rng.randrange(1, 12))
            case _:
                data = bytearray(frames[at])
                for _ in range(rng.randint(1, 4) if data else 0):
                    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                frames[at] = bytes(data)
        return frames

    def _fields(self, frames: Frames) -> Frames:
        """Replaces a value in the header by an odd one, or by one of another message."""
        rng = self._rng
        try:
            header = msgpack.decode(frames[0])
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                self._replace(header)
            frames[0] = msgpack.encode(header)
        except (ValueError, TypeError, OverflowError):
            return self._bytes(frames)
        return frames

    def _replace(self, header: Any) -> None:
        rng, holder = self._rng, header
        while True:
            at = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            inner = holder[at]
            if not isinstance(inner, list | dict) or not inner or (holder is not header and rng.random() < 0.2):
                break
            holder = inner
        holder[at] = self._other(inner)

    def _other(self, value: Any) -> Any:
        rng = self._rng
        if type(value) is int and rng.random() < 0.6:
            return value + rng.choice((-1, 1, rng.randint(-300, 300)))
        if self._seen and rng.random() < 0.3:
            return self._leaf(msgpack.decode(rng.choice(self._seen)[0]))
        return deepcopy(rng.choice(ODD))  # or a later change inside it could put a list into itself

    def _leaf(self, value: Any) -> Any:
        while isinstance(value, list | dict) and value and self._rng.random() < 0.9:
            value = self._rng.choice(list(value.values()) if isinstance(value, dict) else value)
        return value
