"""Prompts that another process reads in the target's place: to whom they go, and what of them goes on to the target.

The target says first what it has of a prompt; what is left is read elsewhere where that is long enough. Whatever is
lost on the way costs time: the target, asked again, reads on by itself. Knows requests and messages, no keys or values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outrider.orchestrator.core.dispatch import Dispatch, Workers
from outrider.orchestrator.core.request import Request
from outrider.protocol.messages import Close, Message, Prefill, Prefilled, PromptKv


@dataclass(slots=True)
class Reading:
    """A prompt in its `epoch` that was offered, or is read by `worker`; so many tokens are `left`."""

    epoch: int
    left: int
    worker: str = ""


class PrefillReadings:
    """The readings under way, by request. `least`: shorter prompts are the target's own matter."""

    def __init__(self, workers: Workers, dispatch: Dispatch, least: int) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._least = least
        self._readings: dict[str, Reading] = {}
        self._asked: set[str] = set()

    def offer(self, request: Request) -> bool:
        """Whether the target is to wait, before it reads, for what becomes of this prompt."""
        self.forget(request)
        left = len(request.tokens) - 1
        if left < self._least or not self._workers.prefill_workers():
            return False
        self._readings[request.id] = Reading(request.epoch, left)
        return True

    def told(self, request: Request, message: Prefilled) -> None:
        """The target has so much of a prompt: the rest is given to who has the least to read, or left to the target."""
        reading = self._readings.get(request.id)
        if reading is None or reading.epoch != message.epoch:
            return
        reading.left = message.total - 1 - message.done
        if reading.worker or reading.left <= 0:
            return
        workers = self._workers.prefill_workers()
        if reading.left < self._least or not workers:
            self._leave(request)
            return
        reading.worker = min(sorted(workers), key=self._burden)
        self._asked.add(reading.worker)
        tokens = np.asarray(request.tokens, np.int32)
        self._workers.send_drafter(reading.worker, Prefill(request.id, request.epoch, tokens, message.done))

    def has_asked(self, worker: str) -> bool:
        """Whether this is a prefill worker whose words come here."""
        return worker in self._asked

    def heard(self, request: Request | None, sender: str, message: Message) -> bool:
        """Takes what a prefill worker says; False: it is of no use any more."""
        reading = self._readings.get(request.id) if request is not None else None
        if request is None or reading is None or reading.worker != sender:
            return False
        if isinstance(message, PromptKv):
            if message.epoch != reading.epoch:
                return False
            request.account.handed_over += message.count
            self._workers.send_target(message)
        else:
            self._leave(request)
        return True

    def lost(self, worker: str, requests: Mapping[str, Request]) -> None:
        """It reads no more: the target does."""
        self._asked.discard(worker)
        for id_ in [id_ for id_, reading in self._readings.items() if reading.worker == worker]:
            self._leave(requests[id_])

    def forget(self, request: Request) -> None:
        """Nothing more is wanted of it: it has been read, or the target reads it, or nobody needs it."""
        reading = self._readings.pop(request.id, None)
        if reading is not None and reading.worker:
            self._workers.send_drafter(reading.worker, Close(request.id))

    def _leave(self, request: Request) -> None:
        """The target reads on by itself."""
        self.forget(request)
        self._dispatch.again(request)

    def _burden(self, worker: str) -> int:
        return sum(reading.left for reading in self._readings.values() if reading.worker == worker)
