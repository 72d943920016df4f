"""The state of one running request in the core: its tokens, round, drafters, branches and plan, and where it ends.

Knows tokens and times; knows no text, socket or model.

A `Request` consists of records. Each is written by one module, and read by all: `SequenceState` by the scheduler,
`RoundState` by `NextRound`, `DraftState` with its `DrafterState`s by `DraftPool`, `PlanState` by `Planner`
(tests/architecture checks it).

A request ends at its end tokens, its length, or the target's `context`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.orchestrator.core.metrics import RequestMetrics
from outrider.orchestrator.core.policy.acceptance import TextAcceptance
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.proposal import CopyRound, Lookup, Proposal, propose_copy
from outrider.orchestrator.events import Admit
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Alternatives, Branches, Drafted, DraftTokens, Outcome, Span
from outrider.protocol.ngrams import NgramIndex
from outrider.protocol.schema import clip
from outrider.protocol.trees import SparseQ

NO_RANKS = range(0)

MAX_REQUEST_BYTES, MAX_TOTAL_BYTES = 16 << 20, 64 << 20
"""The budget of one request and of all, in bytes."""

_TOKEN_BYTES = 40  # a number and its place in a tuple

PreparedKey = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The tokens that an outcome commits, and the chain prepared for it with its parents."""


@dataclass(slots=True)
class DrafterState:
    """A drafter's state in a request: it knows the first `known_len` tokens.

    Its latest task is of `round`: branches for the outcomes of these `ranks`, likeliest first, or, without any, a
    chain. `asked_ns` is when it was sent (0: with a text to read, so its latency does not count), `chain_asked_ns` the
    same for the latest chain, `last_heard_ns` when the latest of its `pushes` came. `done`: nothing more is to come, or
    is awaited.
    """

    known_len: int = 0
    round: int = 0
    ranks: range = NO_RANKS
    asked_ns: int = 0
    chain_asked_ns: int = 0
    last_heard_ns: int = 0
    pushes: int = 0
    done: bool = True

    def assign(self, round_: int, ranks: range, known_len: int, now_ns: int) -> None:
        """Records that the drafter was sent the text up to `known_len`, and this task."""
        self.round, self.ranks, self.known_len = round_, ranks, known_len
        self.asked_ns, self.last_heard_ns, self.pushes, self.done = now_ns, now_ns, 0, False
        self.chain_asked_ns = self.chain_asked_ns if ranks else now_ns

    def is_of_round(self, message: Branches | Drafted) -> bool:
        """Whether a message is of the latest task's round and text, though maybe of another task."""
        return (message.round, message.base_len) == (self.round, self.known_len)

    def is_awaited(self, message: Branches | Drafted) -> bool:
        """Whether a message answers the latest task, which is not done."""
        is_kind = isinstance(message, Branches) == bool(self.ranks)
        return is_kind and not self.done and self.is_of_round(message)

    def push(self, message: Branches, is_awaited: bool, now_ns: int) -> None:
        """Records branches of its round, which may have ended."""
        self.pushes += bool(message.entries)
        if is_awaited:
            self.last_heard_ns, self.done = now_ns, message.final

    @property
    def has_pending_branches(self) -> bool:
        """Whether branches of the round under verification are still to come."""
        return bool(self.ranks) and not self.done


@dataclass(slots=True)
class CacheBudget:
    """The bytes that the branches of all requests take, and the number of messages dropped because they exceed a limit.

    An honest drafter's branches take kilobytes; the limits are for one that sends as much as a frame holds.
    """

    held_bytes: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class CachedBranch:
    """A branch: its chain, the distributions it was drawn from (if it was), its drafter, its alternatives, and the odds
    of its tokens (as in `messages.Branch`)."""

    chain: tuple[int, ...]
    q: SparseQ | None = None
    drafter: str = ""
    alternatives: Alternatives | None = None
    odds: tuple[float, ...] = ()


