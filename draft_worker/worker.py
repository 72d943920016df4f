"""The draft worker's loop: receives OPEN and COMMIT, sends BRANCHES and DRAFTED, runs one forward at a time.

It handles messages between two forwards, so a new outcome redirects the work at once. `Inbox` lets it look at new
messages while it reads a long prompt; messages that are not yet handled stay in order. Owns a `DraftRequest` with one
token tree for each request; acts only on the newest commit; sends RESYNC if it has missed one. `OpLatency` measures its
operations, so that it can announce how long the next one should take. Knows nothing of models.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.drafters.drafter import Drafter
from outrider.drafters.fan_out import Calibration, FanOut
from outrider.drafters.growth import BranchTask, Continuation, ReadyBranches
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead, check_in_context, check_in_vocabulary, start_drafting
from outrider.engine.memory import PeakMemory
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.constraint import Constraint
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Features,
    KvMemory,
    Message,
    Open,
    Prefilled,
    Resync,
    Shutdown,
    Span,
)
from outrider.protocol.worker_link import Link, WorkerLoop

log = logging.getLogger(__name__)

LATENCY_DECAY = 0.95
_MAX_FORWARDS_BETWEEN_CHUNKS = 8  # forwards for other requests between two pieces of a prompt


class ReadCancelled(Exception):
    """The prompt that is being read is no longer needed."""


class Inbox:
    """The messages of `link`, in the order of their arrival."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: deque[Message] = deque()

    def next(self, wait: bool) -> Message | None:
        """Returns the oldest message; if there is none, waits, or returns None if `wait` is False."""
        return self._kept.popleft() if self._kept else self._link.receive(wait=wait)

    def clear(self) -> None:
        """Drops the messages that are not yet handled."""
        self._kept.clear()

    def take_for_others(self, request: str) -> list[Commit | Close]:
        """Receives the messages that arrived while the prompt of `request` was read. Removes and returns COMMIT and
        CLOSE of other open requests; those that follow an OPEN of their request stay.

        Raises:
            ReadCancelled: the worker shuts down, or the request was closed or opened again; earlier messages about it
                are dropped.
        """
        while (message := self._link.receive(wait=False)) is not None:
            self._kept.append(message)
        kept = list(self._kept)
        for index, message in enumerate(kept):
            if isinstance(message, Shutdown) or (isinstance(message, Open | Close) and message.request == request):
                others = [earlier for earlier in kept[:index] if getattr(earlier, "request", None) != request]
                self._kept = deque([*others, *kept[index:]])
                raise ReadCancelled
        waiting, taken = {request}, list[Commit | Close]()
        self._kept.clear()
        for message in kept:
            if isinstance(message, Commit | Close) and message.request not in waiting:
                taken.append(message)
                continue
            self._kept.append(message)
            if isinstance(message, Open):
                waiting.add(message.request)
        return taken


Operation = Literal["read", "grow", "chain"]
"""Work between two checks for messages: a piece of a prompt, a forward of its trees, or a chain on request."""


class OpLatency:
    """The longest time of each operation; old measurements decay."""

    def __init__(self) -> None:
        self._ms: dict[Operation, float] = {}

    def record(self, operation: Operation, milliseconds: float) -> None:
        self._ms[operation] = max(milliseconds, LATENCY_DECAY * self._ms.get(operation, 0.0))

    def expected_ms(self, *operations: Operation) -> float:
        """Returns the time of these operations in sequence; 0 if one of them was never measured."""
        known = [self._ms.get(operation, 0.0) for operation in operations]
        return sum(known) if all(known) else 0.0


