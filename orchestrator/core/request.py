"""One running request as the core sees it: its tokens, its round, its drafters, what it waits for and where it ends.

Knows tokens and times; knows no text, socket or model.

`DrafterState`: what a drafter knows of one request's text, what it was asked for, and how far that has come.

`remaining_length`, `up_to_end`: where a request must end: at its end tokens, its length, or the target's context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.orchestrator.core.metrics import RequestMetrics, RoundRecords
from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import RoundPlan
from outrider.orchestrator.core.policy.text_profiles import FREE, Drift, TextAcceptance, TextProfile
from outrider.orchestrator.core.proposal import Lookup, Proposal, ProposalSource
from outrider.orchestrator.core.speculation_cache import SpeculationCache
from outrider.orchestrator.events import Admit
from outrider.protocol.messages import Branches, Drafted, Outcome
from outrider.protocol.schema import Origin

NO_RANKS = range(0)


@dataclass(slots=True)
class DrafterState:
    """A drafter's state in a request: it knows the first `known_len` tokens.

    What it was asked for last is of `round`: branches for the outcomes of these `ranks`, likeliest first, or, where
    there are none, a chain; `depth` tokens. `asked_ns`: when; 0: with a text to read, so that the answer's time tells
    nothing. `heard_ns`: when the latest of its `pushes` came. `done`: no more is to come, or nobody waits for it.
    """

    known_len: int = 0
    round: int = 0
    ranks: range = NO_RANKS
    depth: int = 0
    asked_ns: int = 0
    heard_ns: int = 0
    pushes: int = 0
    done: bool = True

    def is_asked(self, round_: int, ranks: range, depth: int, known_len: int, now_ns: int) -> None:
        """It is sent the text up to `known_len`, and this task."""
        self.round, self.ranks, self.depth, self.known_len = round_, ranks, depth, known_len
        self.asked_ns, self.heard_ns, self.pushes, self.done = now_ns, now_ns, 0, False

    def is_awaited(self, message: Branches | Drafted) -> bool:
        """Whether this answers what it was asked for last, which was not answered in full."""
        is_kind = isinstance(message, Branches) == bool(self.ranks)
        return is_kind and not self.done and (message.round, message.base_len) == (self.round, self.known_len)


# A drafter that was lost so often in a row while it drafted for a request, without a word for that, is not taken back.
MOST_LOSSES = 2


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """`depth` is K, `branches` B, with `each` for each drafter; the cluster begins with so many `drafters`.

    `full_depth`: wait until a round's branches are complete (reproducible rounds). `simulated`: without its drafters a
    request stands for no machine, so it fails. `prefill_from`: prompts of so many unread tokens go to a prefill worker,
    where there is one.
    """

    depth: int
    branches: int
    full_depth: bool = False
    ngrams: bool = True
    simulated: bool = False
    each: bool = False
    drafters: int = 1
    trees: bool = True
    prefill_from: int = 1


@dataclass(frozen=True, slots=True)
class DrafterWait:
    """The request waits for a drafter, until `deadline_ns` at the latest.

    With `outcome`, the tokens it made final, it waits for that branch to grow, or, `missed`, to come at all, or in full
    depth for the round to be final; without, for the continuation asked for at `asked_ns`.
    """

    asked_ns: int
    deadline_ns: int
    outcome: tuple[int, ...] | None = None
    missed: bool = False


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """What the text says comes after its first `base_len` tokens."""

    base_len: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """A round that has ended, as it was: it is recorded once the next one is under way. `read`: the whole text."""

    number: int
    plan: RoundPlan
    proposal: Proposal
    read: bool


@dataclass(slots=True)
class Request:
    """A request in flight.

    `tokens` are the prompt and all committed tokens. `proposal` is under verification in `round`, which began with
    `base_len` committed tokens; `plan` says how its rounds are made; the latest outcome `accepted` so many tokens.
    `prepared`: what the target may go on with after an outcome. `halted`: HALT was sent. `over`: its
    last outcome has come. `text`: what it is taken for. `drafters`: by name, with the part that
    each has. `pending_copy`: of the round under way.
    `covered`: of how many outcomes drafters had finished by the latest one. `records`: of its rounds, if it asked for
    them. `reads`: the round under way begins with reading all tokens. `deaths` of the target in a row, while this was
    under way there and got no token; `losses`: the same of each drafter, by name. `drifts`: how drafters of the
    target's process do; `left_out`: those that are of no use any more. `heard_ns`: when the target was last
    heard to get on with it, or asked again. `takes_trees`: of drafts. `side`: which half it alternates with; `held`: a
    chain that has come and waits until the other half was verified.
    """

    admit: Admit
    plan: RoundPlan
    tokens: list[int]
    ngrams: NgramIndex
    text: TextProfile = field(default_factory=lambda: TextProfile(FREE, False, {}, TextAcceptance(Estimates())))
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    epoch: int = 0
    round: int = 0
    base_len: int = 0
    accepted: int = 0
    covered: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    prepared: dict[tuple[int, ...], Proposal] = field(default_factory=dict)
    halted: bool = False
    over: bool = False
    wait: DrafterWait | None = None
    pending_copy: PendingCopy | None = None
    branches_at_ns: int = 0
    handled_ns: int = 0
    reads: bool = True
    deaths: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    drifts: dict[str, Drift] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    heard_ns: int = 0
    side: int = 0
    held: Proposal | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    records: RoundRecords | None = None
    takes_trees: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.admit.request

    def advance(self, outcome: Outcome, committed: tuple[int, ...]) -> Proposal:
        """What the target verifies by itself after this outcome: its own, or a prepared chain."""
        if self.proposal.autonomous:
            return self.proposal.again()
        chain = outcome.next_proposal or ()
        known = self.prepared.get(committed)
        if known is not None and (known.chain, known.parents) == (chain, outcome.next_parents):
            return known
        by = (Origin.PREPARED,) * len(outcome.next_parents)
        return Proposal(chain, ProposalSource.CACHE, Lookup.HIT, parents=outcome.next_parents, by=by)

    def this_round(self) -> RoundSnapshot:
        return RoundSnapshot(self.round, self.plan, self.proposal, self.reads)

    def can_join(self, drafter: str) -> bool:
        """Whether a drafter that can be used now may draft for it: not where it died of it, as it seems."""
        return self.admit.takes_workers and drafter not in self.drafters and self.losses[drafter] < MOST_LOSSES

    def add_rejoined(self, drafter: str) -> None:
        """Is one of its drafters, in the middle of the text."""
        self.drafters[drafter] = DrafterState()
        self.metrics.rejoined += 1
        self.add_note(f"speculation: {drafter} drafts again")

    @property
    def awaits_drafters(self) -> bool:
        """Whether one of them has not finished what it was asked for."""
        return not all(state.done for state in self.drafters.values())

    def suspend(self) -> None:
        """The target does not know it any more, and what it and the drafters still say of it comes too late.

        What comes next is a round of its own: the latest may have ended, and a drafter been waited for.
        """
        self.epoch += 1
        self.halted, self.wait, self.proposal, self.prepared = False, None, Proposal(), {}
        self.held = None
        self.cache.start()
        self.metrics.on_lookup_late()
        if self.records is not None:
            self.records.on_lost()
        self.round += 1

    def add_worker_note(self, sender: str, words: str) -> None:
        """A worker's note, once."""
        if not any(note.startswith(f"{sender}: ") for note in self.notes):
            self.notes.append(f"{sender}: {words}")

    def add_note(self, words: str) -> None:
        """Something whoever reads the text should know, once."""
        if words not in self.notes:
            self.notes.append(words)

    @property
    def mode(self) -> str:
        return self.plan.mode

    @property
    def in_process_drafter(self) -> str:
        """The drafter in the target's process that drafts while others work ahead; empty: none."""
        return self.plan.drafter if self.mode == "ssd" else ""

    @property
    def depth(self) -> int:
        return self.plan.depth

    @property
    def branches(self) -> int:
        return self.plan.branches

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.admit.tokens)

    @property
    def made(self) -> int:
        """How many of the generated tokens this server has made."""
        return self.generated - len(self.admit.resume_tokens)

    @property
    def remaining(self) -> int:
        return self.admit.sampling.max_tokens - self.generated


@dataclass(frozen=True, slots=True)
class SettledRound:
    """A round that ended with `outcome`: the nodes that hold, the tokens that it made final, and why the request ends
    there, if it does.
    """

    request: Request
    ended: RoundSnapshot
    outcome: Outcome
    nodes: Sequence[int]
    kept: tuple[int, ...]
    reason: str | None


def remaining_length(request: Request, context: int) -> int:
    """How many tokens the request may still grow by."""
    return min(request.remaining, context - len(request.tokens))


def remaining_tokens(request: Request, context: int, ahead: int = 0) -> int:
    """How long a chain may be, `ahead` tokens on: the bonus must still fit the request and the target's context."""
    return min(request.remaining - 1, context - len(request.tokens)) - ahead


def up_to_end(request: Request, context: int, new: Sequence[int]) -> tuple[list[int], str | None]:
    """The tokens of `new` that count, and why the request ends with them if it does."""
    space = remaining_length(request, context)
    for index, token in enumerate(new[:space]):
        if token in request.admit.eos:
            return list(new[: index + 1]), "eos"
    return list(new[:space]), "length" if len(new) >= space else None
