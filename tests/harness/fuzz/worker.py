"""Fuzzes a worker with a malicious orchestrator: the loop of the real worker in this thread, with a tiny model.

Frames are decoded as by a worker's link. After each batch all requests are closed, and a valid request must get the
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
MOST_TURNS = 2  # turns of the loop after each frame, because an orchestrator may request endless work
LIKELY_MESSAGES = ("Open", "Verify", "Prepare", "Halt", "Commit", "Close", "KvMemory")


class TableModel(nn.Module):  # type: ignore[misc]
    """A model that depends on the last token only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._table = mx.array(np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32))

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        return self._table[tokens]


def tiny_model() -> LoadedModel:
    return LoadedModel(
        model=TableModel(), config={}, model_type="table", vocab_size=VOCABULARY, context_length=CONTEXT, parameters=0,
        weight_bytes=0, attention_only=True,
    )  # fmt: skip


class WorkerFuzz:
    """See the module. `target`: fuzzes a target worker, else a draft worker."""

    def __init__(self, rng: random.Random, target: bool) -> None:
        self._target = target
        self._mutator = Mutator(rng, [*MESSAGES, *(LIKELY_MESSAGES * 10)])
        self._link = FakeLink("worker")
        drafter = MlxDrafter(tiny_model()) if not target else None
        self._worker = (
            DraftWorker(self._link, drafter, FAN_OUT_POLICIES["best-first"])
            if drafter is not None
            else TargetWorker(self._link, tiny_model())  # type: ignore[arg-type]
        )
        self._serial = self._answer_count = self._refused_count = self._shutdown_count = 0
        self._deliver(KvMemory(KV_LIMIT))
        self._expected = self._run_request()
        for message in _examples():
            self._mutator.show(message)

    def send_broken(self) -> None:
        try:
            self._link.inbox += decode_all(self._mutator.frames())
        except ProtocolError:
            self._refused_count += 1
        self._run_turns()
        self._answer_count += len(self._link.sent)
        self._link.sent.clear()

    def settle(self) -> None:
        self._deliver()
        running: dict[str, object] = getattr(self._worker, "_running", {})
        self._deliver(*map(Close, running), KvMemory(KV_LIMIT))
        if running:
            raise FuzzFailure(f"{list(running)} are held although they were closed")
        received = self._run_request()
        if received != self._expected:
            raise FuzzFailure(f"an honest request received {received}, not {self._expected}")

    def summary(self) -> str:
        return f"{self._answer_count} answers, {self._refused_count} frames refused, ended {self._shutdown_count} times"

    def close(self) -> None: ...

    def _run_request(self) -> list[object]:
        """Returns the worker's answers to a valid request."""
        self._serial += 1
        name = f"honest {self._serial}"
        task = [] if self._target else [Commit(name, 0, 0, 3, (), (), 3, 2)]
        self._deliver(Open(name, 0, 0, np.array([1, 2, 3], np.int32), SamplingParams()), *task)
        answers = [message for message in self._link.sent if getattr(message, "request", "") == name]
        self._deliver(Close(name))
        self._link.sent.clear()
        if self._target:
            return [message.bonus for message in answers if isinstance(message, Outcome)]
        deepest = [message for message in answers if isinstance(message, Branches) and message.final]
        if not deepest:
            raise FuzzFailure(f"an honest request received {answers}")
        return [(entry.committed, entry.chain) for entry in deepest[-1].entries]  # their odds depend on earlier rounds

    def _deliver(self, *messages: Message) -> None:
        """Delivers these messages, and runs the worker until it is idle."""
        self._link.inbox += messages
        for _ in range(1000):
            if not self._run_turns():
                return
        raise FuzzFailure("the worker does not become idle")

    def _run_turns(self) -> bool:
        """Runs a few turns of the worker's loop. Returns False once it is idle."""
        for _ in range(MOST_TURNS):
            try:
                if not self._worker.turn():
                    self._shutdown_count += 1
                    setattr(self._worker, "_ending", False)  # noqa: B010 # a peer may ask it to end
            except Idle:
                return False
        return True


def _examples() -> list[Message]:
    """Returns valid messages of an orchestrator."""
    return [
        Open("r", 0, 0, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=30), (0,)),
        Open("s", 0, 0, np.array([4, 5], np.int32), SamplingParams(temp=0.8, seed=1, logprobs=2), fan_out=2),
        Verify("r", 0, 1, 4, DraftTokens((7, 8))),
        Verify("r", 0, 1, 4, DraftTokens((7,), (), SparseQ(np.array([[7]], np.int32), np.ones((1, 1), np.float32)))),
        Verify("s", 0, 1, 3, Autonomous(20, InProcess(3))),
        Verify("s", 0, 1, 3, DraftInProcess((5, 6), (-1, -1), draft=InProcess(3), max_tokens=20)),
        Prepare("r", 0, 1, 4, ((7, 9),), ((1, 2),)),
        Commit("r", 0, 0, 3, (), (), 3, 4),
        Commit("r", 0, 1, 4, (6,), (7, 8), 3, 4),
        Commit("s", 0, 1, 3, (6,), None, 3, 4),
        Halt("s", 0),
        Close("s"),
    ]
