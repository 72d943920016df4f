"""One running request as the core sees it: its tokens, its round, and the account of what happened.

Knows tokens and times; knows no text, socket or model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from orchestrator.core.controller import Plan
from orchestrator.core.ngram import NgramIndex
from orchestrator.core.speculation_cache import SpeculationCache
from orchestrator.events import Admit
from protocol.messages import Outcome, Timings
from protocol.sampling import SamplingParams
from protocol.sparse import SparseQ

MILLISECOND_NS = 1_000_000
# A request tells at most this many single turnarounds; the sums go on.
MAX_TURNAROUNDS = 10_000


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """`depth` is K, `branches` B. `full_depth`: wait until a round's branches are complete (reproducible rounds).

    `simulated`: without its drafter a request stands for no machine, so it fails. `colocated`: the target drafts for
    itself.
    """

    depth: int
    branches: int
    full_depth: bool = False
    ngrams: bool = True
    simulated: bool = False
    colocated: bool = False


class Source(Enum):
    """Where a chain under verification came from."""

    NONE = "none"
    CACHE = "cache"
    DRAFTER = "drafter"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the next round verifies after the last committed token.

    `found`: there was a branch for the outcome. `missed`: there was none when the outcome came; both: it came late.
    `waited`: a drafter was waited for. The last `copied` tokens are from the text, which had been in the same place by
    `matched` tokens before. `q`: what the chain was drawn from, None where nothing was drawn. `draft`: how many tokens
    the target is to draft for itself; what it did is known with the outcome.
    """

    chain: tuple[int, ...] = ()
    source: Source = Source.NONE
    run_ahead: int = 0
    found: bool = False
    missed: bool = False
    waited: bool = False
    copied: int = 0
    matched: int = 0
    q: SparseQ | None = None
    draft: int = 0

    def settled(self, outcome: Outcome) -> Proposal:
        """With the chain that was verified, which only the target knew if it drafted for itself."""
        return replace(self, chain=outcome.drafted or ()) if self.draft else self

    def again(self) -> Proposal:
        """The round after, which the target makes by itself."""
        return replace(self, chain=() if self.draft else self.chain, run_ahead=self.run_ahead - 1)

    def kind(self, sampling: SamplingParams) -> str:
        """By which rule the target is to verify it (see `Verify`)."""
        if not sampling.is_residual:
            return "coupled"
        return "one-hot" if self.q is None else "sparse"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request waits for a drafter, until `deadline_ns` at the latest.

    With `outcome` (accepted, bonus) it waits for that branch to grow, or, `missed`, to come at all, or in full depth
    for the round to be final; without, for the continuation asked for at `asked_ns`.
    """

    asked_ns: int
    deadline_ns: int
    outcome: tuple[int, int] | None = None
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round that has ended, as it was: the books are made after the next one is under way."""

    number: int
    plan: Plan
    proposal: Proposal


