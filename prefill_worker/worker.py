"""The prefill worker's loop: PREFILL in, PROMPTKV out, one forward at a time, first come first served.

Between two forwards it looks for news. Knows nothing of models, rounds or text.

`PrefillReader`: the interface of what reads prompts here: pieces of keys and values, in the target's own layout, as
they come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outrider.engine.prompt_cache import PromptCache
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import CacheReport, Close, Fault, KvMemory, Message, Prefill, PromptKv, Shutdown
from outrider.protocol.stats import CacheUse

MAX_PIECE = 2**22
"""Bytes handed over at a time: the orchestrator passes each on between two rounds of others."""

Tell = Callable[[str], None]
"""Hears how far a start has come."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """What a reader runs, for a person to see."""

    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    number_format: str = ""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of `count` tokens from `start` on, as `engine.kv_transfer.KVLayout` packs them."""

    start: int
    count: int
    data: Bytes


class PrefillReader(Protocol):
    """A target's stand-in for prompts."""

    @property
    def size(self) -> ReaderInfo: ...

    @property
    def note(self) -> str:
        """What a person should know of how it reads."""
        ...

    @property
    def prompt_cache(self) -> PromptCache: ...

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        """Reads all tokens but the last, one forward at a time; after each the pieces from `start` on that it brought.

        Closed early it keeps what it has read. Raises OutriderError when it can't go on.
        """
        ...


def parts(start: int, end: int, bytes_per_token: int) -> Iterator[tuple[int, int]]:
    """The tokens from `start` to `end` in parts that are not too long to hand over."""
    step = max(MAX_PIECE // max(bytes_per_token, 1), 1)
    for first in range(start, end, step):
        yield first, min(first + step, end)


log = logging.getLogger(__name__)


class PrefillLink(Protocol):
    """The wire as the worker sees it: `protocol.worker_link.WorkerLink`, or something that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, *messages: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt that is read, or waits for its turn; `pieces` come as `PrefillReader.read` has them."""

    asked: Prefill
    pieces: Generator[list[KVSegment]]


class PrefillWorker:
    """Reads prompts from `link` with `reader` until told to shut down."""

    def __init__(self, link: PrefillLink, reader: PrefillReader) -> None:
        self._link = link
        self._reader = reader
        self._jobs: dict[str, PrefillJob] = {}
        self._reported_use = CacheUse()

    def run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handles one message if there is one, else makes one forward of the first prompt; False: shut down."""
        message = self._link.receive(wait=not self._jobs)
        match message:
            case None:
                self._read_on(next(iter(self._jobs.values())))
            case Prefill():
                self._drop(message.request)
                pieces = self._reader.read(message.tokens.tolist(), message.start)
                self._jobs[message.request] = PrefillJob(message, pieces)
            case Close():
                self._drop(message.request)
            case KvMemory():
                self._reader.prompt_cache.allow(message.limit if message.prompt_cache else 0)
            case Shutdown():
                return False
            case _:
                log.warning("a prefill worker can't handle %s", type(message).__name__)
        return True

    def forget(self) -> None:
        """Nobody waits for any of its prompts any more; what was read of them stays in the prompt cache."""
        for request in list(self._jobs):
            self._drop(request)

    def _read_on(self, reading: PrefillJob) -> None:
        asked = reading.asked
        try:
            pieces = next(reading.pieces, None)
        except OutriderError as error:
            log.warning("reading the prompt of %s failed: %s", asked.request, error)
            self._drop(asked.request)
            self._link.send(Fault(self._link.name, asked.request, str(error)))
            return
        for piece in pieces or ():
            self._link.send(PromptKv(asked.request, asked.epoch, piece.start, piece.count, piece.data))
        if pieces is None:
            self._drop(asked.request)

    def _drop(self, request: str) -> None:
        reading = self._jobs.pop(request, None)
        if reading is None:
            return
        reading.pieces.close()
        if self._reader.prompt_cache.use != self._reported_use:
            self._reported_use = self._reader.prompt_cache.use
            self._link.send(CacheReport(self._reported_use))
