"""The tree that a round verifies: drafts of any origin merged, the likeliest nodes first, as many as pay.

A node's mass is the probability that it holds: the product of the odds down to it, each that a token holds where those
before it do. The expected tokens of a round are 1 and the sum of the masses, so the best tree of M nodes is the M
heaviest ones, found with one heap; how many, c(M) decides. A chain is what comes of it where nothing else pays. Pure;
knows tokens and numbers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outrider.protocol.origins import Origin
from outrider.protocol.trees import is_chain, line

LARGEST = 32


@dataclass(slots=True)
class Draft:
    """A token that may follow those above it, with these odds where they hold."""

    token: int
    odds: float
    by: Origin
    children: dict[int, Draft] = field(default_factory=dict)

    def likeliest(self) -> list[tuple[float, Draft]]:
        """What may follow it, the likeliest first. Of tokens that exclude each other no more can hold than one."""
        total = max(sum(child.odds for child in self.children.values()), 1.0)
        shares = [(child.odds / total, child) for child in self.children.values()]
        return sorted(shares, key=lambda share: -share[0])


class Drafts:
    """What may follow the text by all who have said something; a token that several said stands once."""

    def __init__(self) -> None:
        self.root = Draft(-1, 1.0, Origin.TARGET)

    def add(self, tokens: Sequence[int], odds: Sequence[float], by: Origin, parents: Sequence[int] = ()) -> None:
        """A chain, or with `parents` a tree. What was said before keeps its origin, and the better odds of the two."""
        nodes: list[Draft] = []
        for token, own, parent in zip(tokens, odds, parents or line(len(tokens)), strict=True):
            above = nodes[parent] if parent >= 0 else self.root
            known = above.children.setdefault(token, Draft(token, own, by))
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
class Grown:
    """A tree as `protocol.trees` has it, its heaviest branch first; (): the parents of a chain.

    `by`: where each token is from. `expects`: the tokens of a round with it, the target's own included.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    by: tuple[Origin, ...] = ()
    expects: float = 1.0


def heaviest(drafts: Drafts) -> Iterator[tuple[float, Draft, Draft]]:
    """Every draft with its mass and what it stands behind, the heaviest first; none comes before those above it."""
    heap: list[tuple[float, int, Draft, Draft]] = []
    count = 0

    def open_behind(above: Draft, mass: float) -> None:
        nonlocal count
        for share, child in above.likeliest():
            heapq.heappush(heap, (-mass * share, count, child, above))
            count += 1

    open_behind(drafts.root, 1.0)
    while heap:
        lost, _, draft, above = heapq.heappop(heap)
        yield -lost, draft, above
        open_behind(draft, -lost)


def grown(drafts: Drafts, cost: Callable[[int], float], worth: float | None = None, most: int = LARGEST) -> Grown:
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


def _laid_out(drafts: Drafts, chosen: Sequence[Draft], expects: float) -> Grown:
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
    return Grown(tuple(tokens), () if is_chain(parents) else tuple(parents), tuple(by), expects)
