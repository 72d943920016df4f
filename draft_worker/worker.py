"""The draft worker's loop: OPEN and COMMIT in, BRANCHES and DRAFTED out, one forward at a time.

Between two forwards it looks for news, so an outcome that arrives early redirects the work at once. Owns one token tree
a request; acts only on the newest commit; says RESYNC when it missed one. Knows nothing of models.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.draft_worker.usual import Operation, Usual
from outrider.drafting.begin import begin, check_known
from outrider.drafting.calibration import Calibration
from outrider.drafting.drafter import Drafter
from outrider.drafting.fan_out import FanOut
from outrider.drafting.together import Together
from outrider.drafting.work_ahead import WorkAhead
from outrider.grammar.compiler import Compiler
from outrider.grammar.constraint import Constraint
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.kv import CacheUse
from outrider.protocol.messages import (
    Branches,
    CacheReport,
    Close,
    Commit,
    Drafted,
    Fault,
    Features,
    KvMemory,
    Message,
    Open,
    Prefilled,
    Resync,
    Shutdown,
)
from outrider.protocol.patience import FORGET_NS

log = logging.getLogger(__name__)

_FORWARDS_BETWEEN = 8  # for others, at most, between two pieces of a prompt


class Link(Protocol):
    """The wire as the worker sees it: `protocol.worker_link.WorkerLink`, or something that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, message: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...

    def expect(self, milliseconds: float) -> None:
        """What is done next should take so long at most; 0: nobody knows."""
        ...


class _Unwanted(Exception):
    """Nobody waits any more for what is being read."""


class Memory(Protocol):
    """The most bytes held since `restart` (see `engine.memory.Peak`)."""

    def restart(self) -> None: ...

    def bytes(self) -> int: ...


@dataclass(slots=True)
class Drafting:
    """A request on this drafter. `newest` is the commit its work belongs to, which came at `committed_ns`; `owed`: that
    commit awaits DRAFTED."""

    work: WorkAhead
    epoch: int
    newest: Commit
    owed: bool = False
    committed_ns: int = 0


