"""Continuations that a drafter proposes: a chain, or a tree of a chain and alternatives to its tokens.

An alternative to token k of a chain covers one outcome (k, t). `fan_out.Calibration` estimates the probabilities. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from outrider.drafters.fan_out import Calibration, ForkPoint
from outrider.engine.tree_feed import Candidate
from outrider.protocol.messages import Alternatives
from outrider.protocol.schema import MAX_BESIDE
from outrider.protocol.trees import DraftTree, SparseQ, line, spine


@dataclass(frozen=True, slots=True)
class Continuation:
    """The proposal for the committed text, and the distributions that it was drawn from, if it was.

    With `parents` the tokens are a tree (`protocol.trees`), whose first branch is the drafter's chain. `odds` holds the
    probability that each token is accepted if the one before it is; (): not known.
    """

    chain: tuple[int, ...] = ()
    q: SparseQ | None = None
    parents: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()

    @classmethod
    def of(cls, tree: DraftTree) -> Continuation:
        return cls(tree.tokens, None, tree.parents, tree.odds)

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.chain, self.parents, self.odds)

    @property
    def line(self) -> tuple[int, ...]:
        """The chain, or the first branch of the tree."""
        return tuple(self.chain[node] for node in spine(self.parents)) if self.parents else self.chain

    @property
    def alternatives(self) -> Alternatives | None:
        """The alternatives of a tree, whose nodes begin with the first branch."""
        count = len(spine(self.parents))
        return Alternatives(self.chain[count:], self.parents[count:], self.odds[count:]) if self.parents else None


WIDTH = 3
"""The most tokens that may follow a token: the chain's own and its alternatives."""


@dataclass(frozen=True, slots=True)
class AlternativesAt:
    """The alternatives at one position of a chain, best first, and their gaps."""

    others: tuple[int, ...]
    point: ForkPoint

    @classmethod
    def of(cls, token: int, candidates: Sequence[Candidate]) -> AlternativesAt:
        """Returns the alternatives to the chain's `token`, given the `candidates` at its position, best first."""
        others = [candidate for candidate in candidates if candidate.token != token]
        gaps = tuple(candidate.gap for candidate in others)
        own_gap = next((candidate.gap for candidate in candidates if candidate.token == token), 0.0)
        return cls(tuple(candidate.token for candidate in others), ForkPoint(gaps[0] - own_gap if gaps else None, gaps))


def worthwhile(count: int, calibration: Calibration, least: float) -> int:
    """Returns for how many of a chain's first tokens an alternative can have a probability of more than `least`."""
    mass, worth = 1.0, 0
    for position in range(count):
        rate = calibration.acceptance(position)
        if mass * (1.0 - rate) > least:
            worth = position + 1
        mass *= rate
    return worth


def with_alternatives(
    chain: Sequence[int], places: Sequence[AlternativesAt], calibration: Calibration, least: float
) -> DraftTree:
    """Returns a tree of the chain, then the alternatives with a probability of more than `least`, by position."""
    tokens, parents, odds = list(chain), list(line(len(chain))), [0.0] * len(chain)
    mass = 1.0
    for index, place in enumerate(places):
        odds[index] = rate = calibration.acceptance(index, place.point.own_gap)
        for rank, token in enumerate(place.others[: WIDTH - 1]):
            share = (1.0 - rate) * calibration.bonus_share(False, rank, place.point)
            if mass * share > least and len(tokens) - len(chain) < MAX_BESIDE:
                tokens.append(token)
                parents.append(index - 1)
                odds.append(share)
        mass *= rate
    return DraftTree(tuple(tokens), tuple(parents) if len(tokens) > len(chain) else (), tuple(odds))


@dataclass(frozen=True, slots=True)
class ChainAlternatives:
    """A chain and the alternatives at each of its positions."""

    chain: tuple[int, ...]
    places: Sequence[AlternativesAt]

    def tree(self, calibration: Calibration, least: float) -> DraftTree:
        """See `with_alternatives`."""
        return with_alternatives(self.chain, self.places, calibration, least)

    def teach(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """Updates the calibration by the tokens that became final."""
        accepted = common(self.chain, tokens[:-1])
        points = [place.point for place in self.places[: accepted + 1]]
        others = self.places[accepted].others if accepted < len(self.places) else ()
        calibration.learn(points, len(self.chain), accepted, rank(others, tokens[accepted]))


def common(chain: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chain, tokens, strict=False)))


def rank(tokens: Sequence[int], token: int) -> int | None:
    """Returns the token's index; None: it is not there."""
    return tokens.index(token) if token in tokens else None
