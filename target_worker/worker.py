"""The target worker's loop: OPEN and VERIFY in, OUTCOME out; in between the rounds that it may make by itself.

Those are plain decoding, a branch that was prepared, or chains of a drafter of its own (`colocated`). Owns one slot a
request. Answers a repeated VERIFY from the outcomes it kept; drops what is stale; says RESYNC when the committed
lengths disagree. Knows nothing of drafters in other processes, or of text.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque

import mlx.core as mx

from outrider.engine.loading import LoadedModel
from outrider.engine.pace import Pace, paced
from outrider.engine.slots import open_slots
from outrider.engine.verify import verify
from outrider.protocol import clock
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.messages import (
    Close,
    Fault,
    Message,
    Open,
    Outcome,
    Prefilled,
    Prepare,
    Resync,
    Shutdown,
    Verify,
)
from outrider.protocol.sparse import SparseQ, one_hot
from outrider.protocol.worker_link import WorkerLink
from outrider.target_worker.colocated import Colocated
from outrider.target_worker.own_rounds import OwnRounds
from outrider.target_worker.running import Running

log = logging.getLogger(__name__)


class _PrefillCancelled(Exception):
    pass


class TargetWorker:
    """Serves requests from `link` with `model` until told to shut down.

    `pace` holds its forwards to a profile; `colocated` drafts in this process.
    """

    def __init__(
        self, link: WorkerLink, model: LoadedModel, pace: Pace | None = None, colocated: Colocated | None = None
    ) -> None:
        self._link = link
        self._model = model
        self._pace = pace
        self._own = OwnRounds(pace, colocated)
        self._running: dict[str, Running] = {}
        self._stale = 0

    def run(self) -> None:
        gc.freeze()  # a full collection over the imported libraries takes longer than a forward
        while self.turn():
            pass

    def turn(self) -> bool:
        """Handles one message if there is one; after a verify, or without one, takes every run-ahead one step on.

        So requests whose verifies follow each other without a pause leave the others their turn. False: shut down.
        """
        ahead = [running for running in self._running.values() if running.ahead is not None]
        message = self._link.receive(wait=not ahead)
        if isinstance(message, Shutdown):
            return False
        if message is not None:
            self._handle(message)
        if message is None or isinstance(message, Verify):
            for running in ahead:
                self._step_guarded(running)
        return True

    def _handle(self, message: Message) -> None:
        received_ns = clock.now()
        request = getattr(message, "request", None)
        try:
            with named_errors("the target's forward"):
                self._do(message, received_ns)
        except OutriderError as error:
            self._fail(request, error)

    def _do(self, message: Message, received_ns: int) -> None:
        match message:
            case Open():
                self._open(message)
            case Verify():
                self._verify(message, received_ns)
            case Prepare():
                self._keep(message)
            case Close():
                self._running.pop(message.request, None)
            case _:
                log.warning("a target has no use for %s", type(message).__name__)

    def _step_guarded(self, running: Running) -> None:
        try:
            with named_errors("the target's forward"):
                self._step_ahead(running)
        except OutriderError as error:
            self._fail(running.last.request, error)

    def _fail(self, request: str | None, error: OutriderError) -> None:
        """That request is lost, never the worker."""
        self._running.pop(request or "", None)
        self._link.send(Fault(self._link.name, request, str(error)))

    def _open(self, message: Open) -> None:
        self._running.pop(message.request, None)
        if not self._running:
            mx.reset_peak_memory()
        started_ns = clock.now()

        def progress(done: int, total: int) -> None:
            self._link.send(Prefilled(message.request, message.epoch, done, total))
            self._end_if_closed(message.request)

        try:
            slots = open_slots(self._model, [message.tokens.tolist()], [message.sampling], progress)
        except _PrefillCancelled:
            return
        verdict = verify(slots[0])
        outcome = Outcome(
            message.request,
            message.epoch,
            message.round,
            len(message.tokens),
            0,
            verdict.bonus,
            clock.since(started_ns),
            peak_bytes=mx.get_peak_memory(),
        )
        running = Running(slots[0], message.epoch, deque(maxlen=2), message.eos)
        self._running[message.request] = running
        self._answer(running, outcome)

    def _keep(self, message: Prepare) -> None:
        running = self._running.get(message.request)
        if running is not None:
            running.prepared = message

    def _end_if_closed(self, request: str) -> None:
        """Looks through what arrived during a prefill, keeping all of it for later."""
        while (message := self._link.peek()) is not None:
            self._link.put_back(message)
        if any(isinstance(message, Close) and message.request == request for message in self._link.kept):
            raise _PrefillCancelled

    def _verify(self, message: Verify, received_ns: int) -> None:
        running = self._following(message)
        if running is None:
            return
        if message.run_ahead or message.draft:
            self._go_ahead(running, message)
            return
        started_ns = clock.now()
        with paced(self._pace, 1 + len(message.chain), time.perf_counter()):
            verdict = verify(running.slot, message.chain, _drawn_from(message))
        work = clock.since(started_ns)
        self._take_in_prepared()
        onward = running.onward(message.round, verdict)
        outcome = Outcome(
            message.request,
            message.epoch,
            message.round,
            message.base_len,
            verdict.accepted,
            verdict.bonus,
            work,
            max(received_ns - running.last.work.ended_ns, 0),
            onward,
            mx.get_peak_memory(),
        )
        self._answer(running, outcome)
        if onward is not None:
            base_len = message.base_len + verdict.accepted + 1
            self._link.put_back(Verify(message.request, message.epoch, message.round + 1, base_len, onward))

    def _following(self, message: Verify) -> Running | None:
        """The request whose next round this is; None when it is not, and then that is dealt with."""
        running = self._running.get(message.request)
        if running is None or message.epoch > running.epoch:
            self._link.send(Resync(message.request, message.epoch))
            return None
        if running.prolongs(message):
            running.ahead_left += 1 + message.run_ahead
            return None
        repeated = [answer for answer in running.answers if answer.round >= message.round]
        if message.epoch == running.epoch and repeated and repeated[0].round == message.round:
            for answer in repeated:
                self._link.send(answer)
            return None
        if message.epoch < running.epoch or message.round < running.last.round or running.is_under_way(message):
            self._stale += 1
            log.debug("stale verify of round %d (%d so far)", message.round, self._stale)
            return None
        running.stop_ahead()
        if message.base_len != len(running.slot.tokens):
            self._link.send(Resync(message.request, message.epoch))
            return None
        return running

    def _take_in_prepared(self) -> None:
        """Looks through what arrived during a forward for branches that may have come true."""
        waiting = []
        while (message := self._link.peek()) is not None:
            if isinstance(message, Prepare):
                self._keep(message)
            else:
                waiting.append(message)
        for message in waiting:
            self._link.put_back(message)

    def _answer(self, running: Running, outcome: Outcome) -> None:
        running.answers.append(outcome)
        self._link.send(outcome)

    def _go_ahead(self, running: Running, message: Verify) -> None:
        try:
            self._own.start(running, message, lambda done, total: self._end_if_closed(message.request))
        except _PrefillCancelled:
            return
        self._step_ahead(running, time.perf_counter())

    def _step_ahead(self, running: Running, ready: float = 0.0) -> None:
        """One round more. All but the first, which a message asked for at `ready`, begin where the last one ended."""
        outcome = self._own.next(running, ready)
        if outcome is not None:
            self._answer(running, outcome)


def _drawn_from(message: Verify) -> SparseQ | None:
    """What the chain's tokens were drawn from: its kind says that, nothing else does."""
    if message.kind == "one-hot":
        return one_hot(message.chain)
    if message.kind == "sparse" and message.q is None:
        raise InvalidRequest("a sparse chain comes without its q; expected what its tokens were drawn from")
    return message.q if message.kind == "sparse" else None