class DraftWorker:
    """Serves requests from `link` with `drafter` until told to shut down."""

    def __init__(
        self,
        link: Link,
        drafter: Drafter,
        fan_out: FanOut,
        memory: Memory | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """`memory`: where the drafter's is, if it can be measured. `compiler`: of its model's tokens; without one it
        may draft what a grammar rules out."""
        self._link = link
        self._drafter = drafter
        self._fan_out = fan_out
        self._memory = memory
        self._compiler = compiler
        self._calibration = Calibration()
        self._together = Together(drafter, self._calibration)
        self._drafting: dict[str, Drafting] = {}
        self._kept: deque[Message] = deque()  # looked at while a prompt was read
        self._stale = 0
        self._usual = Usual()
        self._told_use = CacheUse()

    def run(self) -> None:
        gc.freeze()  # a full collection over the imported libraries takes longer than a forward
        while self.turn():
            pass

    def forget(self) -> None:
        """Nobody wants any of its requests any more; what was read of them stays in the prompt cache."""
        for request in list(self._drafting):
            self._drop(request)
        self._kept.clear()

    def turn(self) -> bool:
        """Handles one message if there is one, else makes one forward for all requests; False: shut down."""
        working = self._working()
        message = self._kept.popleft() if self._kept else self._link.receive(wait=not working)
        if isinstance(message, Shutdown):
            return False
        if message is None:
            self._forward(working)
        else:
            self._take(message)
        return True

    def _working(self) -> list[Drafting]:
        return [drafting for drafting in self._drafting.values() if drafting.owed or drafting.work.busy]

    def _take(self, message: Message) -> None:
        try:
            with named_errors("the draft's forward"):
                self._handle(message)
        except OutriderError as error:
            self._fault(message.request if isinstance(message, Open | Commit | Features | Close) else None, error)

    def _fault(self, request: str | None, error: OutriderError) -> None:
        """A drafter that fails loses that request, never the worker."""
        drafting = self._drafting.get(request or "")
        about = {"request": request, "round": drafting.newest.round if drafting is not None else None}
        log.warning("request %s failed: %s", request, error, extra=about)
        self._drop(request or "", spoilt=True)
        self._link.send(Fault(name=self._link.name, request=request, message=str(error)))

    def _handle(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Commit():
                self._commit(message)
            case Close():
                self._drop(message.request)
            case Features():
                self._hear(message)
            case KvMemory():
                self._drafter.prompt_cache.allow(message.limit if message.prompt_cache else 0)
                self._report()
            case _:
                log.warning("a drafter has no use for %s", type(message).__name__)

    def _open(self, message: Open) -> None:
        known = self._drafting.get(message.request)
        if known is not None and (message.epoch, message.round) < (known.epoch, known.newest.round):
            self._is_stale("open", message)
            return
        self._drop(message.request)
        self._forget_silent()
        check_known(self._drafter, message.verifying or ())
        if self._memory is not None and not self._drafting:
            self._memory.restart()

        self._link.expect(self._usual.expected_ms(Operation.READ))
        read_ns = clock.now()

        def progress(done: int, total: int) -> None:
            nonlocal read_ns
            self._took(Operation.READ, read_ns)
            self._link.send(Prefilled(request=message.request, epoch=message.epoch, done=done, total=total))
            self._let_others_work(message.request)
            self._link.expect(self._usual.expected_ms(Operation.READ))
            read_ns = clock.now()

        try:
            work = begin(
                self._drafter,
                message.tokens.tolist(),
                message.sampling,
                message.eos,
                self._fan_out,
                self._calibration,
                cached=max(round((message.skip + message.branches) / (message.depth + 1)), 1),
                progress=progress,
                constraint=self._constraint(message),
            )
        except _Unwanted:
            return
        if work.tree.cached:
            total = len(message.tokens)
            self._link.send(
                Prefilled(
                    request=message.request,
                    epoch=message.epoch,
                    done=work.tree.cached,
                    total=total,
                    cached=work.tree.cached,
                )
            )
        self._report()
        work.commit((), message.verifying, message.depth, message.branches, message.skip, message.least)
        newest = Commit(
            request=message.request,
            epoch=message.epoch,
            round=message.round,
            base_len=len(message.tokens),
            tokens=(),
            verifying=message.verifying,
            depth=message.depth,
            branches=message.branches,
            skip=message.skip,
            least=message.least,
        )
        self._drafting[message.request] = Drafting(work, message.epoch, newest, committed_ns=clock.now())

    def _is_stale(self, word: str, message: Open | Commit) -> None:
        self._stale += 1
        about = {"request": message.request, "round": message.round}
        log.debug("stale %s of round %d (%d so far)", word, message.round, self._stale, extra=about)

    def _forget_silent(self) -> None:
        """Closes what nobody has spoken of for long: that it is over may have been lost. If not, COMMIT finds a gap."""
        since_ns = clock.now() - FORGET_NS
        for request, drafting in list(self._drafting.items()):
            if drafting.committed_ns < since_ns:
                self._drop(request)

    def _constraint(self, message: Open) -> Constraint | None:
        if self._compiler is None:
            return None
        return self._compiler.constraint(message.sampling.grammar, message.eos, message.prompt_len)

    def _let_others_work(self, request: str) -> None:
        """Between two pieces of this request's prompt: the trees of others grow until they are done.

        Raises:
            _Unwanted: see `_end_if_unwanted`.
        """
        for _ in range(_FORWARDS_BETWEEN):
            self._end_if_unwanted(request)
            self._take_what_others_say(request)
            working = self._working()
            if not working:
                return
            self._forward(working)

    def _take_what_others_say(self, request: str) -> None:
        """Handles what was said of other requests that are open; what waits for an OPEN waits on."""
        waiting, news = {request}, list(self._kept)
        self._kept.clear()
        for message in news:
            if isinstance(message, Commit | Close) and message.request not in waiting:
                self._take(message)
                continue
            self._kept.append(message)
            if isinstance(message, Open):
                waiting.add(message.request)

    def _end_if_unwanted(self, request: str) -> None:
        """Looks through what arrived while a prompt was read, keeping it for later.

        Raises:
            _Unwanted: the request was closed or opened anew; what was said of it before that is forgotten.
        """
        while (message := self._link.receive(wait=False)) is not None:
            self._kept.append(message)
        for index, message in enumerate(self._kept):
            if isinstance(message, Shutdown):
                raise _Unwanted
            if isinstance(message, Open | Close) and message.request == request:
                news = list(self._kept)
                others = [earlier for earlier in news[:index] if getattr(earlier, "request", None) != request]
                self._kept = deque([*others, *news[index:]])
                raise _Unwanted

    def _commit(self, message: Commit) -> None:
        drafting = self._drafting.get(message.request)
        if drafting is None or message.epoch > drafting.epoch:
            self._link.send(Resync(request=message.request, epoch=message.epoch))
            return
        expected = drafting.work.committed_len + len(message.tokens)
        if message.epoch < drafting.epoch or message.round < drafting.newest.round or message.base_len < expected:
            self._is_stale("commit", message)
            return
        if message.base_len > expected:
            self._drop(message.request)
            self._link.send(Resync(request=message.request, epoch=message.epoch))
            return
        check_known(self._drafter, (*message.tokens, *(message.verifying or ())))
        now_ns = clock.now()
        if message.verifying is not None and drafting.newest.verifying and message.round == drafting.newest.round + 1:
            self._together.capacity.round((now_ns - drafting.committed_ns) / clock.MILLISECOND_NS)
        drafting.committed_ns = now_ns
        drafting.work.commit(
            message.tokens, message.verifying, message.depth, message.branches, message.skip, message.least
        )
        drafting.newest = message
        drafting.owed = message.verifying is None and message.depth > 0

    def _hear(self, message: Features) -> None:
        drafting = self._drafting.get(message.request)
        if drafting is not None and message.epoch == drafting.epoch:
            drafting.work.hear(message.position, message.rows)

    def _forward(self, working: Sequence[Drafting]) -> None:
        """Drafts what is waited for, then grows all trees by one forward; of long texts one is read on by a piece."""
        reading = [drafting for drafting in working if drafting.work.far_behind]
        owed = [drafting for drafting in working if drafting.owed and not drafting.work.far_behind]
        growing = [drafting for drafting in working if not drafting.owed and not drafting.work.far_behind]
        if owed:
            self._link.expect(self._usual.expected_ms(Operation.CHAIN))
            self._draft(owed)
        if growing or reading:
            self._link.expect(self._usual.expected_ms(Operation.GROW, *[Operation.READ] * bool(reading)))
            self._grow([*growing, *reading[:1]])

    def _took(self, operation: Operation, started_ns: int) -> None:
        self._usual.took(operation, (clock.now() - started_ns) / clock.MILLISECOND_NS)

    def _draft(self, owed: Sequence[Drafting]) -> None:
        started_ns = clock.now()
        found = self._together.continuations([d.work for d in owed], [d.newest.depth for d in owed])
        span = clock.since(started_ns)
        self._took(Operation.CHAIN, started_ns)
        for drafting, drafted in zip(owed, found, strict=True):
            newest, drafting.owed = drafting.newest, False
            if isinstance(drafted, OutriderError):
                self._fault(newest.request, drafted)
                continue
            self._link.send(
                Drafted(
                    request=newest.request,
                    epoch=newest.epoch,
                    round=newest.round,
                    base_len=newest.base_len,
                    chain=drafted.line,
                    work=span,
                    q=drafted.q,
                    peak_bytes=self._peak_bytes(),
                    beside=drafted.beside,
                )
            )

    def _grow(self, growing: Sequence[Drafting]) -> None:
        started_ns = clock.now()
        active = sum(drafting.newest.verifying is not None for drafting in self._drafting.values())
        found = self._together.advance([drafting.work for drafting in growing], active)
        span = clock.since(started_ns)
        self._took(Operation.GROW, started_ns)
        for drafting, ready in zip(growing, found, strict=True):
            newest = drafting.newest
            if isinstance(ready, OutriderError):
                self._fault(newest.request, ready)
            elif ready is not None:
                self._link.send(
                    Branches(
                        request=newest.request,
                        epoch=newest.epoch,
                        round=newest.round,
                        base_len=newest.base_len,
                        depth=ready.depth,
                        entries=ready.entries,
                        work=span,
                        final=ready.final,
                        q=ready.q,
                        peak_bytes=self._peak_bytes(),
                    )
                )

    def _peak_bytes(self) -> int:
        return self._memory.bytes() if self._memory is not None else 0

    def _drop(self, request: str, spoilt: bool = False) -> None:
        drafting = self._drafting.pop(request, None)
        if drafting is not None:
            drafting.work.tree.close(spoilt)
            self._report()

    def _report(self) -> None:
        """Says how the prompt cache is used, if that has changed."""
        use = self._drafter.prompt_cache.use
        if use != self._told_use:
            self._told_use = use
            self._link.send(CacheReport(use))
