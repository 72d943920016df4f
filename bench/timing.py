"""Isolated times: what each step of a round costs on real workers, while one process works and all others are idle.

`Workbench` drives workers with single messages. Times are spans that workers measure around evaluated work, on this
machine's clock.

The loops time rounds of one kind over a known text: each opens a request after the text's prompt, and closes it at the
end. `numbers` count rounds from 1; the first `WARM_UP` are not returned. `Stopwatch` takes such samples between the
runs of a comparison, so that drift of the machine affects both equally.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import zmq

from outrider.orchestrator.core.policy.forecasts import Costs
from outrider.orchestrator.core.worker_pool import WorkerPool
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import (
    Autonomous,
    Branches,
    Close,
    Commit,
    Coupled,
    Drafted,
    Fault,
    Message,
    Open,
    Outcome,
    Span,
    Verify,
)
from outrider.protocol.profile import Latency
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.socket_files import PrivateDirectory

REQUEST = "bench"
PATIENCE_MS = 120_000

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
    with PrivateDirectory() as directory, closing(WorkerPool(context, settings, directory.path)) as pool:
        bench = Workbench(pool, tell)
        pool.start()
        while not pool.ready:
            bench.listen()
        yield bench


class Workbench:
    """Runs one request at a time on the workers of `pool`: `open`, rounds, `close`."""

    def __init__(self, pool: WorkerPool, tell: Callable[[str], None]) -> None:
        self._pool = pool
        self._tell = tell
        self._arrived: list[Message] = []
        self._poller = zmq.Poller()
        self._poller.register(pool.socket, zmq.POLLIN)

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
        self._pool.send_target(Verify(REQUEST, 0, 1, len(text), Autonomous(length - 1)))
        while len(text) < len(prompt) + length:
            outcome = self._wait(Outcome)
            text.append(outcome.bonus)
            spans.append(outcome.work)
        self.close()
        return tuple(text), spans

    def verify(self, number: int, base_len: int, chain: Sequence[int]) -> Outcome:
        """Sends a VERIFY, and returns its outcome."""
        self._pool.send_target(Verify(REQUEST, 0, number, base_len, Coupled(tuple(chain))))
        return self._wait(Outcome)

    def work_ahead(self, at: RoundPosition, depth: int, branches: int) -> Span:
        """Sends a COMMIT. Returns the span from the drafter's first forward to its last."""
        self._to_drafters(Commit(REQUEST, 0, at.number, at.base_len, at.new, at.chain, depth, branches))
        first = last = self._wait(Branches)
        while not last.final:
            last = self._wait(Branches)
        return Span(first.work.started_ns, last.work.ended_ns)

    def both(self, at: RoundPosition, depth: int, branches: int) -> ParallelRound:
        """Sends VERIFY and COMMIT, and waits for the outcome and all branches."""
        self._pool.send_target(Verify(REQUEST, 0, at.number, at.base_len, Coupled(at.chain)))
        ahead = self.work_ahead(at, depth, branches)
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
            self.listen()
        raise WorkerError(f"no answer from the workers within {PATIENCE_MS // 1000} s")

    def listen(self) -> None:
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


class Curve(Latency):
    """Milliseconds by rows, tokens or branches, interpolated and extrapolated linearly."""

    __slots__ = ()
    __call__ = Latency.milliseconds


def medians(samples: Iterable[tuple[int, float]]) -> Curve:
    by_place = defaultdict[int, list[float]](list)
    for place, ms in samples:
        by_place[place].append(ms)
    return Curve(tuple((at, statistics.median(found)) for at, found in sorted(by_place.items())))


WARM_UP = 2

Text = tuple[int, Sequence[int]]
"""The length of the prompt, and the prompt with the target's continuation."""


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """A round's position in the text: the tokens `new` are committed, then `chain` is verified."""

    number: int
    base_len: int
    new: tuple[int, ...]
    chain: tuple[int, ...]


def numbers_of(rounds: int) -> range:
    """Returns the round numbers of the warm-up and of `rounds` rounds."""
    return range(1, WARM_UP + rounds + 1)


def positions_of(known: Text, depth: int, numbers: Iterable[int]) -> Iterator[RoundPosition]:
    """Yields positions K+1 tokens apart; the chain of each round is the text itself, so that all of it is accepted."""
    sent, text = known
    for number in numbers:
        at = known[0] + 1 + (number - 1) * (depth + 1)
        yield RoundPosition(number, at, tuple(text[sent:at]), tuple(text[at : at + depth]))
        sent = at


