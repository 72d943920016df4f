"""The front thread: clients, the queue of waiting requests, text. The body of the thread is `Front.run`.

Handles Generate, Cancel and StatsQuery of clients, sends requests to the core as `Admit`, and converts committed tokens
to text. The requests of a client that is gone or does not read are cancelled; no other client is affected. Knows
nothing of rounds.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable

import zmq
from msgspec.structs import replace

from outrider import __version__
from outrider.orchestrator import events
from outrider.orchestrator.auth import client_id_of
from outrider.orchestrator.front.admission import Admission, FairQueue, QueuePath, Ticket, log_ticket
from outrider.orchestrator.pairing.detokenizer import TextDelta
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.sockets import ClientMessage, ClientSocket
from outrider.protocol import clock, messages
from outrider.protocol.errors import InvalidRequest, OutriderError, ServerBusy, ServerStopped, WorkerError, error_kind
from outrider.protocol.schema import MAX_SERIAL
from outrider.protocol.stats import KvUse

MESSAGES_PER_TURN = 64
DRAINING_MESSAGE = "the server is draining and accepts no new requests; retry after it restarts"
STOPPED_MESSAGE = "the server was stopped before the text was complete; retry when it runs again"

log = logging.getLogger(__name__)


class Front:
    """Owns the client socket, the queue and every ticket. `announce` is called with stages, readiness and failure."""

    def __init__(
        self,
        pair: ChosenPair,
        admission: Admission,
        clients: ClientSocket,
        queues: events.ThreadQueues,
        core_stats: Callable[[messages.Stats], messages.Stats],
        announce: Callable[[events.Announcement], None],
    ) -> None:
        self._pair = pair
        self._admission = admission
        self._clients = clients
        self._queues = queues
        self._core_stats = core_stats
        self._announce = announce
        self._serials = itertools.count(1)
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._active: dict[str, Ticket] = {}
        self._tickets: dict[tuple[bytes, str], Ticket] = {}
        self._workers: tuple[messages.WorkerStats, ...] = ()
        self._ready = False
        self._has_target = False
        self._fatal = ""
        self._running = True
        self._draining = False
        self._endings: Counter[str] = Counter()  # requests by reason
        self._failures: Counter[str] = Counter()  # by kind of error
        self._totals = messages.Timings()
        self._generated_tokens = 0  # including those of running requests

    def run(self) -> None:
        """Runs until `Quit` comes."""
        poller = zmq.Poller()
        for socket in (self._clients.socket, self._clients.monitor, self._queues.events.wake):
            poller.register(socket, zmq.POLLIN)
        while self._running:
            if self._clients.monitor in dict(poller.poll()):
                self._clients.update_connections()
            for event in list(self._queues.events.take()):  # those put meanwhile wait for the next turn
                self._on_event(event)
            for received in self._clients.receive(MESSAGES_PER_TURN):
                self._on_message(received)
            self._admit_waiting()
        self._fail_all(ServerStopped.__name__, STOPPED_MESSAGE)
        self._clients.close()

    def drain(self) -> None:
        """Refuses new requests from now on; may be called on any thread."""
        self._draining = True

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._tickets)

    def stats(self, request: str) -> messages.Stats:
        """Returns the current workers and totals; may be called on any thread."""
        stats = messages.Stats(
            request=request,
            version=__version__,
            workers=self._workers,
            active=len(self._active),
            queued=len(self._waiting),
            finished=self._endings.total(),
            failed=self._failures.total(),
            totals=self._totals,
            stale_messages=0,
            rejected_frames=self._clients.rejected,
            generated=self._generated_tokens,
            endings={**self._endings, **self._failures},
            kv=self._kv_use(),
        )
        return self._core_stats(stats)

    # --- messages of clients --------------------------------------------------------------------------------------

    def _on_message(self, received: ClientMessage) -> None:
        match received.message:
            case messages.Generate():
                self._on_generate(received.sender, received.message, received.key)
            case messages.Cancel(request=name):
                self._cancel(self._tickets.get((received.sender, name)))
            case messages.StatsQuery(request=name, about=about):
                known = about is None or (received.sender, about) in self._tickets
                self._clients.send(received.sender, replace(self.stats(name), known=known))
            case other:
                self._clients.rejected += 1
                log.info("a client sent %s; expected Generate, Cancel or StatsQuery", type(other).__name__)

    def _on_generate(self, sender: bytes, generate: messages.Generate, key: str) -> None:
        try:
            if (sender, generate.request) in self._tickets:
                raise InvalidRequest(f"request {generate.request} is already running; expected an unused name")
            self._clients.check_key(key)
            path = queue_path(sender, generate.client, key)
            self._check_capacity(path[0], key)
            ticket = self._admission.accept(generate, f"r{next(self._serials)}", sender, path)
        except OutriderError as error:
            refusal = messages.Failed(generate.request, error_kind(error), str(error))
            self._failures[refusal.kind] += 1
            log.info("refused %s: %s", refusal.request, error, extra={"client_request": refusal.request})
            self._clients.send(sender, refusal)
            return
        self._tickets[sender, generate.request] = ticket
        if ticket.complete:
            self._on_request_began(ticket, events.RequestBegan(ticket.key, ticket.admit.mode))
            self._on_request_ended(ticket, events.RequestEnded(ticket.key, ticket.complete, messages.Timings()))
            return
        self._waiting.put(ticket.path, ticket, first=generate.resume_tokens is not None)

    def _check_capacity(self, client: bytes, key: str) -> None:
        """Raises an error if a request of `client` must be refused. A full queue takes one request of each client, up
        to twice `max_waiting` in all, so that one client can't shut out the others."""
        settings, length = self._pair.settings, len(self._tickets) - self._admission.max_active
        if self._fatal:
            raise WorkerError(self._fatal)
        if self._draining:
            raise ServerStopped(DRAINING_MESSAGE)
        if length >= settings.max_waiting * (1 if client in self._waiting else 2):
            raise ServerBusy(
                f"{settings.max_waiting} requests are already waiting, the maximum (max_waiting); try again later"
            )
        if self._clients.is_nearly_full(with_keys=bool(key)):
            raise ServerBusy(
                "the server has almost reached its connection limit; close idle connections, or try again later"
            )

    def _cancel(self, ticket: Ticket | None) -> None:
        if ticket is None or ticket.end_reason:
            return
        ticket.end_reason = "cancelled"
        if ticket.key in self._active:
            self._queues.core.put(events.Stop(ticket.key, "cancelled"))
        elif self._waiting.drop(ticket.path, ticket):
            self._end_ticket(
                ticket, messages.Done(ticket.name, "cancelled", messages.Timings(queue_ms=ticket.queue_ms))
            )

    # --- events of the core ---------------------------------------------------------------------------------------

    def _on_event(self, event: events.ToFront) -> None:
        if isinstance(event, events.Quit):
            self._running = False
            return
        if isinstance(event, events.WorkersChanged):
            self._on_workers_changed(event)
            return
        ticket = self._active.get(event.request)
        if ticket is None:
            fields = {"request": event.request}
            log.info("dropped a %s of the inactive request %s", type(event).__name__, event.request, extra=fields)
            return
        match event:
            case events.RequestBegan():
                self._on_request_began(ticket, event)
            case messages.Progress():
                self._send(ticket, replace(event, request=ticket.name))
            case events.Committed():
                self._on_committed(ticket, event)
            case events.RequestEnded():
                self._on_request_ended(ticket, event)
            case messages.Failed():
                self._end_ticket(ticket, replace(event, request=ticket.name))

    def _on_workers_changed(self, event: events.WorkersChanged) -> None:
        self._workers = event.workers
        for worker in event.workers:
            if worker.state == "ready" and worker.role == "target":
                self._admission.context_length, self._admission.vocab_size = worker.context_length, worker.vocab_size
                self._admission.target_fingerprint = worker.fingerprint
            elif worker.state == "ready" and worker.role == "draft":
                self._admission.draft_context = worker.context_length
        self._admission.kv_budget = event.kv_budget
        self._has_target = any(w.role == "target" and w.state in ("ready", "frozen") for w in event.workers)
        becomes_ready = not self._ready and messages.is_serving(event.workers)
        if event.stage and not self._ready:
            self._announce(events.Stage(event.stage))
        if event.fatal and not self._fatal:
            self._fatal = event.fatal
            self._fail_all(WorkerError.__name__, event.fatal)
            self._announce(events.Failure(WorkerError.__name__, event.fatal))
        elif becomes_ready:
            notes = (*self._pair.notes, *event.notes)
            self._announce(events.ServerReady(self._clients.endpoint, notes=notes))
        self._ready = self._ready or becomes_ready  # a worker lost later is restarted or left out

    def _on_request_began(self, ticket: Ticket, event: events.RequestBegan) -> None:
        admit = ticket.admit
        draft = self._pair.draft.name if self._pair.draft is not None else self._pair.settings.draft_backend
        self._send(
            ticket,
            messages.Started(
                request=ticket.name,
                prompt_tokens=len(admit.tokens),
                mode=event.mode,
                seed=admit.sampling.seed or 0,
                model=self._pair.target.name,
                draft_model=draft,
                notes=(*ticket.notes, *event.notes),
                fingerprint=self._admission.fingerprint,
            ),
        )

    def _on_committed(self, ticket: Ticket, event: events.Committed) -> None:
        if ticket.end_reason:
            return
        delta = ticket.text.feed(event.tokens)
        self._send_text(ticket, delta, event)
        if delta.stopped and not ticket.end_reason:
            ticket.end_reason = "stop"
            self._queues.core.put(events.Stop(ticket.key, "stop"))

    def _on_request_ended(self, ticket: Ticket, event: events.RequestEnded) -> None:
        if not ticket.end_reason:
            delta = ticket.text.finish()
            self._send_text(ticket, delta, events.Committed(ticket.key, ()))
            ticket.end_reason = "stop" if delta.stopped else event.reason
        timings = event.timings
        if event.until is not None and ticket.tokens < timings.predicted_n:
            timings = event.until(ticket.tokens)
        timings = replace(timings, queue_ms=ticket.queue_ms)
        self._end_ticket(ticket, messages.Done(ticket.name, ticket.end_reason, timings, event.notes))

    # --- messages to clients --------------------------------------------------------------------------------------

    def _send_text(self, ticket: Ticket, delta: TextDelta, event: events.Committed) -> None:
        ticket.tokens += len(delta.tokens)
        self._generated_tokens += len(delta.tokens)
        if delta.text or delta.tokens:
            count = len(delta.tokens)
            logprobs = event.logprobs.part(0, count) if event.logprobs is not None else None
            origins = event.origins[:count] if event.origins is not None else None
            own = messages.TextChunk(
                ticket.name, delta.text, delta.tokens, logprobs, origins, event.rounds, event.prompt_logprobs
            )
            self._send(ticket, own)

    def _send(self, ticket: Ticket, message: messages.Message) -> None:
        if not self._clients.send(ticket.sender, message):
            self._cancel(ticket)

    def _end_ticket(self, ticket: Ticket, last: messages.Done | messages.Failed) -> None:
        """Sends the ticket's last message, which the client may not receive, and removes the ticket."""
        self._clients.send(ticket.sender, last)
        if isinstance(last, messages.Done):
            self._endings[last.reason] += 1
            self._totals += last.timings
            log_ticket(ticket, logging.INFO, "ends, %d tokens: %s", ticket.tokens, last.reason)
        else:
            self._failures[last.kind] += 1
            expected = last.kind == ServerStopped.__name__  # the operator stopped the server
            log_ticket(ticket, logging.INFO if expected else logging.WARNING, "fails: %s", last.message)
        self._active.pop(ticket.key, None)
        del self._tickets[ticket.sender, ticket.name]

    def _fail_all(self, kind: str, message: str) -> None:
        for ticket in list(self._tickets.values()):
            self._waiting.drop(ticket.path, ticket)
            self._end_ticket(ticket, messages.Failed(ticket.name, kind, message))

    def _admit_waiting(self) -> None:
        """Admits requests, clients in turn, while there are a target, a free place, and memory for the next one."""
        while self._ready and self._has_target and len(self._active) < len(self._tickets):
            first = self._waiting.peek()
            if first is None or len(self._active) >= self._admission.max_active or not self._fits(first):
                return
            self._waiting.take()
            self._active[first.key] = first
            first.begun_ns = clock.now()
            log_ticket(first, logging.INFO, "begins, %d prompt tokens", len(first.admit.tokens))
            self._queues.core.put(first.admit)

    def _fits(self, ticket: Ticket) -> bool:
        """Whether memory has room for its text beside the running ones; a single request always fits."""
        budget = self._admission.kv_budget
        needed = budget.cost.of_all([each.max_length for each in (*self._active.values(), ticket)])
        return not self._active or needed <= budget.limit

    def _kv_use(self) -> KvUse:
        budget, running = self._admission.kv_budget, list(self._active.values())
        used = budget.cost.of_all([len(ticket.admit.tokens) + ticket.tokens for ticket in running])
        reserved = budget.cost.of_all([ticket.max_length for ticket in running])
        return KvUse(budget.limit, min(used, MAX_SERIAL), min(reserved, MAX_SERIAL))


def queue_path(sender: bytes, client: str, key: str) -> QueuePath:
    """Returns a request's place in the fair queue: by key, then by the named client, or else the connecting one.

    All clients that a peer with a key names share the turns of one client. A peer without a key is on this machine and
    could open as many connections, so each client that it names has its own turns.
    """
    name = b"for " + client.encode() if client else client_id_of(sender)
    return (key.encode(), name) if key else (name,)
