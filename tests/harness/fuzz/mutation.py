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
from tests.harness.fuzz.random_messages import random_message

Frames = list[bytes]

MAX_SHOWN = 256
UNUSUAL: tuple[Any, ...] = (
    *(0, 1, -1, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), None),
    *(True, "", "r", "x" * 100, b"", b"\xff" * 9, (), ((),) * 40, {}, {"a": 1}),
)


class Mutator:
    """Mutates messages passed to `show` recently, and random messages of the types in `names`."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self._rng, self._names = rng, names
        self._shown: deque[Frames] = deque(maxlen=MAX_SHOWN)

    def show(self, *messages: Message) -> None:
        """Adds messages to the pool of messages to mutate."""
        self._shown.append([bytes(frame) for frame in encode_all(messages)])

    def frames(self) -> Frames:
        """Returns the frames of a mutated message, of several messages, or random bytes."""
        rng = self._rng
        match rng.randrange(10):
            case 0:
                return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(4))]
            case 1:
                return self._valid()
            case 2 | 3 | 4:
                return self._change_bytes(self._valid())
            case 5:
                return [frame for _ in range(rng.randint(2, 4)) for frame in self._valid()]
            case _:
                return self._change_fields(self._valid())

    def _valid(self) -> Frames:
        rng = self._rng
        if self._shown and rng.random() < 0.7:
            return list(rng.choice(self._shown))
        return [bytes(frame) for frame in encode_all([random_message(rng, rng.choice(self._names))])]

    def _change_bytes(self, frames: Frames) -> Frames:
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

    def _change_fields(self, frames: Frames) -> Frames:
        """Replaces values in the header by unusual ones, or by those of another message."""
        rng = self._rng
        try:
            header = msgpack.decode(frames[0])
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                self._replace(header)
            frames[0] = msgpack.encode(header)
        except (ValueError, TypeError, OverflowError):
            return self._change_bytes(frames)
        return frames

    def _replace(self, header: Any) -> None:
        rng, container = self._rng, header
        while True:
            at = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
            inner = container[at]
            if not isinstance(inner, list | dict) or not inner or (container is not header and rng.random() < 0.2):
                break
            container = inner
        container[at] = self._other_value(inner)

    def _other_value(self, value: Any) -> Any:
        rng = self._rng
        if type(value) is int and rng.random() < 0.6:
            return value + rng.choice((-1, 1, rng.randint(-300, 300)))
        if self._shown and rng.random() < 0.3:
            return self._random_leaf(msgpack.decode(rng.choice(self._shown)[0]))
        return deepcopy(rng.choice(UNUSUAL))  # a copy, because a later change could put a shared list into itself

    def _random_leaf(self, value: Any) -> Any:
        while isinstance(value, list | dict) and value and self._rng.random() < 0.9:
            value = self._rng.choice(list(value.values()) if isinstance(value, dict) else value)
        return value
