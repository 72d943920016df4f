"""The draft worker's loop: receives OPEN and COMMIT, sends BRANCHES and DRAFTED, runs one forward at a time.

It handles messages between two forwards, so a new outcome redirects the work at once. A prompt is read in pieces, first
come first served, with forwards of other requests between two of them. Owns a `DraftRequest` with one token tree for
each request; acts only on the newest commit; sends RESYNC if it has missed one. Measures its operations, so that it can
announce how long the next one should take. Knows nothing of models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from outrider.drafters.drafter import Drafter
from outrider.drafters.fan_out import FanOut
from outrider.drafters.growth import BranchTask, Continuation, ReadyBranches
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead, run_together
from outrider.engine.memory import PeakMemory
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.messages import (
    Branches,
    Commit,
    Drafted,
    Features,
    Message,
    Open,
    Resync,
    Shutdown,
    Span,
)
from outrider.protocol.worker_link import Link, WorkerLoop

log = logging.getLogger(__name__)

LATENCY_DECAY = 0.95
_MAX_FORWARDS_BETWEEN_PIECES = 8  # forwards for other requests between two pieces of a text


@dataclass(slots=True)
class DraftRequest:
    """A request's work. `newest`: its latest COMMIT, received at `committed_ns` (after OPEN alone, one that requests
    nothing); `owes_draft`: it must answer it with DRAFTED."""

    work: WorkAhead
    newest: Commit
    committed_ns: int
    owes_draft: bool = False

    @property
    def epoch(self) -> int:
        return self.newest.epoch

    def is_ahead_of(self, message: Open | Commit) -> bool:
        """Returns whether it already works on a later round than this message's."""
        return (message.epoch, message.round) < (self.epoch, self.newest.round)

    def gap(self, message: Commit) -> int:
        """Returns how many tokens before the message's were missed; negative if its tokens are known already."""
        return message.base_len - len(message.tokens) - self.work.committed_len

    def is_next(self, message: Commit) -> bool:
        """Returns whether its round follows the newest commit's, and branches were requested in both."""
        both = message.verifying is not None and self.newest.verifying is not None
        return both and message.round == self.newest.round + 1

    def commit(self, message: Commit, now_ns: int) -> None:
        task = BranchTask(message.verifying, message.depth, message.branches, message.rank_offset, message.min_prob)
        self.work.commit(message.tokens, task)
        self.newest, self.committed_ns = message, now_ns
        self.owes_draft = message.verifying is None and message.depth > 0

    def answer(self, result: Continuation | ReadyBranches, work: Span, peak_bytes: int) -> Drafted | Branches:
        newest, base_len = self.newest, self.work.committed_len
        begin = newest.request, newest.epoch, newest.round, base_len
        if isinstance(result, Continuation):
            line = result.line
            return Drafted(*begin, line, work, result.q, peak_bytes, result.alternatives, result.odds[: len(line)])
        return Branches(*begin, result.entries, work, result.final, result.q, peak_bytes)