class SpeculationCache:
    """The branches of the round under verification: outcome -> branch, one round deep (paper definition 4).

    An outcome (k, t) is identified by the tokens that it makes final: the first k of the chain, then t. Only branches
    that arrived before the outcome was handled are held, so a hit is a prediction, never a look at the answer. Several
    drafters fill one cache: of two branches for the same outcome the deeper one counts.
    """

    def __init__(self, budget: CacheBudget | None = None) -> None:
        """`budget` is shared with other requests' caches."""
        self._budget = budget or CacheBudget()
        self._held_bytes = 0
        self.branches: dict[tuple[int, ...], CachedBranch] = {}

    def clear(self) -> None:
        """Drops all branches and releases their bytes."""
        self.branches.clear()
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def add(self, message: Branches, drafter: str) -> None:
        """Adds branches within the budget; a deeper one replaces a shorter one. Depth decides, never the tokens."""
        # The bytes of a whole message count, because its arrays are views of one buffer.
        size = _TOKEN_BYTES * sum(len(entry.committed) + len(entry.chain) for entry in message.entries)
        size += message.q.nbytes if message.q is not None else 0
        if self._held_bytes + size > MAX_REQUEST_BYTES or self._budget.held_bytes + size > MAX_TOTAL_BYTES:
            self._budget.dropped += 1
            return
        self._held_bytes += size
        self._budget.held_bytes += size
        end = 0
        for entry in message.entries:
            start, end = end, end + len(entry.chain)
            old = self.branches.get(entry.committed)
            if old is None or len(entry.chain) > len(old.chain) or (entry.alternatives and old.chain == entry.chain):
                q = message.q.part(start, end) if message.q is not None else None
                self.branches[entry.committed] = CachedBranch(entry.chain, q, drafter, entry.alternatives, entry.odds)

    def lookup(self, committed: tuple[int, ...]) -> CachedBranch | None:
        """Returns the branch for the outcome that makes these tokens final, as deep as it is, or None.

        If an alternative and further tokens of its branch were accepted, it is the rest of that branch.
        """
        if committed in self.branches:
            return self.branches[committed]
        for length in range(len(committed) - 1, 0, -1):
            shorter, rest = self.branches.get(committed[:length]), committed[length:]
            if shorter is not None and shorter.chain[: len(rest)] == rest and len(shorter.chain) > len(rest):
                begin = len(rest)
                return CachedBranch(shorter.chain[begin:], None, shorter.drafter, odds=shorter.odds[begin:])
        return None


@dataclass(frozen=True, slots=True)
class DrafterWait:
    """A wait for a drafter, until `deadline_ns` at the latest.

    With `outcome` (the tokens that it made final) the request waits for that branch to grow, or, if `missed`, to
    arrive, or in full depth for all branches; without, for a chain of `depth` tokens requested at `asked_ns`. `missed`:
    there was no branch when the outcome came.
    """

    asked_ns: int
    deadline_ns: int
    outcome: tuple[int, ...] | None = None
    depth: int = 0
    missed: bool = False


@dataclass(slots=True)
class SequenceState:
    """The text of a request: the prompt and all committed `tokens`, at most `context`; `ngrams` stays empty if unused.

    `appended_ns`: when the latest came. `last_heard_ns`: when the target last made progress on it, or was asked again.
    `deaths`: how often in a row the target died without a token for it. `notes`: messages for the reader of the text.
    """

    tokens: list[int]
    context: int
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    appended_ns: int = 0
    last_heard_ns: int = 0
    deaths: int = 0
    notes: list[str] = field(default_factory=list)

    def append(self, tokens: Sequence[int], now_ns: int) -> None:
        """Makes tokens final, which the target has just brought."""
        self.tokens += tokens
        if not self.ngrams.is_empty:
            self.ngrams.extend(tokens)
        self.appended_ns = self.last_heard_ns = now_ns
        self.deaths = 0

    def add_note(self, words: str) -> None:
        """Adds a note, unless it is there already."""
        words = clip(words)  # it may hold the end of a process's log
        if words not in self.notes:
            self.notes.append(words)


