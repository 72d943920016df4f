"""Lets prefill workers read prompts instead of the target.

The target reports how much of a prompt it has; the rest goes to a worker if it is long enough. A lost worker costs
only time: the target, sent the round again, reads the rest itself. Knows requests and messages, no keys or values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.protocol.messages import Close, Message, Prefill, Prefilled, PromptKv


@dataclass(slots=True)
class RemotePrefill:
    """A prompt that was offered, or that `worker` reads, with `left` tokens unread."""

    left: int
    worker: str = ""


class RemotePrefills:
    """The remote prefills under way, by request.

    The target itself reads prompts shorter than `min_tokens`. `send_again` sends a request's round to the target again,
    so that it reads on by itself.
    """

    def __init__(self, workers: WorkerPool, send_again: Callable[[Request], None], min_tokens: int) -> None:
        self._workers = workers
        self._send_again = send_again
        self._min_tokens = min_tokens
        self._prefills: dict[str, RemotePrefill] = {}

    def offer(self, request: Request) -> bool:
        """Offers a prompt to the prefill workers; returns whether the target is to wait before it reads."""
        self.forget(request)
        left = len(request.sequence.tokens) - 1
        if left < self._min_tokens or not self._workers.prefill_workers():
            return False
        self._prefills[request.id] = RemotePrefill(left)
        return True

    def on_progress(self, request: Request, message: Prefilled) -> None:
        """Sends the part of a prompt that the target lacks to the least busy worker, or leaves it to the target."""
        prefill = self._prefills.get(request.id)
        if prefill is None:
            return
        prefill.left = message.total - 1 - message.done
        if prefill.worker or prefill.left <= 0:
            return
        workers = self._workers.prefill_workers()
        if prefill.left < self._min_tokens or not workers:
            self._hand_back(request)
            return
        loads = {name: sum(p.left for p in self._prefills.values() if p.worker == name) for name in sorted(workers)}
        prefill.worker = min(loads, key=loads.__getitem__)
        tokens = np.asarray(request.sequence.tokens, np.int32)
        self._workers.send_worker(prefill.worker, Prefill(request.id, request.round.epoch, tokens, message.done))

    def on_message(self, request: Request | None, sender: str, message: Message) -> bool:
        """Handles a prefill worker's message; returns False if it is stale."""
        prefill = self._prefills.get(request.id) if request is not None else None
        answers = sender, getattr(message, "epoch", None)
        if request is None or prefill is None or answers != (prefill.worker, request.round.epoch):
            return False
        if isinstance(message, PromptKv):
            request.metrics.remote_prefill_tokens += message.count
            self._workers.send_target(message)
        else:
            self._hand_back(request)
        return True

    def on_worker_lost(self, worker: str, requests: Mapping[str, Request]) -> None:
        """Hands the prompts of a lost worker back to the target."""
        for id_ in [id_ for id_, prefill in self._prefills.items() if prefill.worker == worker]:
            self._hand_back(requests[id_])

    def forget(self, request: Request) -> None:
        """Ends a remote prefill: the prompt has been read, the target reads it, or the request has ended."""
        prefill = self._prefills.pop(request.id, None)
        if prefill is not None and prefill.worker:
            self._workers.send_worker(prefill.worker, Close(request.id))

    def _hand_back(self, request: Request) -> None:
        """Lets the target read on by itself."""
        self.forget(request)
        self._send_again(request)
