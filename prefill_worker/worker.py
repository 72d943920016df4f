"""The prefill worker's loop: PREFILL in, PROMPTKV out, one forward at a time, first come first served.

Between two forwards it looks for news. Knows nothing of models, rounds or text.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from outrider.prefill_worker.reader import Piece, Reader
from outrider.protocol.errors import OutriderError
from outrider.protocol.kv import CacheUse
from outrider.protocol.messages import CacheReport, Close, Fault, KvMemory, Message, Prefill, PromptKv, Shutdown

log = logging.getLogger(__name__)


class Link(Protocol):
    """The wire as the worker sees it: `protocol.worker_link.WorkerLink`, or something that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, *messages: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt that is read, or waits for its turn; `pieces` come as `Reader.read` has them."""

    asked: Prefill
    pieces: Generator[list[Piece]]


class PrefillWorker:
    """Reads prompts from `link` with `reader` until told to shut down."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._readings: dict[str, Reading] = {}
        self._told_use = CacheUse()

    def run(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handles one message if there is one, else makes one forward of the first prompt; False: shut down."""
        message = self._link.receive(wait=not self._readings)
        match message:
            case None:
                self._read_on(next(iter(self._readings.values())))
            case Prefill():
                self._drop(message.request)
                pieces = self._reader.read(message.tokens.tolist(), message.start)
                self._readings[message.request] = Reading(message, pieces)
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
        for request in list(self._readings):
            self._drop(request)

    def _read_on(self, reading: Reading) -> None:
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
        reading = self._readings.pop(request, None)
        if reading is None:
            return
        reading.pieces.close()
        if self._reader.prompt_cache.use != self._told_use:
            self._told_use = self._reader.prompt_cache.use
            self._link.send(CacheReport(self._told_use))
