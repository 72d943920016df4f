"""A request on the target: its slot, its latest outcomes, and what it verifies next.

What it verifies comes from a VERIFY, a prepared chain, plain decoding or an in-process drafter.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import numpy as np
from msgspec import structs

from outrider.drafters.growth import Continuation
from outrider.drafters.work_ahead import DraftTurn, run_together
from outrider.engine.kv_cache import CacheSlot
from outrider.engine.verify import VerifyInput, VerifyOutput
from outrider.protocol import clock
from outrider.protocol.endpoints import MAX_PIECE_BYTES
from outrider.protocol.errors import InvalidRequest, OutriderError, wrap_model_errors
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import (
    Autonomous,
    DraftInProcess,
    DraftTokens,
    Features,
    InProcess,
    InProcessDraft,
    Open,
    Outcome,
    Prepare,
    Span,
    Verify,
)
from outrider.protocol.schema import MAX_CHAIN, Logprobs, concat_logprobs
from outrider.protocol.trees import DraftTree, merge_trees
from outrider.target_worker.in_process_drafters import DraftSession

log = logging.getLogger(__name__)

FEATURES_TOO_LARGE_NOTE = (
    "the head stops drafting for this text, because its features exceed half precision (65,504), in which they are"
    " sent; use --head-in target for this pair"
)
MAX_KEPT_OUTCOMES = 2  # the orchestrator may be one round behind if the target continues by itself


class FeatureListener:
    """Collects the features of a text's committed tokens for a head in another process, in float16; with `reach`, only
    the newest of each forward. They are sent with the outcomes; those of a prompt piece by piece, while the next piece
    is read."""

    def __init__(self, request: str, epoch: int, reach: int | None = None) -> None:
        self.fault = ""
        self._reach = reach
        self._request, self._epoch = request, epoch
        self._features: list[tuple[int, mx.array]] = []

    def on_features(self, position: int, rows: mx.array) -> None:
        """Adds features; an `engine.kv_cache.HiddenStatesListener`."""
        if self.fault:
            return
        rows = rows.astype(mx.float16)
        surplus = rows.shape[0] - self._reach if self._reach is not None else 0
        self._features.append((position + surplus, rows[surplus:]) if surplus > 0 else (position, rows))

    def take(self) -> list[Features]:
        """Returns the features since the last call. Waits for those that are not evaluated."""
        features = [(position, np.array(rows)) for position, rows in self._features]
        self._features = []
        if not all(np.isfinite(rows).all() for _, rows in features):
            self.fault = FEATURES_TOO_LARGE_NOTE
            log.warning("%s", self.fault, extra={"request": self._request})
            return []
        return [
            Features(self._request, self._epoch, position + first, rows[first : first + step])
            for position, rows in features
            for step in [max(MAX_PIECE_BYTES // max(rows[:1].nbytes, 1), 1)]
            for first in range(0, len(rows), step)
        ]


@dataclass(frozen=True, slots=True)
class AwaitedPrefix:
    """Another request, `reader`, reads the first `tokens` of this one's prompt."""

    reader: TargetRequest
    tokens: int

    @property
    def is_ready(self) -> bool:
        """True if the reader has read them, or never will."""
        return self.reader.is_closed or not self.reader.unread or self.reader.slot.fed >= self.tokens


