"""The target's forwards: which requests take part in the next one, and their results.

All requests that can continue share a forward. Prompts are read in pieces inside these forwards, so no request waits
for a long one; `ChunkedPrefill` decides by the cost of forwards how much is read together with decoding requests. While
all requests decode plainly, the next forward begins before this one is read. Knows requests and forwards; no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

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
    """Measures forwards and divides them among prompts. `last`: the prompt tokens that the latest forward read."""

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


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A forward's result for one request: its output, or an error."""

    running: TargetRequest
    output: VerifyOutput | OutriderError
    work: Span
    rows: int


@dataclass(frozen=True, slots=True)
class InFlightForward:
    """A forward under way. `members`: the requests of its inputs, in order; `readers` read a piece of their prompts.

    `fed`: how many tokens of each text had been fed before, members first. `begun_ns` 0: it began after another one.
    """

    forward: BatchForward
    members: tuple[TargetRequest, ...]
    readers: tuple[TargetRequest, ...]
    fed: tuple[int, ...]
    begun_ns: int


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
        failed: list[VerifyResult] = []
        flight = self._flight or self._begin_next(running, failed)
        if flight is None:
            return failed, []
        alone = self._flight is None
        self._flight = None
        if alone and flight.forward.is_plain and self._followers(flight, running):
            self._flight = flight  # read once the next forward has begun
            return failed, []
        settled = failed + self._settle(flight, running)
        return settled, list(flight.readers)

    def _begin_next(self, running: Collection[TargetRequest], failed: list[VerifyResult]) -> InFlightForward | None:
        """Begins a forward over all requests with something to feed; appends failed requests to `failed`."""
        pairs, started_ns = [], clock.now()
        draft_together([request for request in running if request.needs_draft])
        for request in running:
            if not request.has_next or request.needs_draft:  # its drafter has not read the text yet
                continue
            try:
                pairs.append((request, request.next_input()))
            except OutriderError as error:
                failed.append(VerifyResult(request, error, Span(started_ns, clock.now()), 0))
        chunks = self._plan_chunks(running, _count_rows(input_ for _, input_ in pairs))
        parts: list[tuple[TargetRequest, VerifyInput | PrefillChunk]] = [*pairs, *chunks]
        if not parts:
            return None
        fed = [request.slot.fed for request, _ in parts]
        flight = _launch(pairs, chunks, clock.now())
        if isinstance(flight, InFlightForward):
            return flight
        if not _can_run_alone([part for _, part in parts]):
            failed.append(VerifyResult(parts[0][0], flight, Span(started_ns, clock.now()), 0))
            return None
        for (request, part), length in zip(parts, fed, strict=True):
            output = _run_alone(part, length)
            if output is not None:
                rows = int(isinstance(part, VerifyInput))
                failed.append(VerifyResult(request, output, Span(started_ns, clock.now()), rows))
        return None

    def _plan_chunks(self, running: Collection[TargetRequest], rows: int) -> list[tuple[TargetRequest, PrefillChunk]]:
        """Returns the next pieces of prompts, next to `rows` of other requests, first come first served.

        With more prompts than decoding requests, prompts come first: the sooner all decode together, the fewer forwards
        there are. A decoding request counts even if its VERIFY is on the way, because it would wait for the piece, too.
        """
        readers = [request for request in running if request.can_read]
        decoding = sum(not request.unread and not request.is_closed for request in running)
        room, chunks = PREFILL_CHUNK_TOKENS, []
        if len(readers) <= decoding:
            room = self._chunked_prefill.budget(len(readers), decoding, rows)
        for request in readers:
            limit = MAX_LOGPROB_TOKENS if request.wants_prompt_logprobs else room
            count = min(request.unread, room, limit)
            if count:
                chunks.append((request, PrefillChunk(request.slot, count)))
                room -= count
        self._chunked_prefill.last = sum(chunk.count for _, chunk in chunks)
        return chunks

    def _followers(self, flight: InFlightForward, running: Collection[TargetRequest]) -> list[TargetRequest]:
        """Returns the members of a plain forward that continue plainly, if no other request has tokens to feed."""
        members = set(flight.members)
        others = any((r.has_next or r.can_read) and r not in members for r in running)
        if others or not all(member.slot.sequence.has_free_marks for member in flight.members):
            return []
        return [member for member in flight.members if member.decodes_plainly]

    def commit(self, flight: InFlightForward) -> list[VerifyOutput | OutriderError]:
        """Waits until the forward has ended, and returns the output of each of its inputs, or the error of all."""
        try:
            with wrap_model_errors("the target's forward"):
                return flight.forward.commit()
        except OutriderError as error:
            return [error] * len(flight.forward.inputs)

    def _settle(self, flight: InFlightForward, running: Collection[TargetRequest]) -> list[VerifyResult]:
        forward = flight.forward
        begun_ns = flight.begun_ns or self._ended_ns
        followers = self._followers(flight, running) if forward.is_plain else []
        after = _launch([(m, VerifyInput(m.slot)) for m in followers], [], 0, forward) if followers else None
        outputs = self.commit(flight)
        if any(isinstance(output, OutriderError) for output in (*outputs, after)):
            outputs = _retry_failed(flight, outputs)
            for follower in followers:  # their next steps failed, or began after one that failed, so they are repeated
                follower.slot.sequence.roll_back(len(follower.slot.tokens) - 1)
        elif isinstance(after, InFlightForward):
            self._flight = after
        self._ended_ns = clock.now()
        work = Span(begun_ns, self._ended_ns)
        self._rows = _count_rows(forward.inputs)
        took_ms = (self._ended_ns - begun_ns) / clock.MILLISECOND_NS
        self._chunked_prefill.observe(len(forward.inputs), self._rows, forward.rows, took_ms)
        return [
            VerifyResult(member, output, work, forward.rows)
            for member, output in zip(flight.members, outputs, strict=True)
        ]


