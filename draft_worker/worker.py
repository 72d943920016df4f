"""The draft worker's loop: OPEN and COMMIT in, BRANCHES and DRAFTED out, one forward at a time.

Between two forwards it looks for news, so an outcome that arrives early redirects the work at once. Owns one token tree
a request; acts only on the newest commit; says RESYNC when it missed one. Knows nothing of models.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from outrider.drafting.begin import begin, check_known
from outrider.drafting.calibration import Calibration
from outrider.drafting.drafter import Drafter
from outrider.drafting.fan_out import FanOut
from outrider.drafting.work_ahead import WorkAhead
from outrider.protocol import clock
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    Message,
    Open,
    Prefilled,
    Resync,
    Shutdown,
)

log = logging.getLogger(__name__)


class Link(Protocol):
    """The wire as the worker sees it: `protocol.worker_link.WorkerLink`, or something that stands for it."""

    @property
    def name(self) -> str: ...

    def send(self, message: Message) -> None: ...

    def receive(self, wait: bool) -> Message | None: ...


class _Unwanted(Exception):
    """Nobody waits any more for what is being read."""


class Memory(Protocol):
    """The most bytes held since `restart` (see `engine.memory.Peak`)."""

    def restart(self) -> None: ...

    def bytes(self) -> int: ...


@dataclass(slots=True)
class Drafting:
    """A request on this drafter. `newest` is the commit its work belongs to; `owed`: that commit awaits DRAFTED."""

    work: WorkAhead
    epoch: int
    newest: Commit
    owed: bool = False


class DraftWorker:
    """Serves requests from `link` with `drafter` until told to shut down."""

    def __init__(self, link: Link, drafter: Drafter, fan_out: FanOut, memory: Memory | None = None) -> None:
        """`memory`: where the drafter's is, if it can be measured."""
        self._link = link
        self._drafter = drafter
        self._fan_out = fan_out
        self._memory = memory
        self._calibration = Calibration()
        self._drafting: dict[str, Drafting] = {}
        self._kept: deque[Message] = deque()  # looked at while a prompt was read
        self._stale = 0

    def run(self) -> None:
        gc.freeze()  # a full collection over the imported libraries takes longer than a forward
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handles one message if there is one, else makes one forward for every request; False: shut down."""
        working = [drafting for drafting in self._drafting.values() if drafting.owed or drafting.work.busy]
        message = self._kept.popleft() if self._kept else self._link.receive(wait=not working)
        if isinstance(message, Shutdown):
            return False
        if message is not None:
            self._guard(message.request if isinstance(message, Open | Commit | Close) else None, message)
            return True
        for drafting in working:
            self._guard(drafting.newest.request, drafting)
        return True

    def _guard(self, request: str | None, task: Message | Drafting) -> None:
        """Does one thing; a drafter that fails loses that request, never the worker."""
        try:
            with named_errors("the draft's forward"):
                if isinstance(task, Drafting):
                    self._advance(task)
                else:
                    self._handle(task)
        except OutriderError as error:
            self._drop(request or "")
            self._link.send(Fault(self._link.name, request, str(error)))

    def _handle(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Commit():
                self._commit(message)
            case Close():
                self._drop(message.request)
            case _:
                log.warning("a drafter has no use for %s", type(message).__name__)

    def _open(self, message: Open) -> None:
        self._drop(message.request)
        check_known(self._drafter, message.verifying or ())
        if self._memory is not None and not self._drafting:
            self._memory.restart()

        def progress(done: int, total: int) -> None:
            self._link.send(Prefilled(message.request, message.epoch, done, total))
            self._end_if_unwanted(message.request)

        try:
            work = begin(
                self._drafter,
                message.tokens.tolist(),
                message.sampling,
                message.eos,
                self._fan_out,
                self._calibration,
                cached=max(round(message.branches / (message.depth + 1)), 1),
                progress=progress,
            )
        except _Unwanted:
            return
        work.commit((), message.verifying, message.depth, message.branches)
        newest = Commit(
            message.request,
            message.epoch,
            message.round,
            len(message.tokens),
            (),
            message.verifying,
            message.depth,
            message.branches,
        )
        self._drafting[message.request] = Drafting(work, message.epoch, newest)

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
            self._link.send(Resync(message.request, message.epoch))
            return
        expected = drafting.work.committed_len + len(message.tokens)
        if message.epoch < drafting.epoch or message.round < drafting.newest.round or message.base_len < expected:
            self._stale += 1
            log.debug("stale commit of round %d (%d so far)", message.round, self._stale)
            return
        if message.base_len > expected:
            self._drop(message.request)
            self._link.send(Resync(message.request, message.epoch))
            return
        check_known(self._drafter, (*message.tokens, *(message.verifying or ())))
        drafting.work.commit(message.tokens, message.verifying, message.depth, message.branches)
        drafting.newest = message
        drafting.owed = message.verifying is None and message.depth > 0

    def _advance(self, drafting: Drafting) -> None:
        started_ns, newest = clock.now(), drafting.newest
        if drafting.owed and not drafting.work.far_behind:
            drafting.owed = False
            found = drafting.work.continuation(newest.depth)
            work = clock.since(started_ns)
            self._link.send(
                Drafted(
                    newest.request,
                    newest.epoch,
                    newest.round,
                    newest.base_len,
                    found.chain,
                    work,
                    found.q,
                    self._peak_bytes(),
                )
            )
            return
        ready = drafting.work.advance()
        if ready is None:
            return
        self._link.send(
            Branches(
                newest.request,
                newest.epoch,
                newest.round,
                newest.base_len,
                ready.depth,
                ready.entries,
                clock.since(started_ns),
                ready.final,
                ready.q,
                self._peak_bytes(),
            )
        )

    def _peak_bytes(self) -> int:
        return self._memory.bytes() if self._memory is not None else 0

    def _drop(self, request: str) -> None:
        drafting = self._drafting.pop(request, None)
        if drafting is not None:
            drafting.work.tree.close()
