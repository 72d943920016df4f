"""Fuzzes a worker with a malicious orchestrator: the real workers' loops in this thread, with a tiny model.

Frames are decoded as by a worker's link. After each batch all requests are closed, and an honest request must get the
right answer.
"""

from __future__ import annotations

import random

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.protocol.codec import MESSAGES, decode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import (
    Autonomous,
    Branches,
    Close,
    Commit,
    DraftInProcess,
    DraftTokens,
    Halt,
    InProcess,
    KvMemory,
    Message,
    Open,
    Outcome,
    Prepare,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ
from outrider.target_worker.worker import TargetWorker
from tests.harness.fuzz.fuzz_target import FuzzFailure
from tests.harness.fuzz.mutation import Mutator
from tests.system.links import FakeLink, Idle

VOCABULARY, CONTEXT, KV_LIMIT = 64, 96, 1 << 20
MOST_TURNS = 2  # after each frame, because an orchestrator may request endless work
WORDS = ("Open", "Verify", "Prepare", "Halt", "Commit", "Close", "KvMemory")


class Table(nn.Module):  # type: ignore[misc]
    """A model that depends on the last token only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._table = mx.array(np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32))

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        return self._table[tokens]


def tiny() -> LoadedModel:
    return LoadedModel(
        model=Table(), config={}, model_type="table", vocab_size=VOCABULARY, context_length=CONTEXT, parameters=0,
        weight_bytes=0, attention_only=True,
    )  # fmt: skip


class WorkerFuzz:
    """See the module; `target`: of which kind."""

    def __init__(self, rng: random.Random, target: bool) -> None:
        self._target = target
        self._mutator = Mutator(rng, [*MESSAGES, *(WORDS * 10)])
        self._link = FakeLink("worker")
        drafter = MlxDrafter(tiny()) if not target else None
        self._worker = (
            DraftWorker(self._link, drafter, FAN_OUT_POLICIES["best-first"])
            if drafter is not None
            else TargetWorker(self._link, tiny())  # type: ignore[arg-type]
        )
        self._serial = self._answered = self._refused = self._ended = 0
        self._turn(KvMemory(KV_LIMIT))
        self._expected = self._honest()
        for message in _examples():
            self._mutator.show(message)

    def send_broken(self) -> None:
        try:
            self._link.inbox += decode_all(self._mutator.frames())
        except ProtocolError:
            self._refused += 1
        self._turns()
        self._answered += len(self._link.sent)
        self._link.sent.clear()

    def settle(self) -> None:
        self._turn()
        held: dict[str, object] = getattr(self._worker, "_running", {})
        self._turn(*map(Close, held), KvMemory(KV_LIMIT))
        if held:
            raise FuzzFailure(f"{list(held)} are held although they were closed")
        received = self._honest()
        if received != self._expected:
            raise FuzzFailure(f"an honest request received {received}, not {self._expected}")

    def summary(self) -> str:
        return f"{self._answered} answers, {self._refused} frames refused, ended {self._ended} times"

    def close(self) -> None: ...

    def _honest(self) -> list[object]:
        """Returns the worker's answers to an honest request."""
        self._serial += 1
        name = f"honest {self._serial}"
        task = [] if self._target else [Commit(name, 0, 0, 3, (), (), 3, 2)]
        self._turn(Open(name, 0, 0, np.array([1, 2, 3], np.int32), SamplingParams()), *task)
        answers = [message for message in self._link.sent if getattr(message, "request", "") == name]
        self._turn(Close(name))
        self._link.sent.clear()
        if self._target:
            return [message.bonus for message in answers if isinstance(message, Outcome)]
        deepest = [message for message in answers if isinstance(message, Branches) and message.final]
        if not deepest:
            raise FuzzFailure(f"an honest request received {answers}")
        return [(entry.committed, entry.chain) for entry in deepest[-1].entries]  # their odds depend on earlier rounds

    def _turn(self, *messages: Message) -> None:
        """Sends these messages, and runs the worker until it waits."""
        self._link.inbox += messages
        for _ in range(1000):
            if not self._turns():
                return
        raise FuzzFailure("the worker does not become idle")

    def _turns(self) -> bool:
        """Runs a few turns. Returns whether there is more to do."""
        for _ in range(MOST_TURNS):
            try:
                if not self._worker.turn():
                    self._ended += 1
                    setattr(self._worker, "_ending", False)  # noqa: B010 # a peer may ask it to end
            except Idle:
                return False
        return True


def _examples() -> list[Message]:
    """Returns messages of an honest orchestrator."""
    return [
        Open("r", 0, 0, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=30), (0,)),
        Open("s", 0, 0, np.array([4, 5], np.int32), SamplingParams(temp=0.8, seed=1, logprobs=2), fan_out=2),
        Verify("r", 0, 1, 4, DraftTokens((7, 8))),
        Verify("r", 0, 1, 4, DraftTokens((7,), (), SparseQ(np.array([[7]], np.int32), np.ones((1, 1), np.float32)))),
        Verify("s", 0, 1, 3, Autonomous(20, InProcess(3))),
        Verify("s", 0, 1, 3, DraftInProcess(InProcess(3), 20, (5, 6), (-1, -1))),
        Prepare("r", 0, 1, 4, ((7, 9),), ((1, 2),)),
        Commit("r", 0, 0, 3, (), (), 3, 4),
        Commit("r", 0, 1, 4, (6,), (7, 8), 3, 4),
        Commit("s", 0, 1, 3, (6,), None, 3, 4),
        Halt("s", 0),
        Close("s"),
    ]
