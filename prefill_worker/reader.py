"""The interface of what reads prompts here: pieces of keys and values, in the target's own layout, as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outrider.engine.prompt_cache import PromptCache

MAX_PIECE = 2**22
"""Bytes handed over at a time: the orchestrator passes each on between two rounds of others."""

Tell = Callable[[str], None]
"""Hears how far a start has come."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Size:
    """What a reader runs, for a person to see."""

    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    number_format: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values of `count` tokens from `start` on, as `engine.handover.Layout` packs them."""

    start: int
    count: int
    data: Bytes


class Reader(Protocol):
    """A target's stand-in for prompts."""

    @property
    def size(self) -> Size: ...

    @property
    def note(self) -> str:
        """What a person should know of how it reads."""
        ...

    @property
    def prompt_cache(self) -> PromptCache: ...

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[Piece]]:
        """Reads all tokens but the last, one forward at a time; after each the pieces from `start` on that it brought.

        Closed early it keeps what it has read. Raises OutriderError when it can't go on.
        """
        ...


def parts(start: int, end: int, bytes_per_token: int) -> Iterator[tuple[int, int]]:
    """The tokens from `start` to `end` in parts that are not too long to hand over."""
    step = max(MAX_PIECE // max(bytes_per_token, 1), 1)
    for first in range(start, end, step):
        yield first, min(first + step, end)