def verifies(
    bench: Workbench, known: Text, sampling: SamplingParams, rows: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Yields rows and milliseconds of verifies with these row counts, one after another. At the text's end, the request
    starts again after the prompt."""
    (start, text), number, at = known, 0, len(known[1])
    for count in rows:
        if at + count > len(text):
            if number:
                bench.close()
            bench.open(text[:start], sampling, target=True, drafter=False)
            number, at = 1, start + 2 + bench.verify(1, start + 1, ()).accepted
        number += 1
        outcome = bench.verify(number, at, text[at : at + count - 1])
        yield count, outcome.work.milliseconds
        at += outcome.accepted + 1
    bench.close()


def turns(
    bench: Workbench, known: Text, sampling: SamplingParams, depth: int, numbers: Iterable[int]
) -> Iterator[tuple[float, float]]:
    """Alternates a chain on request with a verify of the same length. A drafter that has waited is slower.

    Yields the milliseconds of each chain from request to answer, and of the target's wait beyond it.
    """
    start, text = known
    bench.open(text[:start], sampling, target=True, drafter=True)
    sent, at = start, start + 1
    for number in numbers:
        if at + depth >= len(text):
            break
        chain_ms = bench.chain(number, at, text[sent:at], depth)
        outcome = bench.verify(number, at, text[at : at + depth])
        if number > WARM_UP:
            yield chain_ms, max(outcome.idle_ns / 1e6 - chain_ms, 0.0)
        sent, at = at, at + outcome.accepted + 1
    bench.close()


def aheads(
    bench: Workbench, known: Text, sampling: SamplingParams, depth: int, branches: int, numbers: Iterable[int]
) -> Iterator[Span]:
    """Works ahead for the outcomes of chains of K. Yields the span of each round's forwards."""
    start, text = known
    bench.open(text[:start], sampling, target=False, drafter=True)
    for place in positions_of(known, depth, numbers):
        span = bench.work_ahead(place, depth, branches)
        if place.number > WARM_UP:
            yield span
    bench.close()


# Rounds of each kind in a sample.
ROUNDS = 2
# Row counts to time beyond K+1, because n-grams may extend a chain.
MORE_ROWS = (12, 16)


@dataclass(frozen=True, slots=True)
class IsolatedTimes:
    """Medians in milliseconds. `step_ms`: a token of autonomous plain decoding. `chain_ms(K)`: a chain from request to
    answer. `ahead_ms(K)`: the work ahead, all branches K deep. `between_ms`: the target's wait in SD beyond the chain's
    time."""

    step_ms: float
    verify_ms: Curve
    chain_ms: Curve
    ahead_ms: Curve
    between_ms: float

    def costs(self, turnaround_ms: float | None = None) -> Costs:
        """Returns costs for the formula. `turnaround_ms`: the turnaround of the run's hits; None: `between_ms`."""
        usual_ms = self.between_ms if turnaround_ms is None else turnaround_ms
        more_ms = max(self.between_ms - usual_ms, 0.0)  # a chain on request also waits for this long
        return Costs(
            self.step_ms, self.verify_ms, lambda depth: self.chain_ms(depth) + more_ms, self.ahead_ms, usual_ms
        )


class Stopwatch:
    """Collects samples with all `depths` and B = `branches`. One process works at a time; a chain is requested right
    after a verify, as in SD."""

    def __init__(self, bench: Workbench, depths: Sequence[int], branches: int) -> None:
        self._bench = bench
        self._depths = sorted({1, *depths})
        self._branches = branches
        self._steps: list[float] = []
        self._between: list[float] = []
        self._verify: list[tuple[int, float]] = []
        self._chain: list[tuple[int, float]] = []
        self._ahead: list[tuple[int, float]] = []

    def sample(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Takes a sample of each kind over the text that the target generates after `prompt`, in a few seconds. Plain
        steps are timed along the whole text, the rest from its middle, where the context has the mean length of a run.

        Raises:
            WorkerError: a worker was lost.
        """
        endless = replace(sampling, max_tokens=1 << 20)
        rows = [*range(1, self._depths[-1] + 2), *(more for more in MORE_ROWS if more > self._depths[-1] + 1)]
        needed = max(numbers_of(ROUNDS)[-1] * (self._depths[-1] + 1), rows[-1]) + 2
        length = max(sampling.max_tokens, 2 * needed)
        text, spans = self._bench.text(prompt, length, endless)
        self._steps += [(after.ended_ns - before.ended_ns) / 1e6 for before, after in pairwise(spans)]
        known = (len(prompt) + length // 2, text)
        self._verify += verifies(self._bench, known, endless, rows * ROUNDS)
        for depth in self._depths:
            for chain_ms, between_ms in turns(self._bench, known, endless, depth, numbers_of(ROUNDS)):
                self._chain.append((depth, chain_ms))
                self._between.append(between_ms)
            ahead = aheads(self._bench, known, endless, depth, self._branches, numbers_of(ROUNDS))
            self._ahead += [(depth, span.milliseconds) for span in ahead]

    def read(self) -> IsolatedTimes:
        """Returns the medians of all samples, of which at least one is needed."""
        return IsolatedTimes(
            statistics.median(self._steps),
            medians(self._verify),
            medians(self._chain),
            medians(self._ahead),
            statistics.median(self._between),
        )