@dataclass(slots=True)
class DraftRequest:
    """A request's work. `newest`: its latest OPEN or COMMIT, received at `committed_ns`; `owes_draft`: it must answer
    it with DRAFTED."""

    work: WorkAhead
    newest: Open | Commit
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
        """Returns whether its round follows the newest commit's, with chains under verification in both."""
        both = message.verifying is not None and bool(self.newest.verifying)
        return both and message.round == self.newest.round + 1

    def commit(self, message: Commit, now_ns: int) -> None:
        self.work.commit(message.tokens, _make_branch_task(message))
        self.newest, self.committed_ns = message, now_ns
        self.owes_draft = message.verifying is None and message.depth > 0

    def answer(self, result: Continuation | ReadyBranches, work: Span, peak_bytes: int) -> Drafted | Branches:
        newest, base_len = self.newest, self.work.committed_len
        begin = newest.request, newest.epoch, newest.round, base_len
        if isinstance(result, Continuation):
            line, odds = result.line, result.odds[: len(result.line)]
            return Drafted(
                *begin, line, work, q=result.q, peak_bytes=peak_bytes, alternatives=result.alternatives, odds=odds
            )
        return Branches(
            *begin, result.depth, result.entries, work, final=result.final, q=result.q, peak_bytes=peak_bytes
        )


def _make_branch_task(message: Open | Commit) -> BranchTask:
    return BranchTask(message.verifying, message.depth, message.branches, message.rank_offset, message.min_prob)