@dataclass(slots=True, eq=False)
class TargetRequest:
    """A request on this target.

    `next_proposal`: the tokens to verify in the next round, or in the one under way; None: it waits for VERIFY.
    `autonomous`: it decodes by itself; `halting`: until the round under way has ended. `draft`: what an in-process
    drafter drafts for these rounds, as long as `max_tokens` leaves room; None: nothing. `drafters` open each in-process
    drafter's session, which reads the text when it is first needed. `ended`: it reached an end token or `max_tokens`
    while autonomous.
    `awaits`: another request that reads the beginning of its prompt. `cached`: the number of its prompt's tokens that
    came from the prompt cache. `offered`: it waits for a prefill worker, which may read its prompt; `heard_ns`: when
    its OPEN or the latest PROMPTKV came. `listener` gets the features for heads in other processes.
    """

    slot: CacheSlot
    opened: Open
    drafters: Mapping[str, Callable[[], DraftSession]] = field(default_factory=dict)
    answers: deque[Outcome] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_OUTCOMES))
    prepared: Prepare | None = None
    next_proposal: DraftTokens | None = None
    autonomous: bool = False
    draft: InProcess | None = None
    max_tokens: int = 0
    opened_ns: int = 0
    heard_ns: int = 0
    halting: bool = False
    ended: bool = False
    is_closed: bool = False
    awaits: AwaitedPrefix | None = None
    cached: int = 0
    offered: bool = False
    listener: FeatureListener | None = None
    _drafting: dict[str, DraftSession] = field(default_factory=dict)
    _proposed: tuple[Continuation, Span] | None = None

    @property
    def request(self) -> str:
        return self.opened.request

    @property
    def epoch(self) -> int:
        return self.opened.epoch

    @property
    def drafter(self) -> str:
        """The in-process drafter that drafts for it."""
        return (self.draft.drafter if self.draft is not None else "") or next(iter(self.drafters), "")

    @property
    def round(self) -> int:
        """The round of the latest outcome."""
        return self.answers[-1].round if self.answers else self.opened.round - 1

    @property
    def unread(self) -> int:
        """The number of prompt tokens to read before it can verify."""
        return 0 if self.answers else len(self.slot.unfed) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if every token of the prompt has to be read for its log-probabilities."""
        return self.slot.sampler.params.prompt_logprobs is not None

    @property
    def can_read(self) -> bool:
        """True if a piece of its prompt can be read now."""
        return not self.is_closed and self.unread > 0 and self.awaits is None and not self.offered

    @property
    def can_resume(self) -> bool:
        """True if the request that reads the beginning of its prompt has done so, or never will."""
        return self.awaits is not None and self.awaits.is_ready

    @property
    def decodes_plainly(self) -> bool:
        """True if another plain step follows the one under way."""
        return self.autonomous and not (self.draft or self.halting or self.is_closed) and self.max_tokens > 1

    @property
    def has_next(self) -> bool:
        """True if its next round can begin."""
        return not self.is_closed and not self.unread and self.next_proposal is not None

    @property
    def waits_since_ns(self) -> float:
        """The time since which it waits for a message; infinity while it has work."""
        if self.unread and self.offered:
            return self.heard_ns
        if self.has_next or self.unread:
            return math.inf
        return self.answers[-1].work.ended_ns

    def next_input(self) -> VerifyInput:
        """Returns what it verifies in its next round. An in-process drafter has drafted before (`draft_together`)."""
        own = self.next_proposal or DraftTokens()
        if self._proposed is not None:
            proposed, _ = self._proposed
            if not own.chain or not self.takes_trees:
                return VerifyInput(self.slot, proposed.chain, proposed.q, proposed.parents)
            both = merge_trees(DraftTree(proposed.chain, proposed.parents), own, MAX_CHAIN)
            own = DraftTokens(both.tokens, both.parents)
        return VerifyInput(self.slot, own.chain, own.q, own.parents)

    def on_verify(self, message: Verify) -> None:
        """Sets its next round. Raises InvalidRequest if that is for a drafter that is not in this process."""
        proposal, self._proposed = message.proposal, None
        self.ended = self.halting = False
        own = proposal if isinstance(proposal, DraftTokens) else DraftTokens(message.chain, message.parents)
        self.next_proposal = own
        self.autonomous, self.draft = message.autonomous, message.draft
        if self.draft is not None and self.drafter not in self.drafters:
            known = ", ".join(self.drafters) or "no draft"
            raise InvalidRequest(f"this target has no in-process drafter {self.drafter!r}; expected {known}")
        self.max_tokens = proposal.max_tokens if isinstance(proposal, DraftInProcess | Autonomous) else 0
        self.slot.all_cores = message.all_cores

    def forget(self, output: VerifyOutput | OutriderError) -> None:
        """Rolls back a step that began before the text was known to end, whether or not it failed."""
        if isinstance(output, VerifyOutput):
            del self.slot.tokens[-output.accepted - 1 :]
        self.slot.sequence.roll_back(len(self.slot.tokens) - 1)

    def make_outcome(self, output: VerifyOutput, work: Span, rows: int, peak: int, under_way: bool) -> Outcome:
        """Returns the outcome of its round, with what it continues with. `under_way`: the next round has begun."""
        number, base_len = self.round + 1, len(self.slot.tokens) - output.accepted - 1
        committed = tuple(self.slot.tokens[base_len:])
        proposed = None
        if self._proposed is not None:
            draft, span = self._proposed
            proposed = InProcessDraft(draft.chain, draft.parents, span=span)
        self._proposed = None
        if not self.answers:  # includes the prompt's reading
            work = Span(self.opened_ns, work.ended_ns)
        self.max_tokens -= len(committed)
        if self.autonomous and self._ends_with(committed, self.max_tokens):
            self.autonomous, self.ended = False, True
        if self.halting and not under_way:
            self.autonomous = self.halting = False
        if not self.autonomous:
            self.draft = None
        self.next_proposal = DraftTokens() if self.autonomous else self._find_next(number, committed)
        idle = work.started_ns - self.answers[-1].work.ended_ns if self.answers else 0
        outcome = Outcome(
            request=self.request,
            epoch=self.epoch,
            round=number,
            base_len=base_len,
            accepted=output.accepted,
            bonus=output.bonus,
            work=work,
            idle_ns=max(idle, 0),
            next_proposal=self.next_proposal,
            path=output.path,
            rows=rows,
            peak_bytes=peak,
            drafted=proposed,
            logprobs=output.logprobs,
            prompt_logprobs=None if self.answers else self._take_prompt_logprobs(),
        )
        self.answers.append(outcome)
        return outcome

    def _take_prompt_logprobs(self) -> Logprobs | None:
        """Returns the log-probabilities of the prompt, if the request wants them and no forward for them failed."""
        found = concat_logprobs([rows for _, rows in sorted(self.slot.prompt_logprobs.items())])
        return found if self.wants_prompt_logprobs and len(found) == self.opened.prompt_len - 1 else None

    def close(self, discard: bool) -> None:
        """Ends the request; its in-process drafters may cache their state. `discard`: keep nothing, after a failure."""
        self.is_closed = True
        for session in self._drafting.values():
            session.close(discard)

    def _find_next(self, number: int, committed: tuple[int, ...]) -> DraftTokens | None:
        """Returns what PREPARE says to verify after this outcome; None: it waits for VERIFY."""
        prepared = self.prepared
        if prepared is None or (prepared.epoch, prepared.round) != (self.epoch, number):
            return None
        chain = prepared.proposal(committed)
        left = prepared.max_tokens - len(committed)
        if chain is not None or not prepared.row_costs or self._ends_with(committed, left):
            return chain
        return DraftTokens(self._copy(left - 1, prepared.row_costs))

    def _ends_with(self, committed: tuple[int, ...], left: int) -> bool:
        """Returns whether the text ends with these tokens, after which `left` more are allowed."""
        return left < 1 or not set(self.opened.eos).isdisjoint(committed)

    def _copy(self, depth: int, row_costs: tuple[float, ...]) -> tuple[int, ...]:
        """Returns up to `depth` tokens of n-grams that are worth these costs."""
        if depth < 1 or NGRAM not in self.drafters:
            return ()
        turn = self._session(NGRAM).turn(self.slot.tokens, InProcess(depth, NGRAM, row_costs=row_costs))
        (copy,), _ = run_together([turn.steps])
        return copy.without(self.opened.eos).chain if isinstance(copy, Continuation) else ()

    @property
    def needs_draft(self) -> bool:
        """True if its in-process drafter has to draft for its next round."""
        return self.has_next and self.draft is not None and self._proposed is None

    def turn(self) -> DraftTurn:
        """Returns the turn of its in-process drafter, whose session opens the first time."""
        task = cast(InProcess, self.draft)
        min_prob = task.min_prob if self.takes_trees else 1.0
        task = structs.replace(task, depth=min(task.depth, self.max_tokens - 1), min_prob=min_prob)
        return self._session(self.drafter).turn(self.slot.tokens, task)

    def _session(self, drafter: str) -> DraftSession:
        if drafter not in self._drafting:
            self._drafting[drafter] = self.drafters[drafter]()
        return self._drafting[drafter]

    def set_proposal(self, draft: Continuation | OutriderError, span: Span) -> None:
        """Sets the draft; an error ends the drafting of its drafter.

        End tokens are left out. If the target verifies only chains, only the first branch of a tree is kept.
        """
        if isinstance(draft, OutriderError):
            log.warning("the drafter stops drafting for this request: %s", draft, extra={"request": self.request})
            self._session(self.drafter).close(discard=True)
            draft = Continuation()
        tree = draft if self.takes_trees else Continuation(draft.line, draft.q)
        self._proposed = tree.without(self.opened.eos), span

    @property
    def takes_trees(self) -> bool:
        """True if it verifies trees: the target can, and verification is by equality."""
        return self.slot.kv_cache.trees and not self.slot.sampler.params.is_residual


def draft_together(requests: Sequence[TargetRequest]) -> None:
    """Lets in-process drafters draft for these requests; the requests of a drafter share its forwards."""
    by_drafter: defaultdict[str, list[TargetRequest]] = defaultdict(list)
    for request in requests:
        by_drafter[request.drafter].append(request)
    for own in by_drafter.values():
        _draft_with_one_drafter(own)


def _draft_with_one_drafter(requests: Sequence[TargetRequest]) -> None:
    """The same for one drafter. It reads texts first, until a piece leaves a text unread; such requests draft later."""
    started_ns, is_reading = clock.now(), False
    turns: list[tuple[TargetRequest, DraftTurn]] = []
    for request in requests:
        try:
            with wrap_model_errors("the target's own drafter"):
                turn = request.turn()
                if turn.read is None or (not is_reading and turn.read()):
                    turns.append((request, turn))
                else:
                    is_reading = True
        except OutriderError as error:
            request.set_proposal(error, Span(started_ns, clock.now()))
    started_ns = clock.now()  # the texts are read
    drafts, _ = run_together([turn.steps for _, turn in turns])
    span = Span(started_ns, clock.now())
    for (request, _), draft in zip(turns, drafts, strict=True):
        request.set_proposal(draft, span)
