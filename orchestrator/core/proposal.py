"""What a round verifies, where it came from, and what copies of the text add to it: a longer chain, or a tree.

`Proposal`: the chain or tree of one round.

`DraftTrie`: drafts of any origin merged into one tree. A node's mass is the probability that it is accepted: the
product of the odds down to it. The expected tokens of a round are 1 plus the sum of the masses, so the best tree of M
nodes has the M heaviest, which one heap finds; c(M) decides how many. Where nothing else pays, the tree is a chain.

`filled` and `merged`: a drafter's chain, the tokens it ranked next best, and what the text says comes next, in one
proposal. `best_tail`: how much of a copy is worth its rows: expected tokens minus the worth of the time, as in
`proposer`. Copying costs nothing, so a copy may be longer than K. Pure functions of the estimates; nothing is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice, takewhile

from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.policy.estimates import Acceptance, Estimates
from outrider.protocol.messages import Alternatives, Outcome
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import MAX_CHAIN, Origin
from outrider.protocol.trees import ROOT, DraftTree, SparseQ, depths, is_chain, line, spine, united


class ProposalSource(Enum):
    """Where a chain under verification came from."""

    NONE = "none"
    CACHE = "cache"
    DRAFTER = "drafter"
    NGRAM = "ngram"
    HEAD = "head"


_ORIGINS = {ProposalSource.CACHE: Origin.PREPARED, ProposalSource.HEAD: Origin.HEAD}


class Lookup(Enum):
    """What the speculation cache had for the outcome before a round."""

    NONE = "none"
    """It was not asked."""
    HIT = "hit"
    """A branch, served at once."""
    GROWN = "grown"
    """A branch that was waited for to grow."""
    LATE = "late"
    """Nothing when the outcome came; its branch came while it was waited for."""
    MISS = "miss"

    @property
    def found(self) -> bool:
        """There was a branch, at once or late."""
        return self in (Lookup.HIT, Lookup.GROWN, Lookup.LATE)

    @property
    def missed(self) -> bool:
        """There was none when the outcome came."""
        return self in (Lookup.LATE, Lookup.MISS)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the next round verifies after the last committed token.

    The last `copied` tokens are from the text, those before may be a `drafter`'s. `q`: what the chain was drawn from,
    None where nothing was drawn. `autonomous`: the target goes on by itself after it, plainly or, `draft` tokens a
    round, with its own drafter, whose chain comes with the outcome; with tokens beside it that hold with a probability
    of more than `min_prob`. With `draft` and without `autonomous` that is so for one round, and the tokens stand beside
    that chain. With `parents` the tokens are a tree; `by` tells where each is from, if not all are from one place.
    """

    chain: tuple[int, ...] = ()
    source: ProposalSource = ProposalSource.NONE
    lookup: Lookup = Lookup.NONE
    autonomous: bool = False
    copied: int = 0
    q: SparseQ | None = None
    draft: int = 0
    drafter: str = ""
    parents: tuple[int, ...] = ()
    by: tuple[Origin, ...] = ()
    min_prob: float = 1.0

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or a tree's first branch."""
        return tuple(self.chain[node] for node in spine(self.parents)) if self.parents else self.chain

    @property
    def drafter_nodes(self) -> Sequence[int]:
        """The nodes of the drafter's chain."""
        if not self.by:
            return range(len(self.chain) - self.copied)
        return [node for node, origin in enumerate(self.by) if origin is self.origin]

    @property
    def depth(self) -> int:
        """How many tokens may hold at most."""
        return max(depths(self.parents), default=-1) + 1 if self.parents else len(self.chain)

    def nodes(self, outcome: Outcome) -> Sequence[int] | None:
        """Those that hold; None: the outcome is of no such proposal."""
        if outcome.path is None and not self.parents:
            return range(outcome.accepted) if outcome.accepted <= len(self.chain) else None
        path = tuple(range(outcome.accepted)) if outcome.path is None else outcome.path
        if len(path) != outcome.accepted or max(path, default=ROOT) >= len(self.parents):
            return None
        return path if [self.parents[node] for node in path] == [ROOT, *path][: len(path)] else None

    def along(self, nodes: Sequence[int]) -> int:
        """How many of these nodes that hold are of the drafter's chain."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(nodes, self.drafter_nodes, strict=False)))

    def settled(self, outcome: Outcome) -> Proposal:
        """With what was verified: where the target drafted, its own chain, united with what it was sent."""
        if not self.draft:
            return self
        own = DraftTree(outcome.drafted or (), outcome.drafted_parents)
        first = set(spine(own.parents)) if own.parents else range(len(own.tokens))
        by = tuple(self.origin if node in first else Origin.GUESSED for node in range(len(own.tokens)))
        if not self.chain:
            return replace(self, chain=own.tokens, parents=own.parents, by=by if own.parents else ())
        both = united(own, DraftTree(self.chain, self.parents), MAX_CHAIN)
        beside = {place: origin for place, origin in zip(both.places, self.by, strict=True) if place is not None}
        by += tuple(beside[node] for node in range(len(own.tokens), len(both.tokens)))
        return replace(self, chain=both.tokens, parents=both.parents, by=by)

    def again(self) -> Proposal:
        """The round after, which the target makes by itself."""
        return replace(self, chain=(), parents=(), by=(), lookup=Lookup.NONE)

    @property
    def origin(self) -> Origin:
        """Of what a drafter has said of it."""
        return _ORIGINS.get(self.source, Origin.DRAFTED)

    def origins(self, nodes: Sequence[int]) -> tuple[Origin, ...]:
        """Of the tokens of an outcome of which these nodes hold."""
        by = self.by or (self.origin,) * (len(self.chain) - self.copied) + (Origin.COPIED,) * self.copied
        return (*(by[node] for node in nodes), Origin.TARGET)

    def after_wait(self, missed: bool) -> Proposal:
        """Now that a drafter was waited for; `missed`: for a branch that was not there when the outcome came."""
        if missed:
            return replace(self, lookup=Lookup.LATE if self.lookup.found else Lookup.MISS)
        return replace(self, lookup=Lookup.GROWN) if self.lookup is Lookup.HIT else self

    def kind(self, sampling: SamplingParams) -> str:
        """By which rule the target is to verify it (see `Verify`)."""
        if not sampling.is_residual:
            return "coupled"
        return "one-hot" if self.q is None else "sparse"


LARGEST = 32


@dataclass(slots=True)
class DraftNode:
    """A token that may follow those above it, with these odds where they hold."""

    token: int
    odds: float
    by: Origin
    children: dict[int, DraftNode] = field(default_factory=dict)

    def likeliest(self) -> list[tuple[float, DraftNode]]:
        """What may follow it, the likeliest first. Of tokens that exclude each other no more can hold than one."""
        total = max(sum(child.odds for child in self.children.values()), 1.0)
        shares = [(child.odds / total, child) for child in self.children.values()]
        return sorted(shares, key=lambda share: -share[0])


class DraftTrie:
    """What may follow the text by any source; a token that several propose stands once."""

    def __init__(self) -> None:
        self.root = DraftNode(-1, 1.0, Origin.TARGET)

    def add(self, tokens: Sequence[int], odds: Sequence[float], by: Origin, parents: Sequence[int] = ()) -> None:
        """A chain, or with `parents` a tree. What was said before keeps its origin, and the better odds of the two."""
        nodes: list[DraftNode] = []
        for token, own, parent in zip(tokens, odds, parents or line(len(tokens)), strict=True):
            above = nodes[parent] if parent >= 0 else self.root
            known = above.children.setdefault(token, DraftNode(token, own, by))
            known.odds = max(known.odds, own)
            nodes.append(known)

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of these have been said already, from the text on."""
        at, count = self.root, 0
        for token in tokens:
            if token not in at.children:
                break
            at, count = at.children[token], count + 1
        return count


