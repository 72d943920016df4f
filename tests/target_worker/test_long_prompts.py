"""Long prompts are read in pieces while other requests decode: each piece lengthens a forward by half a step.

The clock simulates a machine whose forward takes BASE_MS plus EACH_MS per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS
from outrider.engine.verify import BatchForward, PrefillChunk, VerifyInput, VerifyOutput, begin_forward
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Autonomous, Close, Halt, Message, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker import model_runner
from outrider.target_worker.model_runner import MIN_CHUNK_TOKENS
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, run_worker
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
DECODING, LONG = 8, 900
BASE_MS, SAMPLING = 8.0, SamplingParams(temp=1.0, seed=4)

Fed = list[tuple[int, int]]
"""For each forward: how many requests decode in it, and how many tokens of prompts it reads."""


class Machine:
    """A target worker with 8 decoding requests, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each_ms: float) -> None:
        self.fed: Fed = []
        self._now_ns = 0
        self.disturbed_ms = 0.0

        def timed_forward(
            inputs: Sequence[VerifyInput], chunks: Sequence[PrefillChunk] = (), after: BatchForward | None = None
        ) -> BatchForward:
            read = sum(chunk.count for chunk in chunks)
            self.fed.append((len(inputs), read))
            forward = begin_forward(inputs, chunks, after)
            plain_commit = forward.commit

            def commit() -> list[VerifyOutput | OutriderError]:
                self._advance(BASE_MS + self.disturbed_ms + each_ms * (len(inputs) + read))
                return plain_commit()

            monkeypatch.setattr(forward, "commit", commit)
            return forward

        monkeypatch.setattr(model_runner, "begin_forward", timed_forward)
        monkeypatch.setattr("outrider.protocol.clock.now", lambda: self._now_ns)
        self.link = FakeLink("target-0", deque())
        monkeypatch.setattr(self.link, "poll", self._advance)
        self.worker = TargetWorker(self.link, markov(TABLE))  # type: ignore[arg-type]
        for name in map(str, range(DECODING)):
            self.exchange(open_request(name, 3), turns=5)
            self.exchange(Verify(name, 0, 1, 4, Autonomous(10_000)), turns=5)
        self.exchange(turns=20)

    def _advance(self, milliseconds: float) -> None:
        self._now_ns += int(1e6 * milliseconds)

    def exchange(self, *messages: Message, turns: int) -> list[Any]:
        return run_worker(self.worker, self.link, messages, turns)

    def read(self, *names: str) -> Fed:
        """The forwards from these prompts' arrival to their first tokens."""
        before = len(self.fed)
        self.exchange(*(open_request(name, LONG) for name in names), turns=0)
        first: set[str] = set()
        while first != set(names):
            found = self.exchange(turns=1)
            first |= {one.request for one in found if isinstance(one, Outcome)} & set(names)
        return self.fed[before:]


def open_request(name: str, length: int) -> Open:
    return Open(name, 0, 0, np.ones(length, np.int32), SAMPLING)


def step_ms(each_ms: float) -> float:
    """The time of a plain step of all decoding requests."""
    return BASE_MS + each_ms * DECODING


Start = Callable[[float], Machine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return lambda each_ms: Machine(monkeypatch, each_ms)


@pytest.mark.parametrize("each_ms", [0.25, 0.1, 4.0])
@pytest.mark.parametrize("newcomers", [1, 2])
def test_prompt_piece_takes_about_half_a_step_per_reading_request(start: Start, each_ms: float, newcomers: int) -> None:
    found = start(each_ms).read(*"abc"[:newcomers])
    beside = [(inputs, read) for inputs, read in found if read]
    assert sum(read for _, read in beside) == newcomers * (LONG - 1)
    assert all(inputs >= DECODING for inputs, _ in beside)  # every decoding request takes part in each forward
    most = max(newcomers * step_ms(each_ms) / each_ms / 2, MIN_CHUNK_TOKENS)
    assert max(read for _, read in beside) <= 1.1 * most
    assert max(read for _, read in beside) >= 0.9 * most  # pieces are as long as they may be


def test_prompt_without_decoding_requests_is_read_in_full_pieces(start: Start) -> None:
    machine = start(0.25)
    machine.exchange(*(Close(str(name)) for name in range(DECODING)), turns=5)
    assert max(read for _, read in machine.read("a")) == PREFILL_CHUNK_TOKENS


def test_prompts_come_first_while_more_requests_wait_than_decode(start: Start) -> None:
    beside = [read for _, read in start(0.25).read(*"abcdefghi") if read]
    assert beside[:2] == [PREFILL_CHUNK_TOKENS] * 2  # then the first is read, and no more wait than decode
    assert max(beside[2:]) <= 1.1 * 8 * step_ms(0.25) / 0.25 / 2


def test_request_between_two_verifies_counts_as_decoding(start: Start) -> None:
    """Between an outcome and the next VERIFY it has nothing to feed; the VERIFY comes during the next forward."""
    machine = start(0.25)
    machine.exchange(*(Halt(str(name), 0) for name in range(DECODING)), turns=20)
    beside = machine.read("a")
    assert {inputs for inputs, _ in beside[:-1]} == {0}
    assert max(read for _, read in beside) <= 1.1 * step_ms(0.25) / 0.25 / 2


def test_pieces_at_most_double_after_a_disturbed_step(start: Start) -> None:
    """A slow step stays in the average for a while, and compared with it a piece seems to cost nothing."""
    machine = start(0.25)
    machine.disturbed_ms = 20 * BASE_MS
    machine.exchange(turns=2)
    machine.disturbed_ms = 0.0
    pieces = [read for _, read in machine.read("a") if read]
    assert all(after <= 2 * before for before, after in pairwise(pieces))
