"""Drives real workers with single messages, so that each step of a round can be timed by itself.

Times are spans that workers measure around evaluated work, on this machine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import zmq

from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Branches, Close, Commit, Drafted, Fault, Message, Open, Outcome, Span, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.socket_files import PrivateDirectory

REQUEST = "bench"
PATIENCE_MS = 120_000
TARGET = "target-0"

M = TypeVar("M")


class ParallelRound(NamedTuple):
    """The spans of a verify and of the drafter's forwards during it: from the first start to the last end, and each."""

    whole: Span
    verify: Span
    ahead: Span


@contextmanager
def workbench(settings: ServeSettings, tell: Callable[[str], None]) -> Iterator[Workbench]:
    """Starts the workers of these settings, which must name folders (see `pairing`)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with PrivateDirectory() as directory, Workbench(WorkerPool(context, settings, directory.path), tell) as bench:
        yield bench


class Workbench:
    """A context manager that owns the workers of `pool`. It runs one request at a time: `open`, rounds, `close`."""

    def __init__(self, pool: WorkerPool, tell: Callable[[str], None]) -> None:
        self._pool = pool
        self._tell = tell
        self._arrived: list[Message] = []
        self._poller = zmq.Poller()
        self._poller.register(pool.socket, zmq.POLLIN)

    def __enter__(self) -> Workbench:
        try:
            self._pool.start()
            while not self._pool.ready:
                self._listen()
        except BaseException:
            self._pool.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def need_drafter(self) -> None:
        """Checks for a draft worker.

        Raises:
            WorkerError: no draft worker runs.
        """
        if not self._pool.drafters():
            raise WorkerError("this measurement needs a draft worker; choose a draft_backend other than ngram and none")

    # --- a request ------------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], sampling: SamplingParams, *, target: bool, drafter: bool) -> int | None:
        """Sends OPEN to the chosen workers. Returns the target's first token; None without the target."""
        self._arrived.clear()
        opening = Open(REQUEST, 0, 0, np.asarray(tokens, np.int32), sampling)
        if drafter:
            self._to_drafters(opening)
        if not target:
            return None
        self._pool.send_target(opening)
        return self._wait(Outcome).bonus

    def close(self) -> None:
        self._pool.send_target(Close(REQUEST))
        self._to_drafters(Close(REQUEST))

    def text(self, prompt: Sequence[int], length: int, sampling: SamplingParams) -> tuple[tuple[int, ...], list[Span]]:
        """Returns the prompt with `length` tokens that the target generated, and the span of each plain step."""
        first = self.open(prompt, sampling, target=True, drafter=False)
        text, spans = [*prompt, first or 0], []
        self._pool.send_target(Verify(REQUEST, 0, 1, len(text), (), autonomous=True, max_tokens=length - 1))
        while len(text) < len(prompt) + length:
            outcome = self._wait(Outcome)
            text.append(outcome.bonus)
            spans.append(outcome.work)
        self.close()
        return tuple(text), spans

    # --- rounds ---------------------------------------------------------------------------------------------------

    def verify(self, number: int, base_len: int, chain: Sequence[int]) -> Outcome:
        """Sends a VERIFY, and returns its outcome."""
        self._pool.send_target(Verify(REQUEST, 0, number, base_len, tuple(chain)))
        return self._wait(Outcome)

    def work_ahead(
        self, number: int, base_len: int, new: Sequence[int], chain: Sequence[int], depth: int, branches: int
    ) -> Span:
        """Sends a COMMIT. Returns the span from the drafter's first forward to its last."""
        self._to_drafters(Commit(REQUEST, 0, number, base_len, tuple(new), tuple(chain), depth, branches))
        first = last = self._wait(Branches)
        while not last.final:
            last = self._wait(Branches)
        return Span(first.work.started_ns, last.work.ended_ns)

    def both(
        self, number: int, base_len: int, new: Sequence[int], chain: Sequence[int], depth: int, branches: int
    ) -> ParallelRound:
        """Sends VERIFY and COMMIT, and waits for the outcome and all branches."""
        self._pool.send_target(Verify(REQUEST, 0, number, base_len, tuple(chain)))
        ahead = self.work_ahead(number, base_len, new, chain, depth, branches)
        verify = self._wait(Outcome).work
        begun, ended = min(verify.started_ns, ahead.started_ns), max(verify.ended_ns, ahead.ended_ns)
        return ParallelRound(Span(begun, ended), verify, ahead)

    def chain(self, number: int, base_len: int, new: Sequence[int], depth: int) -> float:
        """Requests a chain. Returns the milliseconds until it arrived."""
        asked_ns = clock.now()
        self._to_drafters(Commit(REQUEST, 0, number, base_len, tuple(new), None, depth, 0))
        self._wait(Drafted)
        return (clock.now() - asked_ns) / 1e6

    def _to_drafters(self, message: Message) -> None:
        for name in self._pool.drafters():
            self._pool.send_worker(name, message)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wait(self, wanted: type[M]) -> M:
        """Returns the next message of a class; others are kept.

        Raises:
            WorkerError: a worker was lost or failed, or did not answer in time.
        """
        deadline_ns = clock.now() + PATIENCE_MS * 1_000_000
        while clock.now() < deadline_ns:
            for place, message in enumerate(self._arrived):
                if isinstance(message, wanted):
                    del self._arrived[place]
                    return message
            self._listen()
        raise WorkerError(f"no answer from the workers within {PATIENCE_MS // 1000} s")

    def _listen(self) -> None:
        """Receives messages for a moment. Raises WorkerError if a worker was lost or failed."""
        self._pool.flush()
        self._poller.poll(250)
        for _, message in self._pool.receive():
            if isinstance(message, Fault):
                raise WorkerError(message.message)
            self._arrived.append(message)
        if self._pool.news:
            self._pool.news = False
            self._tell(self._pool.stage)
        self._pool.ping(clock.now())
        for loss in self._pool.losses(clock.now()):
            raise WorkerError(loss.why)