@dataclass(frozen=True, slots=True)
class VerifyTree:
    """A tree as `protocol.trees` has it, its heaviest branch first; (): the parents of a chain.

    `by`: where each token is from. `expects`: the tokens of a round with it, the target's own included.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    by: tuple[Origin, ...] = ()
    expects: float = 1.0


def heaviest(drafts: DraftTrie) -> Iterator[tuple[float, DraftNode, DraftNode]]:
    """Every draft with its mass and what it stands behind, the heaviest first; none comes before those above it."""
    heap: list[tuple[float, int, DraftNode, DraftNode]] = []
    count = 0

    def open_behind(above: DraftNode, mass: float) -> None:
        nonlocal count
        for share, child in above.likeliest():
            heapq.heappush(heap, (-mass * share, count, child, above))
            count += 1

    open_behind(drafts.root, 1.0)
    while heap:
        lost, _, draft, above = heapq.heappop(heap)
        yield -lost, draft, above
        open_behind(draft, -lost)


def grown(
    drafts: DraftTrie, cost: Callable[[int], float], worth: float | None = None, most: int = LARGEST
) -> VerifyTree:
    """The best tree.

    Args:
        cost: what a round with so many rows costs, all told; rows are the nodes and the last committed token.
        worth: the tokens that a unit of that is worth; None: what this round brings in it, so that tokens by time is
            the most, which adds nodes while mass / (1 + E) > dc / c.
        most: nodes.
    """
    found = list(islice(heaviest(drafts), most))
    best, size, expects, total = _value(1.0, cost(1), worth), 0, 1.0, 1.0
    for index, (mass, _, _) in enumerate(found, 1):
        total += mass
        value = _value(total, cost(index + 1), worth)
        if value > best:
            best, size, expects = value, index, total
    return _laid_out(drafts, [draft for _, draft, _ in found[:size]], expects)


def _value(tokens: float, cost: float, worth: float | None) -> float:
    return tokens / cost if worth is None else tokens - worth * cost


def _laid_out(drafts: DraftTrie, chosen: Sequence[DraftNode], expects: float) -> VerifyTree:
    """These drafts in the order of walking down the likeliest branch first."""
    among = {id(draft) for draft in chosen}
    tokens: list[int] = []
    parents: list[int] = []
    by: list[Origin] = []
    todo = [(drafts.root, -1)]
    while todo:
        draft, parent = todo.pop()
        node = -1
        if draft is not drafts.root:
            node = len(tokens)
            tokens.append(draft.token)
            parents.append(parent)
            by.append(draft.by)
        todo += [(child, node) for _, child in reversed(draft.likeliest()) if id(child) in among]
    return VerifyTree(tuple(tokens), () if is_chain(parents) else tuple(parents), tuple(by), expects)


LONGEST_COPY = 12


@dataclass(frozen=True, slots=True)
class CopiedTail:
    """The first `tokens` of a copy, and what they add to a chain: tokens less the worth of their time."""

    tokens: tuple[int, ...] = ()
    gain: float = 0.0


def best_tail(estimates: Estimates, copy: Copy, held: float = 1.0) -> CopiedTail:
    """As much of `copy` as pays behind tokens that all hold with the probability `held`."""
    best, tokens, reach = CopiedTail(), 0.0, held
    acceptance, row = estimates.copied(copy.matched), estimates.tokens_per_ms() * estimates.row_ms()
    for index in range(len(copy.chain)):
        reach *= acceptance.rate(index)
        tokens += reach
        gain = tokens - row * (index + 1)
        if gain > best.gain:
            best = CopiedTail(copy.chain[: index + 1], gain)
    return best


def longest_copy(ngrams: NgramIndex, room: int) -> Copy:
    """What the text says comes next; `room` is for the most tokens that a chain may have."""
    return ngrams.lookup(min(LONGEST_COPY, room))


def copied(tail: CopiedTail) -> Proposal:
    """A chain that is nothing but copied; an empty one is an AR step."""
    source = ProposalSource.NGRAM if tail.tokens else ProposalSource.NONE
    return Proposal(tail.tokens, source, copied=len(tail.tokens))


def filled(
    estimates: Estimates, ngrams: NgramIndex, branch: Proposal, committed: tuple[int, ...], room: int
) -> Proposal:
    """A branch with what the text says after it behind it, or what the text says in its place, if that is worth more.

    Args:
        committed: tokens that the n-grams have not seen yet and the branch follows on.
        room: the most tokens the chain may have.
    """
    longest = min(LONGEST_COPY, room)
    drafted = len(branch.chain)
    after = ngrams.lookup(longest - drafted, (*committed, *branch.chain))
    instead = ngrams.lookup(longest, committed)
    held = estimates.drafted.reach(drafted - 1) if drafted else 1.0
    tail, alone = best_tail(estimates, after, held), best_tail(estimates, instead)
    brings = estimates.drafted.expected_tokens(drafted) - 1.0 + tail.gain
    costs = estimates.tokens_per_ms() * estimates.row_ms() * drafted
    if alone.tokens and alone.gain > brings - costs:
        return replace(copied(alone), lookup=branch.lookup)
    return replace(branch, chain=branch.chain + tail.tokens, copied=len(tail.tokens))


# Beside a chain's token hardly anything holds more often: where a row is worth that many tokens, none are asked for.
DEAREST_ROW = 0.3


def worth_telling(estimates: Estimates, takes_trees: bool) -> float:
    """How probable a token is that is worth telling beside a drafter's chain; 1: none is."""
    row = estimates.tokens_per_ms() * estimates.row_ms()
    return row if takes_trees and row < DEAREST_ROW else 1.0


