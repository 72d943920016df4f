"""The tree that a round verifies: drafts of any origin merged with copies, the likeliest nodes first, as many as
pay.

A node's mass is the probability that it holds: the product of the odds down to it, each that a token holds where those
before it do. The expected tokens of a round are 1 and the sum of the masses, so the best tree of M nodes is the M
heaviest ones, found with one heap; how many, c(M) decides. A chain is what comes of it where nothing else pays. Pure;
knows tokens and numbers only.

`worth_telling`: a drafter's chain, what it thought next best, and what the text says comes next, merged in one tree.
Where all of them agree there is nothing to merge, and a chain is filled as ever (`copies`). Pure functions of the
estimates; sends nothing.

`CopiedTail`: where a chain copied from the text is worth its rows: expected tokens minus the worth of the time, as in
`proposer`. Pure functions of the estimates. Copying costs nothing, so a copy may be longer than K.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.policy.acceptance import Acceptance
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposals.proposal import Proposal, ProposalSource
from outrider.protocol.messages import Alternatives
from outrider.protocol.schema import Origin
from outrider.protocol.trees import is_chain, line

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
    """What may follow the text by all who have said something; a token that several said stands once."""

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


# Beside a chain's token hardly anything holds more often: where a row is worth that many tokens nobody is asked.
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
    """What the text says comes next, whose tokens hold so well from where nobody else has said them."""
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
