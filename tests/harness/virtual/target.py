"""A simulated target in virtual time, which verifies drafts against known texts.

All requests that can continue share a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS
from outrider.protocol.messages import (
    Close,
    DraftTokens,
    Halt,
    Message,
    Open,
    Outcome,
    Prefilled,
    Prepare,
    Span,
    Verify,
)
from outrider.target_worker.model_runner import MIN_CHUNK_TOKENS, READING_SHARE, READING_SHARE_WITH_CHAINS
from tests.harness.virtual.event_loop import EventLoop
from tests.harness.virtual.known_text import accepted_nodes, outcome_path
from tests.harness.virtual.prompt_cache import VirtualPromptCache
from tools.simulation.profile import Profile

# How long the target delays a forward for messages about the other requests, in seconds.
GRACE = 0.001


@dataclass
class VirtualRequest:
    """A request on the target. `next`: the VERIFY to run, None while it waits for one. `unread`: prompt tokens that are
    not read yet. `length`: tokens of the text so far."""

    text: tuple[int, ...]
    opening: Open
    unread: int = 0
    length: int = 0
    next: Verify | None = None
    prepared: Prepare | None = None
    autonomous: bool = False
    closed: bool = False
    answered_ns: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward: requests to verify, which take `rows`, and pieces of prompts to read."""

    verifies: Sequence[tuple[VirtualRequest, Verify]]
    pieces: Sequence[tuple[VirtualRequest, int]]
    rows: int
    started_ns: int

    @property
    def all_rows(self) -> int:
        """The rows, including those of prompts."""
        return self.rows + sum(count for _, count in self.pieces)


