"""Isolated times: what each step of a round costs on real workers, while one process works and all others are idle.

Times are spans that workers measure around evaluated work, on this machine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import zmq

from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import (
    Autonomous,
    Branches,
    Close,
    Commit,
    DraftTokens,
    Fault,
    Message,
    Open,
    Outcome,
    Span,
    Verify,
    is_serving,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.socket_files import PrivateDirectory

REQUEST_ID = "bench"
ANSWER_TIMEOUT_MS = 120_000
# Rounds at the start of a request, whose times do not count.
WARM_UP_ROUNDS = 2

M = TypeVar("M")

KnownText = tuple[int, Sequence[int]]
"""The length of the prompt, and the prompt with the target's continuation."""


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """A round's position in the text: the tokens `new` are committed, then `chain` is verified."""

    number: int
    base_len: int
    new: tuple[int, ...]
    chain: tuple[int, ...]


class ParallelRound(NamedTuple):
    """The spans of a verify and of the drafter's forwards during it: from the first start to the last end, and each."""

    whole: Span
    verify: Span
    ahead: Span


@contextmanager
def workbench(settings: ServeSettings, progress: Callable[[str], None]) -> Iterator[Workbench]:
    """Starts the workers of these settings, which must name folders (see `pairing`).

    Raises:
        WorkerError: the draft model can't draft, or the target can't verify chains.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with PrivateDirectory() as directory, closing(WorkerPool(context, settings, directory.path)) as pool:
        bench = Workbench(pool, progress)
        pool.start()
        while not is_serving(pool.stats()):
            bench.listen()
        if settings.has_draft_worker and not (pool.drafters() and pool.target_abilities.chains):
            raise WorkerError(f"nothing can be drafted: {'; '.join(pool.notes())}")
        yield bench


class Workbench:
    """Runs one request at a time on the workers of `pool`: `open`, rounds, `close`."""

    def __init__(self, pool: WorkerPool, progress: Callable[[str], None]) -> None:
        self._pool = pool
        self._progress = progress
        self._arrived: list[Message] = []

    def open(self, tokens: Sequence[int], sampling: SamplingParams, *, target: bool, drafter: bool) -> int | None:
        """Sends OPEN to the chosen workers. Returns the target's first token; None without the target."""
        self._arrived.clear()
        opening = Open(REQUEST_ID, 0, 0, np.asarray(tokens, np.int32), sampling)
        if drafter:
            self.send_drafters(opening)
        if not target:
            return None
        self._pool.send_target(opening)
        return self.wait(Outcome).bonus

    def close(self) -> None:
        self._pool.send_target(Close(REQUEST_ID))
        self.send_drafters(Close(REQUEST_ID))

    def text(self, prompt: Sequence[int], length: int, sampling: SamplingParams) -> tuple[tuple[int, ...], list[Span]]:
        """Returns the prompt with `length` tokens that the target generated, and the span of each plain step."""
        first = self.open(prompt, sampling, target=True, drafter=False)
        text, spans = [*prompt, first or 0], []
        self._pool.send_target(Verify(REQUEST_ID, 0, 1, len(text), Autonomous(length - 1)))
        while len(text) < len(prompt) + length:
            outcome = self.wait(Outcome)
            text.append(outcome.bonus)
            spans.append(outcome.work)
        self.close()
        return tuple(text), spans

    def rounds(
        self,
        known: KnownText,
        sampling: SamplingParams,
        depth: int,
        rounds: int,
        one: Callable[[RoundPosition], M],
        *,
        target: bool = True,
        drafter: bool = True,
    ) -> list[M]:
        """Opens a request after the prompt of `known`, calls `one` for rounds K + 1 tokens apart, and closes it.

        The chain of each round is the text itself, so that all of it is accepted. Returns what `one` returned, without
        the warm-up.
        """
        start, text = known
        self.open(text[:start], sampling, target=target, drafter=drafter)
        found, sent = [], start
        for number in range(1, WARM_UP_ROUNDS + rounds + 1):
            at = start + 1 + (number - 1) * (depth + 1)
            found.append(one(RoundPosition(number, at, tuple(text[sent:at]), tuple(text[at : at + depth]))))
            sent = at
        self.close()
        return found[WARM_UP_ROUNDS:]

    def verify(self, number: int, base_len: int, chain: Sequence[int]) -> Outcome:
        """Sends a VERIFY, and returns its outcome."""
        self._pool.send_target(Verify(REQUEST_ID, 0, number, base_len, DraftTokens(tuple(chain))))
        return self.wait(Outcome)

    def work_ahead(self, at: RoundPosition, depth: int, branches: int) -> Span:
        """Sends a COMMIT. Returns the span from the drafter's first forward to its last."""
        self.send_drafters(Commit(REQUEST_ID, 0, at.number, at.base_len, at.new, at.chain, depth, branches))
        first = last = self.wait(Branches)
        while not last.final:
            last = self.wait(Branches)
        return Span(first.work.started_ns, last.work.ended_ns)

    def both(self, at: RoundPosition, depth: int, branches: int) -> ParallelRound:
        """Sends VERIFY and COMMIT, and waits for the outcome and all branches."""
        self._pool.send_target(Verify(REQUEST_ID, 0, at.number, at.base_len, DraftTokens(at.chain)))
        ahead = self.work_ahead(at, depth, branches)
        verify = self.wait(Outcome).work
        begun, ended = min(verify.started_ns, ahead.started_ns), max(verify.ended_ns, ahead.ended_ns)
        return ParallelRound(Span(begun, ended), verify, ahead)

    def send_drafters(self, message: Message) -> None:
        for name in self._pool.drafters():
            self._pool.send_worker(name, message)

    def wait(self, wanted: type[M]) -> M:
        """Returns the next message of a class; others are kept.

        Raises:
            WorkerError: a worker was lost or failed, or did not answer in time.
        """
        deadline_ns = clock.now() + ANSWER_TIMEOUT_MS * 1_000_000
        while clock.now() < deadline_ns:
            for index, message in enumerate(self._arrived):
                if isinstance(message, wanted):
                    del self._arrived[index]
                    return message
            self.listen()
        raise WorkerError(f"no answer from the workers within {ANSWER_TIMEOUT_MS // 1000} s")

    def listen(self) -> None:
        """Waits up to 250 ms for messages and receives them. Raises WorkerError if a worker was lost or failed."""
        self._pool.flush()
        self._pool.socket.poll(250)
        for _, message in self._pool.receive():
            if isinstance(message, Fault):
                raise WorkerError(message.message)
            self._arrived.append(message)
        if self._pool.status_changed:
            self._pool.status_changed = False
            self._progress(self._pool.stage)
        self._pool.ping(clock.now())
        for loss in self._pool.losses(clock.now()):
            raise WorkerError(loss.why)