class DraftWorker(WorkerLoop[DraftRequest]):
    """Serves requests from `link` with `drafter` until SHUTDOWN."""

    def __init__(
        self,
        link: Link,
        drafter: Drafter,
        fan_out: FanOut,
        memory: PeakMemory | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """`memory`: measures the drafter's peak; None: it can't be measured. `compiler`: for grammars over its tokens;
        without one it may draft tokens that a grammar excludes."""
        super().__init__(link, lambda: drafter.prompt_cache.use)
        self._drafter = drafter
        self._fan_out = fan_out
        self._memory = memory
        self._compiler = compiler
        self._calibration = Calibration()
        self._batcher = DraftBatcher(self._calibration)
        self._inbox = Inbox(link)
        self._op_latency = OpLatency()

    def forget(self) -> None:
        super().forget()
        self._inbox.clear()

    def turn(self) -> bool:
        """Handles one message, or if there is none runs one forward for all requests. Returns False on SHUTDOWN."""
        working = self._requests_with_work()
        message = self._inbox.next(wait=not working)
        if isinstance(message, Shutdown):
            return False
        if message is None:
            self._forward(working)
        else:
            self._handle_or_fail(message)
        return True

    def _requests_with_work(self) -> list[DraftRequest]:
        return [running for running in self._running.values() if running.owes_draft or running.work.has_work]

    def _handle_or_fail(self, message: Message) -> None:
        try:
            with wrap_model_errors("the drafter's forward"):
                self._handle(message)
        except OutriderError as error:
            request = getattr(message, "request", None)
            running = self._running.get(request or "")
            self._fail(request, error, running.newest.round if running is not None else None)

    def _handle(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Commit():
                self._commit(message)
            case Close():
                self._close(message.request)
            case Features():
                self._on_features(message)
            case KvMemory():
                self._drafter.prompt_cache.set_limit(message.limit if message.prompt_cache else 0)
                self._report()
            case _:
                log.warning("a drafter can't handle %s", type(message).__name__)

    def _open(self, message: Open) -> None:
        known = self._running.get(message.request)
        if known is not None and known.is_ahead_of(message):
            self._drop_stale(message)
            return
        self._close(message.request)
        self._close_silent(lambda running: running.committed_ns)
        check_in_vocabulary(self._drafter, message.verifying or ())
        if self._memory is not None and not self._running:
            self._memory.restart()

        self._link.expect(self._op_latency.expected_ms("read"))
        read_ns = clock.now()

        def progress(done: int, total: int) -> None:
            nonlocal read_ns
            self._record_latency("read", read_ns)
            self._link.send(Prefilled(message.request, message.epoch, done, total))
            self._work_for_others(message.request)
            self._link.expect(self._op_latency.expected_ms("read"))
            read_ns = clock.now()

        try:
            work = start_drafting(
                self._drafter,
                message.tokens.tolist(),
                message.sampling,
                message.eos,
                self._fan_out,
                self._calibration,
                cached=max(round((message.rank_offset + message.branches) / (message.depth + 1)), 1),
                progress=progress,
                constraint=self._constraint(message),
            )
        except ReadCancelled:
            return
        if work.tree.cached:
            done, total = work.tree.cached, len(message.tokens)
            self._link.send(Prefilled(message.request, message.epoch, done, total, cached=done))
        self._report()
        work.commit((), _make_branch_task(message))  # the chain under verification
        self._running[message.request] = DraftRequest(work, message, clock.now())

    def _constraint(self, message: Open) -> Constraint | None:
        if self._compiler is None:
            return None
        return self._compiler.constraint_for(message.sampling, message.eos, message.prompt_len)

    def _work_for_others(self, request: str) -> None:
        """Grows the trees of other requests between two pieces of this one's prompt.

        Raises:
            ReadCancelled: this request is no longer needed.
        """
        for _ in range(_MAX_FORWARDS_BETWEEN_CHUNKS):
            for message in self._inbox.take_for_others(request):
                self._handle_or_fail(message)
            working = self._requests_with_work()
            if not working:
                return
            self._forward(working)

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
        check_in_vocabulary(self._drafter, (*message.tokens, *(message.verifying or ())))
        check_in_context(self._drafter, running.work.committed_len + len(message.tokens))
        now_ns = clock.now()
        if running.is_next(message):
            self._batcher.capacity.record_round((now_ns - running.committed_ns) / clock.MILLISECOND_NS)
        running.commit(message, now_ns)

    def _on_features(self, message: Features) -> None:
        running = self._running.get(message.request)
        if running is not None and message.epoch == running.epoch:
            running.work.add_features(message.position, message.rows)

    def _forward(self, working: Sequence[DraftRequest]) -> None:
        """Drafts requested chains, then grows all trees by one forward; reads a piece of one long text."""
        reading = [running for running in working if running.work.is_far_behind]
        owed = [running for running in working if running.owes_draft and not running.work.is_far_behind]
        growing = [running for running in working if not running.owes_draft and not running.work.is_far_behind]
        if owed:
            self._link.expect(self._op_latency.expected_ms("chain"))
            self._draft(owed)
        if growing or reading:
            operations: list[Operation] = ["grow", "read"] if reading else ["grow"]
            self._link.expect(self._op_latency.expected_ms(*operations))
            self._grow([*growing, *reading[:1]])

    def _record_latency(self, operation: Operation, started_ns: int) -> None:
        self._op_latency.record(operation, (clock.now() - started_ns) / clock.MILLISECOND_NS)

    def _draft(self, owed: Sequence[DraftRequest]) -> None:
        started_ns = clock.now()
        drafts = self._batcher.continuations([d.work for d in owed], [d.newest.depth for d in owed])
        for running in owed:
            running.owes_draft = False
        self._answer("chain", started_ns, owed, drafts)

    def _grow(self, growing: Sequence[DraftRequest]) -> None:
        started_ns = clock.now()
        active = sum(running.newest.verifying is not None for running in self._running.values())
        branches = self._batcher.advance([running.work for running in growing], active)
        self._answer("grow", started_ns, growing, branches)

    def _answer(
        self,
        operation: Operation,
        started_ns: int,
        requests: Sequence[DraftRequest],
        results: Sequence[Continuation | ReadyBranches | OutriderError | None],
    ) -> None:
        """Sends each request's result, and ends the requests that have an error."""
        span = Span(started_ns, clock.now())
        self._record_latency(operation, started_ns)
        peak_bytes = self._memory.bytes() if self._memory is not None else 0
        for running, result in zip(requests, results, strict=True):
            if isinstance(result, OutriderError):
                self._fail(running.newest.request, result, running.newest.round)
            elif result is not None:
                self._link.send(running.answer(result, span, peak_bytes))

    def _release(self, running: DraftRequest, discard: bool) -> None:
        running.work.tree.close(discard)
        if self._memory is not None:
            self._memory.count_ended_text(idle=not self._running)
