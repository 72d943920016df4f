"""The prefill worker's loop: receives PREFILL, sends PROMPTKV, runs one forward at a time, first come first served.

It handles messages between two forwards. `PrefillReader` is the interface of the readers. Knows nothing of models,
rounds or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outrider.engine.prompt_cache import PromptCache
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import CacheReport, Close, Fault, KvMemory, Prefill, PromptKv, Shutdown
from outrider.protocol.stats import CacheUse
from outrider.protocol.worker_link import WorkerLink

MAX_PIECE = 2**22
"""The most bytes of a message: the orchestrator forwards each between two rounds of other requests."""

Report = Callable[[str], None]
"""A function that takes the stages of a start."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A reader's model, for Hello."""

    vocab_size: int
    context_length: int
    parameters: int
    weight_bytes: int
    number_format: str = ""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of `count` tokens from `start` on, packed by `engine.kv_transfer.KVLayout`."""

    start: int
    count: int
    data: Bytes


class PrefillReader(Protocol):
    """Reads prompts instead of the target; returns keys and values in the target's layout, piece by piece."""

    @property
    def size(self) -> ReaderInfo: ...

    @property
    def note(self) -> str:
        """A note for the user on how it reads."""
        ...

    @property
    def prompt_cache(self) -> PromptCache: ...

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        """Reads all tokens but the last; yields after each forward its pieces from `start` on.

        If it is closed early, what was read may stay in the prompt cache. Raises OutriderError if reading fails.
        """
        ...


def parts(start: int, end: int, bytes_per_token: int) -> Iterator[tuple[int, int]]:
    """Splits the tokens [start, end) into parts of at most `MAX_PIECE` bytes."""
    step = max(MAX_PIECE // max(bytes_per_token, 1), 1)
    for first in range(start, end, step):
        yield first, min(first + step, end)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt that is being read or waits for its turn; `pieces`: what `PrefillReader.read` yields."""

    asked: Prefill
    pieces: Generator[list[KVSegment]]


class PrefillWorker:
    """Reads prompts from `link` with `reader` until SHUTDOWN."""

    def __init__(self, link: WorkerLink, reader: PrefillReader) -> None:
        self._link = link
        self._reader = reader
        self._jobs: dict[str, PrefillJob] = {}
        self._reported_use = CacheUse()

    def run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handles one message, or if there is none runs one forward of the first prompt. Returns False on SHUTDOWN."""
        message = self._link.receive(wait=not self._jobs)
        match message:
            case None:
                self._continue_reading(next(iter(self._jobs.values())))
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
        """Drops all prompts; their state stays in the prompt cache."""
        for request in list(self._jobs):
            self._drop(request)

    def _continue_reading(self, reading: PrefillJob) -> None:
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