@dataclass(slots=True)
class RoundState:
    """The round `number` under verification, with its `proposal`, or, once it has ended, the `wait` before the next.

    The proposal was `decided` from the outcome before it on (None: by the target itself), after a wait if it `waited`.
    `prepared`: the chains that the target may continue with. `covered`: how many outcomes the drafters had finished
    when the latest one came. `halted`: HALT was sent. `is_open`: the target has been sent the text. `reads`: the target
    reads the text first.
    """

    epoch: int = 0
    number: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    decided: Span | None = None
    waited: bool = False
    prepared: dict[PreparedKey, Proposal] = field(default_factory=dict)
    wait: DrafterWait | None = None
    covered: int = 0
    halted: bool = False
    is_open: bool = False
    reads: bool = True

    def begin(self, proposal: Proposal, decided: Span | None = None) -> None:
        """Begins the next round, and ends the wait for its proposal."""
        self.number += 1
        self.proposal, self.decided, self.waited = proposal, decided, self.wait is not None
        self.prepared, self.wait = {}, None

    def end(self, proposal: Proposal, covered: int, continues: bool) -> None:
        """Ends the round, in which `proposal` was verified; `continues`: the target continues by itself."""
        self.proposal, self.covered = proposal, covered
        self.halted, self.reads = self.halted and continues, False

    def suspend(self) -> None:
        """Begins a new epoch: the target has lost the request, and messages of the old epoch are stale.

        The next round gets a new number, because the latest may have ended during a wait for a drafter.
        """
        self.epoch += 1
        self.begin(Proposal())
        self.halted, self.is_open, self.reads = False, False, True

    def advance(self, outcome: Outcome, committed: tuple[int, ...]) -> Proposal:
        """Returns the proposal that the target verifies by itself after this outcome: its own, a prepared one, or
        n-grams after a miss."""
        if self.proposal.autonomous:
            return replace(self.proposal, chain=(), parents=(), by=(), lookup=Lookup.NONE)
        verified = outcome.next_proposal or DraftTokens()
        prepared = self.prepared.get((committed, verified.chain, verified.parents))
        if prepared is not None:
            return prepared
        return replace(propose_copy(verified.chain), lookup=Lookup.MISS)


@dataclass(slots=True)
class DraftState:
    """The drafters of a request, and the branches that they have sent for the round under verification.

    The `lead` is the drafter with the likeliest outcomes. `losses`: how often in a row each was lost without an answer.
    """

    drafters: dict[str, DrafterState]
    cache: SpeculationCache
    lead: str = ""
    losses: Counter[str] = field(default_factory=Counter)

    def start(self, drafters: Iterable[str] = ()) -> None:
        """Drops all branches; `drafters` will send those of another round, the lead first."""
        self.cache.clear()
        for state in self.drafters.values():
            state.ranks = NO_RANKS
        self.lead = next(iter(drafters), self.lead)

    @property
    def final(self) -> bool:
        """Whether all drafters have finished, so that no branch will come."""
        return not any(state.has_pending_branches for state in self.drafters.values())

    @property
    def covered(self) -> int:
        """The number of outcomes whose drafters have finished; 0 if the lead has not."""
        if self._is_lead_pending:
            return 0
        return sum(len(state.ranks) for state in self.drafters.values() if state.done)

    @property
    def _is_lead_pending(self) -> bool:
        return self.lead in self.drafters and self.drafters[self.lead].has_pending_branches

    def since_push_ms(self, now_ns: int) -> float:
        """Returns the time since the lead's latest push, or since it was asked; 0 if the lead is gone."""
        lead = self.drafters.get(self.lead)
        return (now_ns - lead.last_heard_ns) / MILLISECOND_NS if lead else 0.0

    def can_grow(self, branch: CachedBranch) -> bool:
        """Whether it may pay to wait until a branch is longer. Branches of others than the lead are served as they
        are."""
        return branch.drafter == self.lead and self._is_lead_pending

    def pushes_left(self, accepted: int, chain_length: int) -> int:
        """Returns how many more pushes of the lead may bring the first branches of `accepted` tokens; 0: they are here.

        The branches of full acceptance come with the second push: the first one feeds the chain's last token.
        """
        leads = (commit for commit, branch in self.cache.branches.items() if branch.drafter == self.lead)
        if not self._is_lead_pending or any(len(commit) == accepted + 1 for commit in leads):
            return 0
        return max((2 if accepted == chain_length else 1) - self.drafters[self.lead].pushes, 0)


