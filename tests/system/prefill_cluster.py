"""A cluster in one thread with a prefill worker, and faults of its messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec import structs

from outrider.engine.loading import LoadedModel
from outrider.prefill_worker.worker import MlxReader, PrefillWorker
from outrider.protocol.messages import Hello, KvMemory, Message, PromptKv
from tests.system.cluster import Cluster
from tests.system.links import FakeLink, Idle, through_the_codec

NAME = "prefill-0"
Way = Callable[[Message, random.Random], list[Message]]
"""What becomes of a message to or from the prefill worker."""


class PrefillCluster(Cluster):
    """`way`: what becomes of words on the way, both ways; `turns` of the prefill worker to one of the target's."""

    def __init__(self, target: LoadedModel, *arguments: Any, way: Way, turns: int = 1, **settings: Any) -> None:
        self._reader = MlxReader(target)
        self._reader_link = FakeLink(NAME)
        self._reader_link.inbox.append(through_the_codec(KvMemory(1 << 24)))
        self.prefill = PrefillWorker(self._reader_link, self._reader)
        self._way, self._turns = way, turns
        self.is_there = True
        self.handed: list[PromptKv] = []
        self._way_rng = random.Random(7)
        super().__init__(target, *arguments, **settings)

    def hello(self, name: str) -> Hello:
        return structs.replace(super().hello(name), role="prefill" if name == NAME else "draft")

    def prefill_workers(self) -> set[str]:
        return {NAME} if self.is_there else set()

    def lose_prefill_worker(self) -> None:
        self.is_there = False
        self._reader_link.inbox.clear()
        self.rounds.on_prefill_worker_lost(NAME)

    def send_worker(self, name: str, message: Message) -> None:
        if name != NAME:
            super().send_worker(name, message)
        elif self.is_there:
            self._reader_link.inbox += [through_the_codec(one) for one in self._way(message, self._way_rng)]

    def _turn(self) -> None:
        """Time passes only where nobody has anything to do."""
        turns = 0
        while self._reads() and (turns < self._turns or not self._target_link.inbox):
            turns += 1
        super()._turn()

    def _reads(self) -> bool:
        """One turn of the prefill worker's loop, and what it says; False: it waits."""
        try:
            if not self.is_there or not self.prefill.turn():
                return False
        except Idle:
            return False
        while self._reader_link.sent and self.is_there:
            for message in self._way(self._reader_link.sent.popleft(), self._way_rng):
                self.handed += [message] if isinstance(message, PromptKv) else []
                self.rounds.handle([(NAME, through_the_codec(message))], self._clock())
        return True