def merged(
    estimates: Estimates,
    ngrams: NgramIndex,
    branch: Proposal,
    committed: tuple[int, ...],
    room: int,
    beside: Alternatives | None = None,
) -> Proposal | None:
    """The best tree of them; None: there is nothing to merge.

    Args:
        committed: tokens that the n-grams have not seen yet and the branch follows on.
        room: the most tokens that may hold.
        beside: what the drafter thought next best beside its chain's tokens.
    """
    chain, longest = branch.chain, min(LONGEST_COPY, room)
    instead = Copy() if ngrams.is_empty else ngrams.lookup(longest, committed)
    forks = bool(instead.chain) and chain[: len(instead.chain)] != instead.chain[: len(chain)]
    if not chain or not (forks or beside is not None):
        return None
    drafts = DraftTrie()
    drafts.add(chain, [estimates.drafted.rate(place) for place in range(len(chain))], branch.origin)
    if beside is not None:
        _put_beside(drafts, chain, beside)
    if forks:
        put_copy(drafts, instead, estimates.alternatives(instead.matched))
    after = _after(ngrams, branch, committed, longest)
    tail = best_tail(estimates, after, estimates.drafted.reach(len(chain) - 1)).tokens
    rates = [estimates.copied(after.matched).rate(place) for place in range(len(tail))]
    drafts.add((*chain, *tail), [*[0.0] * len(chain), *rates], Origin.COPIED)
    worth = None if estimates.active == 1 else estimates.tokens_per_ms()
    fixed = estimates.turnaround_ms()
    tree = grown(drafts, lambda rows: fixed + estimates.verify_ms(rows), worth)
    if not tree.parents:
        return None
    copied = tree.by.count(Origin.COPIED)
    return replace(branch, chain=tree.tokens, parents=tree.parents, by=tree.by, copied=copied)


