"""The target's forwards: which requests take part in the next one, and their results.

All requests that can continue share a forward. Prompts are read in pieces inside these forwards, so no request waits
for a long one. While all requests decode plainly, the next forward begins before this one is read. Knows requests and
forwards; no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from outrider.engine.forward_cost import DECAY, ForwardCost
from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS
from outrider.engine.verify import BatchForward, PrefillChunk, VerifyInput, VerifyOutput, begin_forward
from outrider.protocol import clock
from outrider.protocol.errors import ModelFault, OutriderError, wrap_model_errors
from outrider.protocol.messages import Span
from outrider.target_worker.target_request import TargetRequest, draft_together

# For each waiting prompt, a forward with a piece of it may take this much longer than a usual forward of decoding
# requests. A forward over more rows than usual gets a smaller piece, one over fewer rows a larger one.
READING_SHARE = 0.5
# The same if chains are verified: a request that is late for a forward then waits for two of them.
READING_SHARE_WITH_CHAINS = 0.25
MIN_CHUNK_TOKENS = 8
MAX_LOGPROB_TOKENS = 64  # in a piece with logits of all its tokens, which take much memory
# A piece is at most this many times the last one, because the cost of a token is measured on few forwards.
MAX_CHUNK_GROWTH = 2


class ChunkedPrefill:
    """Decides by the cost of forwards, which it measures, how much of prompts is read together with decoding requests.
    `last`: the prompt tokens that the latest forward read."""

    def __init__(self) -> None:
        self.cost = ForwardCost()
        self.last = 0
        self._members = self._rows = 0.0

    def observe(self, members: int, own: int, rows: int, milliseconds: float) -> None:
        """Records a forward over `rows`, of which `own` belong to `members` decoding requests."""
        self.cost.add(rows, milliseconds)
        self._members = DECAY * self._members + members
        self._rows = DECAY * self._rows + members * own

    def budget(self, readers: int, decoding: int, rows: int) -> int:
        """Returns how many prompt tokens a forward may read for `readers`, next to `rows` of decoding requests."""
        if not self.cost.seen:
            return MIN_CHUNK_TOKENS
        fixed, each = self.cost.line
        share = readers * (READING_SHARE_WITH_CHAINS if rows > decoding else READING_SHARE)
        usual = max(self._rows / self._members if self._members else 0.0, decoding)  # as seen by a decoding request
        fits = usual - max(rows, decoding) + share * (fixed + each * usual) / each
        return int(min(max(min(fits, MAX_CHUNK_GROWTH * self.last), MIN_CHUNK_TOKENS), PREFILL_CHUNK_TOKENS))


Output = VerifyOutput | OutriderError | None
"""What a request's part of a forward gave; None: a piece of a prompt was read."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A forward's result for one request: its output, or an error."""

    running: TargetRequest
    output: VerifyOutput | OutriderError
    work: Span
    rows: int


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """What one request feeds in a forward; `fed`: how many of its tokens had been fed before."""

    request: TargetRequest
    feeds: VerifyInput | PrefillChunk
    fed: int


@dataclass(frozen=True, slots=True)
class InFlightForward:
    """A forward under way, or why it could not begin. `parts`: what verifies, then pieces of prompts.

    `begun_ns` 0: it began after another one.
    """

    forward: BatchForward | OutriderError
    parts: tuple[ForwardPart, ...]
    begun_ns: int

    @property
    def members(self) -> list[TargetRequest]:
        """The requests that verify."""
        return [part.request for part in self.parts if isinstance(part.feeds, VerifyInput)]

    @property
    def readers(self) -> list[TargetRequest]:
        """The requests that read a piece of their prompts."""
        return [part.request for part in self.parts if isinstance(part.feeds, PrefillChunk)]


class ModelRunner:
    """Runs one target's forwards, one after another."""

    def __init__(self) -> None:
        self._flight: InFlightForward | None = None
        self._ended_ns = 0
        self._chunked_prefill = ChunkedPrefill()
        self._rows = 0  # of requests that decode, in the last forward

    @property
    def is_busy(self) -> bool:
        return self._flight is not None

    def expected_ms(self, running: Collection[TargetRequest]) -> float:
        """Returns how long the next forward should take at most; 0: not known yet."""
        reads = any(request.can_read for request in running)
        return self._chunked_prefill.cost(self._rows + (PREFILL_CHUNK_TOKENS if reads else 0))

    def is_verifying(self, running: TargetRequest) -> bool:
        """Returns whether a round of this request is under way."""
        return self._flight is not None and running in self._flight.members

    def advance(self, running: Collection[TargetRequest]) -> tuple[list[VerifyResult], list[TargetRequest]]:
        """Begins or ends one forward. Returns its results, and the requests that read a piece of their prompt."""
        flight = self._flight or self._begin_next(running)
        if flight is None:
            return [], []
        alone = self._flight is None
        self._flight = None
        if alone and self._followers(flight, running):
            self._flight = flight  # read once the next forward has begun
            return [], []
        return self._settle(flight, running), flight.readers

    def _begin_next(self, running: Collection[TargetRequest]) -> InFlightForward | None:
        """Begins a forward over all requests with something to feed."""
        draft_together([request for request in running if request.needs_draft])
        parts = [
            ForwardPart(request, request.next_input(), request.slot.fed)
            for request in running
            if request.has_next and not request.needs_draft  # else its drafter has not read the text yet
        ]
        parts += self._plan_chunks(running, count_rows(parts))
        return _launch(parts, clock.now()) if parts else None

    def _plan_chunks(self, running: Collection[TargetRequest], rows: int) -> list[ForwardPart]:
        """Returns the next pieces of prompts, next to `rows` of other requests, first come first served.

        With more prompts than decoding requests, prompts come first: the sooner all decode together, the fewer forwards
        there are. A decoding request counts even if its VERIFY is on the way, because it would wait for the piece, too.
        """
        readers = [request for request in running if request.can_read]
        decoding = sum(not request.unread and not request.is_closed for request in running)
        budget, chunks = PREFILL_CHUNK_TOKENS, list[ForwardPart]()
        if len(readers) <= decoding:
            budget = self._chunked_prefill.budget(len(readers), decoding, rows)
        room = budget
        for request in readers:
            limit = MAX_LOGPROB_TOKENS if request.wants_prompt_logprobs else room
            count = min(request.unread, room, limit)
            if count:
                chunks.append(ForwardPart(request, PrefillChunk(request.slot, count), request.slot.fed))
                room -= count
        self._chunked_prefill.last = budget - room
        return chunks

    def _followers(self, flight: InFlightForward, running: Collection[TargetRequest]) -> list[TargetRequest]:
        """Returns the members that continue plainly after a plain forward, if no other request has tokens to feed."""
        members, forward = flight.members, flight.forward
        if not isinstance(forward, BatchForward) or not forward.is_plain:
            return []
        others = any((r.has_next or r.can_read) and r not in members for r in running)
        if others or not all(member.slot.sequence.has_free_marks for member in members):
            return []
        return [member for member in members if member.decodes_plainly]

    def commit(self, flight: InFlightForward) -> list[Output]:
        """Waits until the forward has ended, and returns the output of each of its parts, or the error of all."""
        if isinstance(flight.forward, OutriderError):
            return [flight.forward] * len(flight.parts)
        try:
            with wrap_model_errors("the target's forward"):
                return [*flight.forward.commit(), *[None] * len(flight.readers)]
        except OutriderError as error:
            return [error] * len(flight.parts)

    def _settle(self, flight: InFlightForward, running: Collection[TargetRequest]) -> list[VerifyResult]:
        begun_ns = flight.begun_ns or self._ended_ns
        followers = self._followers(flight, running)
        steps = [ForwardPart(follower, VerifyInput(follower.slot), follower.slot.fed) for follower in followers]
        after = _launch(steps, 0, cast(BatchForward, flight.forward)) if steps else None
        outputs = self.commit(flight)
        if any(isinstance(output, OutriderError) for output in (*outputs, after and after.forward)):
            outputs = _retry_failed(flight.parts, outputs)
            for follower in followers:  # their next steps failed, or began after one that failed, so they are repeated
                follower.slot.sequence.roll_back(len(follower.slot.tokens) - 1)
        else:
            self._flight = after
        self._ended_ns = clock.now()
        work, rows = Span(begun_ns, self._ended_ns), 1
        if isinstance(flight.forward, BatchForward):
            self._rows, rows = count_rows(flight.parts), flight.forward.rows
            self._chunked_prefill.observe(len(flight.members), self._rows, rows, work.milliseconds)
        return [
            VerifyResult(part.request, output, work, rows)
            for part, output in zip(flight.parts, outputs, strict=True)
            if output is not None
        ]


