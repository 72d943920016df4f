"""Proposals: the chain or tree that a round verifies, extended by n-gram copies of the text, and what one is worth.

`extend_by_copy` and `merge_into_tree` combine a drafter's chain, its alternatives and a copy. `best_tail` decides how
much of a copy is worth its rows. Copying costs nothing, so a copy may be longer than K.

`choose_fallback` and the functions below it choose what to verify after a miss, and whether to wait for branches, by
the expected tokens minus the worth of the time. A millisecond of the target is worth the tokens that all requests have
lately gained in one; a millisecond of a request's waiting is worth its own tokens.

All are pure functions of the estimates: no clock, no state; nothing is sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from operator import mul

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.protocol.messages import (
    Alternatives,
    Autonomous,
    DraftInProcess,
    DraftTokens,
    InProcess,
    Outcome,
)
from outrider.protocol.ngrams import MAX_COPY_TOKENS, Copy, NgramIndex
from outrider.protocol.schema import MAX_CHAIN, Origin
from outrider.protocol.trees import (
    ROOT,
    DraftTree,
    SparseQ,
    chain_parents,
    common_prefix_length,
    first_branch,
    merge_trees,
    node_depths,
)

MAX_TREE_NODES = 32

# Few alternatives to a chain's token are likelier than this. If a row costs more tokens, none are requested.
MAX_ROW_COST_TOKENS = 0.3


class Lookup(Enum):
    """The result of looking an outcome up in the speculation cache."""

    NONE = "none"
    """No lookup."""
    HIT = "hit"
    """A branch, served at once."""
    GROWN = "grown"
    """A branch, served after a wait for it to grow."""
    LATE = "late"
    """No branch when the outcome came; the branch came during a wait for it."""
    MISS = "miss"

    @property
    def found(self) -> bool:
        """Whether there was a branch, at once or late."""
        return self in (Lookup.HIT, Lookup.GROWN, Lookup.LATE)

    @property
    def missed(self) -> bool:
        """Whether there was no branch when the outcome came."""
        return self in (Lookup.LATE, Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tokens that the next round verifies after the last committed token.

    They are a `drafter`'s or n-gram copies. `source` is their origin (TARGET: there are none); `by` holds the origin of
    each token if they differ. `q` holds the distributions that the chain was drawn from, if any. With `parents` the
    tokens are a tree. With `autonomous` the target continues by itself after this round, plainly or with the `draft` of
    an in-process drafter in each, which comes with the outcome. With `draft` but not `autonomous` it drafts for this
    round only, and `chain` forms one tree with that draft. `offered`: a draft worker's whole chain, verified or not.
    """

    chain: tuple[int, ...] = ()
    source: Origin = Origin.TARGET
    lookup: Lookup = Lookup.NONE
    autonomous: bool = False
    q: SparseQ | None = None
    draft: InProcess | None = None
    drafter: str = ""
    parents: tuple[int, ...] = ()
    by: tuple[Origin, ...] = ()
    offered: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or the first branch of a tree."""
        return tuple(self.chain[node] for node in first_branch(self.parents)) if self.parents else self.chain

    @property
    def drafter_nodes(self) -> Sequence[int]:
        """The nodes of the drafter's chain."""
        return [node for node, origin in enumerate(self.token_origins) if origin is self.source is not Origin.COPIED]

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted."""
        return max(node_depths(self.parents), default=-1) + 1 if self.parents else len(self.chain)

    def nodes(self, outcome: Outcome) -> Sequence[int] | None:
        """Returns the accepted nodes; None if the outcome does not fit the proposal."""
        if outcome.path is None and not self.parents:
            return range(outcome.accepted) if outcome.accepted <= len(self.chain) else None
        path = tuple(range(outcome.accepted)) if outcome.path is None else outcome.path
        if len(path) != outcome.accepted or max(path, default=ROOT) >= len(self.parents):
            return None
        return path if [self.parents[node] for node in path] == [ROOT, *path][: len(path)] else None

    def count_on_chain(self, nodes: Sequence[int]) -> int:
        """Returns how many tokens of the drafter's chain these accepted nodes hold, whatever their origin."""
        chain = self.offered or [self.chain[node] for node in self.drafter_nodes]
        return common_prefix_length(chain, [self.chain[node] for node in nodes])

    def as_verified(self, outcome: Outcome) -> Proposal:
        """Returns the proposal as it was verified: merged with the in-process drafter's tokens, if there are any."""
        if not self.draft:
            return self
        drafted = outcome.drafted or DraftTree()
        first = set(first_branch(drafted.parents)) if drafted.parents else range(len(drafted.chain))
        by = tuple(self.source if node in first else Origin.GUESSED for node in range(len(drafted.chain)))
        if not self.chain:
            return replace(self, chain=drafted.chain, parents=drafted.parents, by=by)
        union = merge_trees(drafted, DraftTree(self.chain, self.parents), MAX_CHAIN)
        sent = {place: origin for place, origin in zip(union.places, self.by, strict=True) if place is not None}
        by += tuple(sent[node] for node in range(len(drafted.chain), len(union.tokens)))
        return replace(self, chain=union.tokens, parents=union.parents, by=by)

    @property
    def token_origins(self) -> tuple[Origin, ...]:
        """The origin of each token."""
        return self.by or (self.source,) * len(self.chain)

    def origins(self, nodes: Sequence[int]) -> tuple[Origin, ...]:
        """Returns the origins of an outcome's tokens, given the accepted nodes."""
        return (*map(self.token_origins.__getitem__, nodes), Origin.TARGET)

    def after_wait(self, missed: bool) -> Proposal:
        """Returns the proposal after a wait for a drafter; `missed`: there was no branch when the outcome came."""
        if missed:
            return replace(self, lookup=Lookup.LATE if self.lookup.found else Lookup.MISS)
        return replace(self, lookup=Lookup.GROWN) if self.lookup is Lookup.HIT else self

    def to_message(self, max_tokens: int) -> DraftTokens | DraftInProcess | Autonomous:
        """Returns the proposal as VERIFY carries it. `max_tokens`: by how many the request may still grow."""
        if self.autonomous:
            return Autonomous(max_tokens, self.draft)
        if self.draft is not None:
            return DraftInProcess(self.chain, self.parents, draft=self.draft, max_tokens=max_tokens)
        return DraftTokens(self.chain, self.parents, self.q)