@dataclass(slots=True)
class PlanState:
    """How the rounds of a request are made: its `plan`, and what it is based on.

    `text`: the acceptance in this text. `silent_rounds`: the latest rounds in which an in-process drafter proposed
    nothing; `left_out`: those that are no longer used. `pending_copy`: what n-grams alone would verify in the round
    under way. `copy_round`: the round of n-grams alone whose tokens are not all known yet.
    """

    plan: Arm
    text: TextAcceptance
    silent_rounds: Counter[str] = field(default_factory=Counter)
    left_out: set[str] = field(default_factory=set)
    pending_copy: CopyRound | None = None
    copy_round: CopyRound | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request in flight. `takes_trees`: whether the target can verify trees of drafts for it."""

    admit: Admit
    sequence: SequenceState
    draft: DraftState
    planning: PlanState
    metrics: RequestMetrics
    takes_trees: bool = False
    round: RoundState = field(default_factory=RoundState)

    @property
    def id(self) -> str:
        return self.admit.request

    @property
    def plan(self) -> Arm:
        return self.planning.plan

    @property
    def in_process_drafter(self) -> str:
        """The in-process drafter that drafts after a miss while draft workers work ahead; empty: none."""
        return self.plan.drafter if self.plan.mode == "ssd" else ""

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - len(self.admit.tokens)

    @property
    def remaining(self) -> int:
        """The number of tokens by which it may still grow."""
        most = len(self.admit.tokens) + self.admit.sampling.max_tokens
        return min(most, self.sequence.context) - len(self.sequence.tokens)

    @property
    def max_chain_tokens(self) -> int:
        """The maximum length of a chain, which leaves a place for the bonus token."""
        return self.remaining - 1

    @property
    def max_draft_tokens(self) -> int:
        """The maximum length of a drafter's chain."""
        return max(min(self.plan.depth, self.max_chain_tokens), 0)

    def truncate_at_end(self, new: Sequence[int]) -> tuple[list[int], str | None]:
        """Returns the tokens of `new` that count, and why the request ends with them, if it does."""
        space = self.remaining
        for index, token in enumerate(new[:space]):
            if token in self.admit.eos:
                return list(new[: index + 1]), "eos"
        return list(new[:space]), "length" if len(new) >= space else None


@dataclass(frozen=True, slots=True)
class SettledRound:
    """A round that ended with `outcome`, recorded once the next one is under way. `read`: it began by reading the whole
    text. `nodes` were accepted, and the tokens `kept` became final; `reason`: why the request ends there, if it does.
    `decided`, `waited`, `covered`: as in `RoundState`.
    """

    request: Request
    number: int
    plan: Arm
    proposal: Proposal
    read: bool
    outcome: Outcome
    nodes: Sequence[int]
    kept: tuple[int, ...]
    reason: str | None
    decided: Span | None = None
    waited: bool = False
    covered: int = 0

    @property
    def took_ns(self) -> int:
        """The time since the outcome before, by the target's clock."""
        return self.outcome.idle_ns + self.outcome.work.duration_ns