def put_copy(drafts: DraftTrie, copy: Copy, holds: Acceptance) -> None:
    """What the text says comes next; its tokens hold so well from where no other source has them."""
    shared = drafts.shared(copy.chain)
    drafts.add(copy.chain, [holds.rate(max(place - shared, 0)) for place in range(len(copy.chain))], Origin.COPIED)


def beside_own(estimates: Estimates, copy: Copy, drafter: str, depth: int) -> tuple[int, ...]:
    """As much of `copy` as pays beside `depth` tokens that a drafter of the target's process has yet to say.

    They are taken to be right independently of each other, and a token that both say costs one row.
    """
    own, copies, row = estimates.holding(drafter), estimates.copied(copy.matched), estimates.row_ms()
    reach, gain, best, count = 1.0, 0.0, 0.0, 0
    for place in range(len(copy.chain)):
        reach *= copies.rate(place)
        both = reach * own.reach(place) if place < depth else 0.0
        gain += reach - both - estimates.tokens_per_ms() * row * (1.0 - both)
        if gain > best:
            best, count = gain, place + 1
    return copy.chain[:count]


def unites(estimates: Estimates, drafter: str, depth: int) -> bool:
    """Whether an own drafter's tokens pay beside a branch of `depth`, with their drafting and their rows.

    As in `beside_own`; what both say costs no row.
    """
    own, ahead, worth = estimates.holding(drafter), estimates.drafted, estimates.tokens_per_ms()
    gain = -worth * estimates.in_process_ms(depth, drafter)
    for place in range(depth):
        both = own.reach(place) * ahead.reach(place)
        gain += own.reach(place) - both - worth * estimates.row_ms() * (1.0 - both)
    return gain > 0.0


def _after(ngrams: NgramIndex, branch: Proposal, committed: tuple[int, ...], longest: int) -> Copy:
    """What the text says comes after the branch."""
    return Copy() if ngrams.is_empty else ngrams.lookup(longest - len(branch.chain), (*committed, *branch.chain))


def _put_beside(drafts: DraftTrie, chain: tuple[int, ...], beside: Alternatives) -> None:
    """Behind what is left of the chain."""
    for token, parent, odds in zip(beside.tokens, beside.parents, beside.odds, strict=True):
        if parent < len(chain):
            above = chain[: parent + 1]
            drafts.add((*above, token), [*[0.0] * len(above), odds], Origin.GUESSED, line(len(above) + 1))
