"""A cluster in one thread with a prefill worker, whose messages can be lost, repeated or changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec import structs

from outrider.engine.kv_cache import KVLayout
from outrider.engine.loading import LoadedModel
from outrider.prefill_worker.worker import MlxReader, PrefillWorker
from outrider.protocol.messages import Hello, KvMemory, Message, PromptKv
from tests.system.cluster import Cluster
from tests.system.links import FakeLink, Idle, codec_round_trip

NAME = "prefill-0"
MessageFault = Callable[[Message, random.Random], list[Message]]
"""Returns the messages to deliver in place of a message to or from the prefill worker."""


class PrefillCluster(Cluster):
    """`fault`: applied to all messages to and from the prefill worker. `turns`: its turns before each of the target's.

    `delivered`: the pieces of prompts that reached the scheduler.
    """

    def __init__(
        self, target: LoadedModel, *arguments: Any, fault: MessageFault, turns: int = 1, **settings: Any
    ) -> None:
        self._reader = MlxReader(target)
        self._prefill_link = FakeLink(NAME)
        self._prefill_link.inbox.append(codec_round_trip(KvMemory(1 << 24)))
        self.prefill = PrefillWorker(self._prefill_link, self._reader, KVLayout.of(target.model, target.cpu))
        self._fault, self._turns = fault, turns
        self.is_available = True
        self.delivered: list[PromptKv] = []
        self._fault_rng = random.Random(7)
        super().__init__(target, *arguments, **settings)

    def hello(self, name: str) -> Hello:
        return structs.replace(super().hello(name), role="prefill" if name == NAME else "draft")

    def prefill_workers(self) -> set[str]:
        return {NAME} if self.is_available else set()

    def lose_prefill_worker(self) -> None:
        self.is_available = False
        self._prefill_link.inbox.clear()
        self.rounds.on_prefill_worker_lost(NAME)

    def send_worker(self, name: str, message: Message) -> None:
        if name != NAME:
            super().send_worker(name, message)
        elif self.is_available:
            self._prefill_link.inbox += [codec_round_trip(one) for one in self._fault(message, self._fault_rng)]

    def _turn(self) -> None:
        """Runs the prefill worker for `turns` turns, or until it is idle if the target is idle, and then the others."""
        turns = 0
        while self._run_prefill_turn() and (turns < self._turns or not self._target_link.inbox):
            turns += 1
        super()._turn()

    def _run_prefill_turn(self) -> bool:
        """Runs one turn of the prefill worker's loop, and delivers its messages. Returns False if it was idle."""
        try:
            if not self.is_available or not self.prefill.turn():
                return False
        except Idle:
            return False
        while self._prefill_link.sent and self.is_available:
            for message in self._fault(self._prefill_link.sent.popleft(), self._fault_rng):
                self.delivered += [message] if isinstance(message, PromptKv) else []
                self.rounds.handle([(NAME, codec_round_trip(message))], self._clock())
        return True