class DraftTrie:
    """The drafts of all sources as a trie: a token that several propose occurs once. A node comes after its parent.

    A node's mass is the probability that it is accepted: the product of the odds down to it. The expected tokens of a
    round are 1 plus the sum of the masses, so the best tree of M nodes has the M heaviest; c(M) decides how many. If
    nothing else pays, the tree is a chain.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.by: list[Origin] = []
        self._odds: list[float] = []  # the probability that a node is accepted if its parent is
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, tokens: Sequence[int], odds: Sequence[float], by: Origin) -> None:
        """Adds a chain. A token already there keeps its origin, and the better odds."""
        node = ROOT
        for token, probability in zip(tokens, odds, strict=True):
            parent, node = node, self._nodes.setdefault((node, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
                self.by.append(by)
                self._odds.append(probability)
            self._odds[node] = max(self._odds[node], probability)

    def count_shared(self, tokens: Sequence[int]) -> int:
        """Returns how many of the first tokens are in the trie."""
        node = ROOT
        for count, token in enumerate(tokens):
            if (node, token) not in self._nodes:
                return count
            node = self._nodes[node, token]
        return len(tokens)

    def masses(self) -> list[float]:
        """Returns the probability that each node is accepted. Siblings exclude each other: their sum is at most 1."""
        totals: defaultdict[int, float] = defaultdict(float)
        for parent, odds in zip(self.parents, self._odds, strict=True):
            totals[parent] += odds
        masses: list[float] = []
        for parent, odds in zip(self.parents, self._odds, strict=True):
            masses.append((masses[parent] if parent >= 0 else 1.0) * odds / max(totals[parent], 1.0))
        return masses

    def best(self, cost: Callable[[int], float], worth: float | None = None, most: int = MAX_TREE_NODES) -> list[int]:
        """Returns the nodes of the best tree of at most `most`, depth first, the likeliest branch first.

        Args:
            cost: the total cost of a round by its rows: the nodes and the last committed token.
            worth: the tokens that a unit of cost is worth. None maximises tokens per cost of this round, which adds
                nodes while mass / (1 + E) > dc / c.
        """
        masses = self.masses()
        heaviest = sorted(range(len(masses)), key=lambda node: -masses[node])[:most]  # a parent before its children
        expected = enumerate(accumulate((masses[node] for node in heaviest), initial=1.0), 1)
        values = [tokens / cost(rows) if worth is None else tokens - worth * cost(rows) for rows, tokens in expected]
        best = heaviest[: values.index(max(values))]
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}  # the ranks of the nodes down to each
        for rank, node in enumerate(best):
            paths[node] = (*paths[self.parents[node]], rank)
        return sorted(best, key=paths.__getitem__)


@dataclass(frozen=True, slots=True)
class CopiedTail:
    """The first `tokens` of a copy, and the gain from adding them: expected tokens minus the worth of their time."""

    tokens: tuple[int, ...] = ()
    gain: float = 0.0


def best_tail(estimates: Estimates, copy: Copy, after: int = 0, held: float = 1.0) -> CopiedTail:
    """Returns the best beginning of `copy` `after` this many tokens that are all accepted with probability `held`."""
    costs = estimates.row_costs(after + len(copy.chain))[after:]
    length, gain = estimates.copied.best_length(copy, costs, held)
    return CopiedTail(copy.chain[:length], gain)


def longest_copy(ngrams: NgramIndex, max_chain_tokens: int) -> Copy:
    """Returns the longest copy that may be verified; `max_chain_tokens` is the maximum length of a chain."""
    return ngrams.lookup(min(MAX_COPY_TOKENS, max_chain_tokens))


@dataclass(frozen=True, slots=True)
class CopyRound:
    """The round that n-grams alone would make after the first `base_len` tokens: it would verify the first `rows` of
    `copy`. The text shows how it would end, whatever is verified."""

    base_len: int
    copy: Copy
    rows: int

    def right(self, following: Sequence[int]) -> int | None:
        """Returns how many of its tokens were right; None until the tokens `following` it show that."""
        right = common_prefix_length(self.copy.chain, following)
        return min(right, self.rows) if len(following) > self.rows or right < len(following) else None


def propose_copy(tokens: tuple[int, ...]) -> Proposal:
    """Returns the proposal of a copy alone; an empty one is an AR step."""
    return Proposal(tokens, Origin.COPIED if tokens else Origin.TARGET)


def extend_by_copy(
    estimates: Estimates,
    ngrams: NgramIndex,
    branch: Proposal,
    committed: tuple[int, ...],
    max_chain_tokens: int,
    odds: Sequence[float] = (),
) -> Proposal:
    """Returns the part of a branch that is worth its rows, extended by a copy if that is, too; or only a copy.

    Args:
        committed: tokens before the branch that the n-grams have not seen yet.
        max_chain_tokens: the maximum length of the chain.
        odds: of the branch's tokens, by the drafter; (): unknown, and the branch is kept whole or replaced.
    """
    longest, whole = min(MAX_COPY_TOKENS, max_chain_tokens), len(branch.chain)
    costs = estimates.row_costs(whole)
    reached = list(accumulate(odds or map(estimates.drafted.rate, range(whole)), mul, initial=1.0))
    best, copied, most = whole, tuple[int, ...](), -math.inf
    for kept in range(whole + 1) if odds else {whole, 0}:
        copy = ngrams.lookup(longest - kept, (*committed, *branch.chain[:kept]))
        tail = best_tail(estimates, copy, kept, reached[kept])
        gain = sum(reached[1 : kept + 1]) - costs[kept] + tail.gain
        if gain > most and (kept or odds or tail.tokens):
            best, copied, most = kept, tail.tokens, gain
    if best == 0 and most > -math.inf:
        return replace(propose_copy(copied), lookup=branch.lookup, offered=branch.offered)
    by = (branch.source,) * best + (Origin.COPIED,) * len(copied)
    return replace(branch, chain=branch.chain[:best] + copied, by=by)


def min_alternative_prob(estimates: Estimates, takes_trees: bool) -> float:
    """Returns the minimum probability for an alternative token to be worth its row; 1: alternatives never are."""
    row = estimates.row_cost()
    return row if takes_trees and row < MAX_ROW_COST_TOKENS else 1.0


def merge_into_tree(
    estimates: Estimates,
    ngrams: NgramIndex,
    branch: Proposal,
    committed: tuple[int, ...],
    max_chain_tokens: int,
    alternatives: Alternatives | None = None,
    odds: Sequence[float] = (),
) -> Proposal | None:
    """Returns the best tree of a branch, a copy and alternatives; None: there is nothing to merge.

    Args:
        committed: tokens before the branch that the n-grams have not seen yet.
        max_chain_tokens: the most tokens that can be accepted.
        alternatives: the drafter's alternatives to tokens of its chain.
        odds: of the branch's tokens, by the drafter; (): those of chains on average.
    """
    chain, longest = branch.chain, min(MAX_COPY_TOKENS, max_chain_tokens)
    instead = ngrams.lookup(longest, committed)
    forks = bool(instead.chain) and chain[: len(instead.chain)] != instead.chain[: len(chain)]
    if not chain or not (forks or alternatives is not None):
        return None
    drafts = DraftTrie()
    rates = odds or [estimates.drafted.rate(position) for position in range(len(chain))]
    drafts.add(chain, rates, branch.source)
    if alternatives is not None:
        for token, parent, share in zip(alternatives.tokens, alternatives.parents, alternatives.odds, strict=True):
            if parent < min(len(chain), max_chain_tokens - 1):  # the chain may have been truncated
                drafts.add((*chain[: parent + 1], token), [*[0.0] * (parent + 1), share], Origin.GUESSED)
    if forks:
        shared, rate = drafts.count_shared(instead.chain), estimates.alternatives.rate
        positions = range(len(instead.chain))  # the first that no other source proposes counts as position 0
        odds_of_copy = [rate(instead.evidence, max(position - shared, 0)) for position in positions]
        drafts.add(instead.chain, odds_of_copy, Origin.COPIED)
    after = ngrams.lookup(longest - len(chain), (*committed, *chain))
    tail = best_tail(estimates, after, len(chain), math.prod(rates)).tokens
    follows = [estimates.copied.rate(after.evidence, position) for position in range(len(tail))]
    drafts.add((*chain, *tail), [*[0.0] * len(chain), *follows], Origin.COPIED)
    worth = None if estimates.active == 1 else estimates.tokens_per_ms()
    fixed = estimates.turnaround_ms()
    nodes = drafts.best(lambda rows: fixed + estimates.verify_ms(rows), worth)
    places = {node: place for place, node in enumerate(nodes)}
    parents = tuple(places.get(drafts.parents[node], ROOT) for node in nodes)
    if parents == chain_parents(len(parents)):
        return None
    tokens, by = tuple(drafts.tokens[node] for node in nodes), tuple(drafts.by[node] for node in nodes)
    return replace(branch, chain=tokens, parents=parents, by=by)


def should_merge_in_process(estimates: Estimates, drafter: str, depth: int) -> bool:
    """Whether `depth` in-process tokens are worth drafting and verifying in one tree with a branch."""
    drafted, ahead, row = estimates.acceptance_of(drafter), estimates.drafted, estimates.row_cost()
    gain = -estimates.tokens_per_ms() * estimates.in_process_ms(depth, drafter)
    for position in range(depth):
        both = drafted.reach(position) * ahead.reach(position)
        gain += drafted.reach(position) - both - row * (1.0 - both)
    return gain > 0.0


@dataclass(frozen=True, slots=True)
class Fallback:
    """Verify a copy now (an empty one is an AR step), or request a chain of `wait_for` tokens first, or let the
    in-process drafter draft `in_process` tokens. `value`: the expected tokens minus the worth of the time."""

    wait_for: int = 0
    value: float = 0.0
    in_process: int = 0


def choose_fallback(
    estimates: Estimates, tail: CopiedTail, max_draft_tokens: int, has_drafter: bool, in_process: str = ""
) -> Fallback:
    """Returns the best of: an AR step, a copy, a chain of the drafter `in_process`, if there is one, and, for a request
    alone, a chain on request of any length. With others it would miss their next forward, and the drafter would grow
    branches for none of them meanwhile."""
    options = [Fallback(value=_copy_value(estimates, tail))]
    lengths = range(1, max_draft_tokens + 1)
    if in_process:
        options += [Fallback(in_process=n, value=_in_process_value(estimates, n, in_process)) for n in lengths]
    if has_drafter and estimates.active == 1:
        options += [Fallback(wait_for=n, value=_request_value(estimates, n)) for n in lengths]
    return max(options, key=lambda option: option.value)


def should_wait_for_branch(estimates: Estimates, alternative: Fallback, max_draft_tokens: int, wait_ms: float) -> bool:
    """Whether it pays to wait `wait_ms` for branches on their way, which are assumed to hit as often as any.

    Without the wait, a branch that comes just after its outcome would be lost; with a slow drafter or link those would
    be the branches of full acceptance, in every round.
    """
    hit = max(
        estimates.drafted.expected_tokens(depth)
        - estimates.verify_cost(depth)
        - estimates.request_tokens_per_ms() * (depth - 1) * estimates.depth_ms()
        for depth in range(1, max_draft_tokens + 1)
    )
    return estimates.hit_rate() * (hit - alternative.value) > estimates.wait_cost(wait_ms)


def should_draft(estimates: Estimates, tail: CopiedTail, max_draft_tokens: int, drafter: str = "") -> bool:
    """Whether `max_draft_tokens` tokens by a drafter are worth more than a copy, which costs no drafting (SD)."""
    return not tail.tokens or _request_value(estimates, max_draft_tokens, drafter) > _copy_value(estimates, tail)


def should_wait_for_token(estimates: Estimates, depth: int, since_last_ms: float, odds: Sequence[float] = ()) -> bool:
    """Whether a hit of `depth` tokens with these `odds` should wait for one more; the last came `since_last_ms` ago."""
    waiting = estimates.wait_cost(max(estimates.depth_ms() - since_last_ms, 0.0))
    row = estimates.verify_cost(depth + 1) - estimates.verify_cost(depth)
    reached = math.prod(odds) if odds else estimates.drafted.reach(depth - 1)
    return reached * estimates.drafted.rate(depth) > waiting + row


def _copy_value(estimates: Estimates, tail: CopiedTail) -> float:
    """Returns the tokens of a step with a copy, minus the worth of its forward."""
    return 1.0 - estimates.verify_cost(0) + tail.gain


def _request_value(estimates: Estimates, length: int, drafter: str = "") -> float:
    """Returns the tokens of a chain on request, minus the worth of its forward and of the wait."""
    tokens = estimates.acceptance_of(drafter).expected_tokens(length)
    return tokens - estimates.verify_cost(length) - estimates.wait_cost(estimates.draft_ms(length, drafter))


def _in_process_value(estimates: Estimates, length: int, drafter: str) -> float:
    """Returns the tokens of an in-process chain, minus the worth of its forward, its drafting, and the drafting of the
    next chain: draft workers do not know this one, so they prepare no branch after it."""
    drafting = estimates.tokens_per_ms() * estimates.in_process_ms(length, drafter)
    acceptance = estimates.acceptance_of(drafter)
    next_drafting = estimates.hit_rate() * acceptance.reach(0) * drafting
    return acceptance.expected_tokens(length) - estimates.verify_cost(length) - drafting - next_drafting