class VirtualTarget:
    """A target whose forwards take a profile's time for their rows, and `prompt_ms` for each prompt token.

    Prompts are read in pieces as by the target worker. `send` gets the target's messages. Counts `busy` seconds,
    `forwards` and their `rows`.
    """

    def __init__(
        self,
        loop: EventLoop,
        profile: Profile,
        hop: float,
        send: Callable[[Message], None],
        prompt_ms: float = 0.0,
        prompt_cache: VirtualPromptCache | None = None,
    ) -> None:
        self.busy, self.forwards, self.rows = 0.0, 0, 0
        self._loop, self._profile, self._hop, self._send_message = loop, profile, hop, send
        self._prompt_ms = prompt_ms
        self._prompt_cache = prompt_cache or VirtualPromptCache(0)
        self._requests: dict[str, VirtualRequest] = {}
        self._forward_running = False

    def receive(self, text: tuple[int, ...], message: Message) -> None:
        request = self._requests.get(getattr(message, "request", ""))
        match message:
            case Open():
                self._open_request(text, message)
            case Close() if request:
                request.closed = True
                self._prompt_cache.add(request.text[: request.length])
                del self._requests[message.request]
            case Prepare() if request:
                request.prepared = message
            case Halt() if request:
                request.autonomous = False
            case Verify() if request:
                request.next, request.autonomous = message, message.autonomous
                self._start_forward()

    def end(self) -> None:
        """Stops the target."""
        for request in self._requests.values():
            request.closed = True
        self._requests.clear()

    def _open_request(self, text: tuple[int, ...], message: Open) -> None:
        self._requests[message.request] = opening = VirtualRequest(text, message)
        if not self._prompt_ms:
            self._finish_prompt(opening, Span(0, 1))
            return
        known = self._prompt_cache.lookup(text[: len(message.tokens)])
        opening.unread = len(message.tokens) - known
        self._send(opening, Prefilled(message.request, message.epoch, known, len(message.tokens), known))
        self._start_forward()

    def _finish_prompt(self, request: VirtualRequest, span: Span) -> None:
        """Sends the first token of a request whose prompt has been read completely."""
        message, at = request.opening, len(request.opening.tokens)
        request.length = at
        self._send(request, Outcome(message.request, message.epoch, message.round, at, 0, request.text[at], span))

    def _start_forward(self) -> None:
        """Starts a forward for all requests that can continue, after a wait for the others of `GRACE` at most."""
        verifying = [request for request in self._requests.values() if request.next]
        reading = [request for request in self._requests.values() if request.unread]
        if self._forward_running or not (verifying or reading):
            return
        now_ns = self._loop.now_ns()
        awaited = [request for request in self._requests.values() if not request.next and not request.unread]
        late_ns = max((request.answered_ns for request in awaited), default=0) + int(GRACE * 1e9) - now_ns
        if awaited and late_ns > 0:
            self._loop.call_later(late_ns / 1e9, self._start_forward, last=True)
            return
        verifies = [(request, request.next) for request in verifying if request.next]
        rows = sum(1 + len(verify.chain) for _, verify in verifies)
        forward = Forward(verifies, self._divide(reading, rows, len(verifying) + len(awaited)), rows, now_ns)
        self._forward_running = True
        seconds = self._duration_ms(forward) / 1000
        self.busy += seconds
        self.forwards += 1
        self.rows += rows
        self._loop.call_later(seconds, lambda: self._finish_forward(forward))

    def _divide(self, reading: Sequence[VirtualRequest], rows: int, decoding: int) -> list[tuple[VirtualRequest, int]]:
        """Returns the pieces of prompts to read, first come first served, sized as in `target_worker.model_runner`."""
        room, found = PREFILL_CHUNK_TOKENS, []
        if len(reading) <= decoding:
            share = READING_SHARE_WITH_CHAINS if rows > decoding else READING_SHARE
            beside_ms = self._profile.target(max(rows, decoding))
            fits = share * len(reading) * beside_ms / max(self._prompt_ms, 1e-9)
            room = int(min(max(fits, MIN_CHUNK_TOKENS), PREFILL_CHUNK_TOKENS))
        for request in reading:
            count = min(request.unread, room)
            if count:
                found.append((request, count))
                room -= count
        return found

    def _duration_ms(self, forward: Forward) -> float:
        read_ms = self._prompt_ms * sum(count for _, count in forward.pieces)
        if not forward.rows:
            return max(read_ms, self._profile.target(1))
        return self._profile.target(forward.rows) + read_ms

    def _finish_forward(self, forward: Forward) -> None:
        """Sends the outcomes, and continues requests that need no message: autonomous ones, and prepared branches."""
        self._forward_running = False
        span = Span(forward.started_ns, self._loop.now_ns())
        for request, verify in forward.verifies:
            if request.closed:
                continue
            outcome = self._outcome(request, verify, forward.all_rows, span)
            request.next = None
            request.length = outcome.base_len + outcome.accepted + 1
            self._send(request, outcome)
            if outcome.next_proposal is not None:
                place = (verify.request, verify.epoch, verify.round + 1, request.length)
                request.next = Verify(*place, outcome.next_proposal)
        for request, count in forward.pieces:
            if not request.closed:
                self._finish_piece(request, count, span)
        self._start_forward()

    def _finish_piece(self, request: VirtualRequest, count: int, span: Span) -> None:
        request.unread -= count
        total = len(request.opening.tokens)
        if request.unread:
            self._send(
                request, Prefilled(request.opening.request, request.opening.epoch, total - request.unread, total)
            )
        else:
            self._finish_prompt(request, span)

    def _outcome(self, request: VirtualRequest, verify: Verify, rows: int, span: Span) -> Outcome:
        text, at = request.text, verify.base_len
        nodes = accepted_nodes(text, verify)
        bonus = text[at + len(nodes)] if at + len(nodes) < len(text) else 0
        committed = (*(verify.chain[node] for node in nodes), bonus)
        next_proposal = DraftTokens() if request.autonomous else self._next_proposal(request, verify, committed)
        return Outcome(
            verify.request,
            verify.epoch,
            verify.round,
            at,
            len(nodes),
            bonus,
            span,
            span.started_ns - request.answered_ns,
            next_proposal,
            rows,
            path=outcome_path(nodes),
        )

    def _next_proposal(self, request: VirtualRequest, verify: Verify, committed: tuple[int, ...]) -> DraftTokens | None:
        prepared = request.prepared
        return prepared.proposal(committed) if prepared is not None and prepared.round == verify.round else None

    def _send(self, request: VirtualRequest, message: Outcome | Prefilled) -> None:
        request.answered_ns = self._loop.now_ns()
        self._loop.call_later(self._hop, lambda: self._send_message(message), last=True)