class DraftWorker(WorkerLoop[DraftRequest]):
    """Serves requests from `link` with `drafter` until SHUTDOWN."""

    def __init__(
        self,
        link: Link,
        drafter: Drafter,
        fan_out: FanOut,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """`compiler`: for grammars over its tokens; without one it may draft tokens that a grammar excludes."""
        super().__init__(link, lambda: drafter.prompt_cache.use, drafter.prompt_cache.set_limit)
        self._drafter, self._fan_out, self._compiler = drafter, fan_out, compiler
        self._peak_memory = PeakMemory()
        self._batcher = DraftBatcher(drafter.calibration)
        self._longest_ms = dict[str, float]()  # by operation: read a piece of a text, grow branches, draft a chain
        self._forwards_since_read = 0

    def turn(self) -> bool:
        """Handles one message, or if there is none runs one forward: for all requests, or to read a piece of a text.
        Returns False on SHUTDOWN."""
        working = [running for running in self._running.values() if running.owes_draft or running.work.has_work]
        message = self._link.receive(wait=not working)
        if isinstance(message, Shutdown):
            return False
        if message is None:
            self._forward(working)
        else:
            self._run_or_fail(message, partial(self._handle, message))
        return True

    def _run_or_fail(self, about: Message, task: Callable[[], None]) -> None:
        """Runs a task of the request that `about` names, and ends the request if it fails."""
        try:
            with wrap_model_errors("the drafter's forward"):
                task()
        except OutriderError as error:
            self._fail(about, error, getattr(about, "round", None))

    def _handle(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Commit():
                self._commit(message)
            case Features():
                self._on_features(message)
            case _:
                super()._handle(message)

    def _open(self, message: Open) -> None:
        known = self._running.get(message.request)
        if known is not None and known.is_ahead_of(message):
            self._drop_stale(message)
            return
        self._close(message.request)
        self._close_silent(lambda running: math.inf if running.work.has_work else running.committed_ns)
        if not self._running:
            self._peak_memory.restart()
        tokens = message.tokens.tolist()
        constraint = self._compiler.constraint_of(message) if self._compiler is not None else None
        tree = self._drafter.open(tokens, message.sampling, constraint, message.fan_out)
        work = WorkAhead(tree, message.eos, self._fan_out, self._drafter.calibration, tokens[tree.committed_len :])
        nothing = Commit(message.request, message.epoch, message.round, work.committed_len, (), None, 0, 0)
        self._running[message.request] = DraftRequest(work, nothing, clock.now())

    def _commit(self, message: Commit) -> None:
        running = self._running.get(message.request)
        if running is None or message.epoch > running.epoch:
            self._link.send(Resync(request=message.request, epoch=message.epoch))
            return
        gap = running.gap(message)
        if running.is_ahead_of(message) or gap < 0:
            self._drop_stale(message)
            return
        if gap > 0:
            self._close(message.request)
            self._link.send(Resync(request=message.request, epoch=message.epoch))
            return
        new = (*message.tokens, *(message.verifying or ()))
        self._drafter.check_text(new, running.work.committed_len + len(message.tokens))
        now_ns = clock.now()
        if running.is_next(message):
            self._batcher.capacity.rounds.add(1, (now_ns - running.committed_ns) / clock.MILLISECOND_NS)
        running.commit(message, now_ns)

    def _on_features(self, message: Features) -> None:
        running = self._running.get(message.request)
        if running is not None and message.epoch == running.epoch:
            running.work.tree.add_features(message.position, message.rows)

    def _forward(self, working: Sequence[DraftRequest]) -> None:
        """Drafts requested chains, then grows all trees by one forward. Reads a piece of the first text that must be
        read if no other request has work, or after several forwards for the others."""
        reading = [running for running in working if running.work.must_read]
        others = [running for running in working if not running.work.must_read]
        if reading and (not others or self._forwards_since_read >= _MAX_FORWARDS_BETWEEN_PIECES):
            self._forwards_since_read = 0
            self._run_or_fail(reading[0].newest, partial(self._read, reading[0]))
            return
        self._forwards_since_read += 1
        owed = [running for running in others if running.owes_draft]
        growing = [running for running in others if not running.owes_draft]
        if owed:
            self._draft(owed)
        if growing:
            self._grow(growing)

    def _read(self, running: DraftRequest) -> None:
        """Reads a piece of a request's text, or takes it from the prompt cache."""
        with self._timed("read"):
            running.work.read()
        self._report()

    @contextmanager
    def _timed(self, operation: str) -> Iterator[int]:
        """Announces how long an operation should take, the longest time so far, which decays; then measures it. Yields
        the time at which it begins."""
        expected_ms, started_ns = self._longest_ms.get(operation, 0.0), clock.now()
        self._link.expect(expected_ms)
        yield started_ns
        milliseconds = (clock.now() - started_ns) / clock.MILLISECOND_NS
        self._longest_ms[operation] = max(milliseconds, LATENCY_DECAY * expected_ms)

    def _draft(self, owed: Sequence[DraftRequest]) -> None:
        with self._timed("chain") as started_ns:
            drafts, _ = run_together([running.work.continuation(running.newest.depth) for running in owed])
        for running in owed:
            running.owes_draft = False
        self._answer(Span(started_ns, clock.now()), owed, drafts)

    def _grow(self, growing: Sequence[DraftRequest]) -> None:
        with self._timed("grow") as started_ns:
            active = sum(running.newest.verifying is not None for running in self._running.values())
            branches = self._batcher.advance([running.work for running in growing], active)
        self._answer(Span(started_ns, clock.now()), growing, branches)

    def _answer(
        self,
        work: Span,
        requests: Sequence[DraftRequest],
        results: Sequence[Continuation | ReadyBranches | OutriderError | None],
    ) -> None:
        """Sends each request's result, and ends the requests that have an error."""
        peak_bytes = self._peak_memory.bytes()
        for running, result in zip(requests, results, strict=True):
            if isinstance(result, OutriderError):
                self._fail(running.newest, result, running.newest.round)
            elif result is not None:
                self._link.send(running.answer(result, work, peak_bytes))

    def _release(self, running: DraftRequest, discard: bool) -> None:
        running.work.tree.close(discard)
        self._peak_memory.count_ended_text()