@dataclass(slots=True)
class Account:
    """Counts and times of one request; `timings` gives them their public names."""

    admitted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    rounds: int = 0
    chains: int = 0
    drafted: int = 0
    accepted: int = 0
    late: int = 0
    ngram_chains: int = 0
    waits: int = 0
    verify_ns: int = 0
    idle_ns: int = 0
    turnarounds_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    hits_at: Counter[int] = field(default_factory=Counter)
    misses_at: Counter[int] = field(default_factory=Counter)

    def proposed(self, proposal: Proposal, accepted: int) -> None:
        """What follows an outcome that accepted this many tokens."""
        if proposal.missed:
            self.missed(accepted)
            self.late += proposal.found
        elif proposal.found:
            self.hits_at[accepted] += 1
        self.ngram_chains += proposal.source is Source.NGRAM

    def missed(self, accepted: int) -> None:
        """A lookup found nothing."""
        self.misses_at[accepted] += 1

    def verified(self, chain: tuple[int, ...], accepted: int) -> None:
        """One round; tokens past the end of the request are not to be passed in."""
        self.rounds += 1
        self.chains += bool(chain)
        self.drafted += len(chain)
        self.accepted += accepted
        for position in range(len(chain)):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def took(self, proposal: Proposal, outcome: Outcome, now_ns: int) -> None:
        """A round's time in the target and the target's wait before it; the first outcome ends the prompt's time.

        The wait before the verify of a hit that was served at once is a turnaround.
        """
        self.last_ns = now_ns
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        if not self.first_ns:
            self.first_ns = now_ns
            return
        self.verify_ns += outcome.work.ended_ns - outcome.work.started_ns
        self.idle_ns += outcome.idle_ns
        at_once = proposal.found and not proposal.waited
        if at_once and len(self.turnarounds_ns) < MAX_TURNAROUNDS:
            self.turnarounds_ns.append(outcome.idle_ns)

    def timings(self, prompt_n: int, predicted_n: int) -> Timings:
        predicted_ms = max(self.last_ns - self.first_ns, 0) / MILLISECOND_NS
        positions = range(max(self.drafted_at, default=-1) + 1)
        looked_up = range(max((*self.hits_at, *self.misses_at), default=-1) + 1)
        # The first token belongs to the prompt's time, so the rate is that of the tokens after it (as mlx-lm counts).
        rate = (predicted_n - 1) / predicted_ms * 1000 if predicted_ms > 0 else 0.0
        return Timings(
            prompt_n=prompt_n,
            prompt_ms=max(self.first_ns - self.admitted_ns, 0) / MILLISECOND_NS,
            predicted_n=predicted_n,
            predicted_ms=predicted_ms,
            predicted_per_second=rate,
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
            draft_rounds=self.chains,
            rounds=self.rounds,
            cache_hits=self.hits_at.total(),
            cache_misses=self.misses_at.total(),
            cache_late=self.late,
            ngram_chains=self.ngram_chains,
            draft_waits=self.waits,
            accepted_by_position=tuple(self.accepted_at[i] for i in positions),
            drafted_by_position=tuple(self.drafted_at[i] for i in positions),
            looked_up_by_accepted=tuple(self.hits_at[k] + self.misses_at[k] for k in looked_up),
            hits_by_accepted=tuple(self.hits_at[k] for k in looked_up),
            turnaround_ms=tuple(ns / MILLISECOND_NS for ns in self.turnarounds_ns),
            verify_ms=self.verify_ns / MILLISECOND_NS,
            idle_ms=self.idle_ns / MILLISECOND_NS,
            peak_bytes=self.peak_bytes,
        )


@dataclass(slots=True)
class Request:
    """A request in flight.

    `tokens` are the prompt and all committed tokens. `proposal` is under verification in `round`, which began with
    `base_len` committed tokens; `plan` says how its rounds are made; the latest outcome `accepted` so many tokens.
    `lent`: what the target may go on with after an outcome. `untold` are committed tokens that the drafters, `drafters`
    by name, do not know yet. `copied_in` is the round of
    the latest n-gram chain.
    """

    admit: Admit
    plan: Plan
    branches: int
    tokens: list[int]
    ngrams: NgramIndex
    drafters: set[str] = field(default_factory=set)
    epoch: int = 0
    round: int = 0
    base_len: int = 0
    accepted: int = 0
    copied_in: int = 0
    untold: list[int] = field(default_factory=list)
    proposal: Proposal = Proposal()
    cache: SpeculationCache = field(default_factory=SpeculationCache)
    lent: dict[tuple[int, int], Proposal] = field(default_factory=dict)
    waiting: Waiting | None = None
    branches_at_ns: int = 0
    handled_ns: int = 0
    account: Account = field(default_factory=Account)
    notes: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.admit.request

    def went_on(self, outcome: Outcome) -> Proposal:
        """What the target verifies by itself after this outcome: a chain it was lent."""
        chain = outcome.onward or ()
        lent = self.lent.get((outcome.accepted, outcome.bonus))
        return lent if lent is not None and lent.chain == chain else Proposal(chain, Source.CACHE, found=True)

    def this_round(self) -> Round:
        return Round(self.round, self.plan, self.proposal)

    @property
    def mode(self) -> str:
        return self.plan.mode

    @property
    def depth(self) -> int:
        return self.plan.depth

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.admit.tokens)

    @property
    def remaining(self) -> int:
        return self.admit.sampling.max_tokens - self.generated