def _launch(parts: Sequence[ForwardPart], begun_ns: int, after: BatchForward | None = None) -> InFlightForward:
    """Begins a forward. If it fails, some of the texts may have been fed."""
    chunks = [part.feeds for part in parts if isinstance(part.feeds, PrefillChunk)]
    forward: BatchForward | OutriderError
    try:
        with wrap_model_errors("the target's forward"):
            forward = begin_forward(_inputs(parts), chunks, after)
    except OutriderError as error:
        forward = error
    return InFlightForward(forward, tuple(parts), begun_ns)


def _retry_failed(parts: Sequence[ForwardPart], outputs: Sequence[Output]) -> list[Output]:
    """Repeats each failed part alone: another request, or a token of its draft, may have caused the failure."""
    if len(parts) == 1 and not _has_draft(parts[0].feeds):
        return list(outputs)
    return [
        _run_alone(part.feeds, part.fed) if isinstance(output, OutriderError) and not part.request.is_closed else output
        for part, output in zip(parts, outputs, strict=True)
    ]


def _run_alone(feeds: VerifyInput | PrefillChunk, fed: int) -> Output:
    """Returns the output of a forward over one text only; without its draft if the model fails on that.

    `fed`: how many of its tokens had been fed before.
    """
    output: Output = None
    try:
        with wrap_model_errors("the target's forward"):
            feeds.slot.sequence.roll_back(fed)
            if isinstance(feeds, VerifyInput):
                output = begin_forward([feeds]).commit()[0]
            else:
                begin_forward([], [feeds]).commit()
    except OutriderError as error:
        output = error
    return _run_alone(VerifyInput(feeds.slot), fed) if isinstance(output, ModelFault) and _has_draft(feeds) else output


def _has_draft(feeds: VerifyInput | PrefillChunk) -> bool:
    return isinstance(feeds, VerifyInput) and bool(feeds.chain)


def _inputs(parts: Iterable[ForwardPart]) -> list[VerifyInput]:
    return [part.feeds for part in parts if isinstance(part.feeds, VerifyInput)]


def count_rows(parts: Iterable[ForwardPart]) -> int:
    return sum(len(input_.chain) + 1 for input_ in _inputs(parts))