def _launch(
    pairs: Sequence[tuple[TargetRequest, VerifyInput]],
    chunks: Sequence[tuple[TargetRequest, PrefillChunk]],
    begun_ns: int,
    after: BatchForward | None = None,
) -> InFlightForward | OutriderError:
    """Begins a forward. If it fails, some of the texts may have been fed."""
    members, readers = tuple(member for member, _ in pairs), tuple(reader for reader, _ in chunks)
    fed = tuple(request.slot.fed for request in (*members, *readers))
    try:
        with wrap_model_errors("the target's forward"):
            forward = begin_forward([input_ for _, input_ in pairs], [chunk for _, chunk in chunks], after)
    except OutriderError as error:
        return error
    return InFlightForward(forward, members, readers, fed, begun_ns)


def _retry_failed(
    flight: InFlightForward, outputs: Sequence[VerifyOutput | OutriderError]
) -> list[VerifyOutput | OutriderError]:
    """Repeats each failed request alone: another request, or a token of its draft, may have caused the failure."""
    inputs = flight.forward.inputs
    if not flight.readers and not _can_run_alone(inputs):
        return list(outputs)
    return [
        (_run_alone(input_, fed) or output) if isinstance(output, OutriderError) and not member.is_closed else output
        for member, input_, fed, output in zip(flight.members, inputs, flight.fed, outputs, strict=False)
    ]


def _can_run_alone(parts: Sequence[VerifyInput | PrefillChunk]) -> bool:
    """Returns whether running each part alone differs from the forward over all of them."""
    return len(parts) > 1 or any(isinstance(part, VerifyInput) and part.chain for part in parts)


def _run_alone(part: VerifyInput | PrefillChunk, fed: int) -> VerifyOutput | OutriderError | None:
    """Returns the output of a forward over one text only, or its error; without its draft if the model fails on that.

    `fed`: how many of its tokens had been fed before. None: it has read a piece of a prompt.
    """
    output: VerifyOutput | OutriderError | None = None
    try:
        with wrap_model_errors("the target's forward"):
            part.slot.sequence.roll_back(fed)
            if isinstance(part, VerifyInput):
                output = begin_forward([part]).commit()[0]
            else:
                begin_forward([], [part]).commit()
    except OutriderError as error:
        output = error
    if isinstance(output, ModelFault) and isinstance(part, VerifyInput) and part.chain:
        return _run_alone(VerifyInput(part.slot), fed)
    return output


def _count_rows(inputs: Iterable[VerifyInput]) -> int:
    return sum(len(input_.chain) + 1 for input_ in inputs)
