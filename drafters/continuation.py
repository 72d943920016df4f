"""What a drafter proposes: a chain, or a tree that also has the next best tokens beside the chain's.

A token beside token k of a chain covers one outcome (k, t). `fan_out.Calibration` estimates the probabilities. Pure.
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
    """What follows the committed text, and what it was drawn from, if it was.

    With `parents` its tokens are a tree (`protocol.trees`), its first branch what the drafter would say as a chain.
    `odds`: of each token, that it holds where the one before it does; (): the drafter does not say.
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
        """The chain, or the tree's first branch."""
        return tuple(self.chain[node] for node in spine(self.parents)) if self.parents else self.chain

    @property
    def alternatives(self) -> Alternatives | None:
        """Of a tree whose first branch comes first what stands beside that."""
        count = len(spine(self.parents))
        return Alternatives(self.chain[count:], self.parents[count:], self.odds[count:]) if self.parents else None


WIDTH = 3
"""So many may follow a token: the chain's own and those beside it."""


@dataclass(frozen=True, slots=True)
class AlternativesAt:
    """What the drafter thinks of one place of a chain: tokens beside the chain's, best first, and how they compare."""

    others: tuple[int, ...]
    point: ForkPoint

    @classmethod
    def of(cls, token: int, candidates: Sequence[Candidate]) -> AlternativesAt:
        """`candidates` of the place, the best first; the chain's `token` may be among them."""
        others = [candidate for candidate in candidates if candidate.token != token]
        gaps = tuple(candidate.gap for candidate in others)
        own = next((candidate.gap for candidate in candidates if candidate.token == token), 0.0)
        return cls(tuple(candidate.token for candidate in others), ForkPoint(gaps[0] - own if gaps else None, gaps))


def worthwhile(count: int, calibration: Calibration, least: float) -> int:
    """Beside how many of a chain's first tokens anything can hold with a probability of more than `least`."""
    mass, worth = 1.0, 0
    for place in range(count):
        holds = calibration.acceptance(place)
        if mass * (1.0 - holds) > least:
            worth = place + 1
        mass *= holds
    return worth


def with_alternatives(
    chain: Sequence[int], places: Sequence[AlternativesAt], calibration: Calibration, least: float
) -> DraftTree:
    """The chain, then the tokens beside it that hold with a probability of more than `least`, place by place."""
    tokens, parents, odds = list(chain), list(line(len(chain))), [0.0] * len(chain)
    mass = 1.0
    for index, place in enumerate(places):
        odds[index] = holds = calibration.acceptance(index, place.point.own_gap)
        for rank, token in enumerate(place.others[: WIDTH - 1]):
            share = (1.0 - holds) * calibration.bonus_share(False, rank, place.point)
            if mass * share > least and len(tokens) - len(chain) < MAX_BESIDE:
                tokens.append(token)
                parents.append(index - 1)
                odds.append(share)
        mass *= holds
    return DraftTree(tuple(tokens), tuple(parents) if len(tokens) > len(chain) else (), tuple(odds))


@dataclass(frozen=True, slots=True)
class ChainAlternatives:
    """A chain, and what was thought at each of its places."""

    chain: tuple[int, ...]
    places: Sequence[AlternativesAt]

    def tree(self, calibration: Calibration, least: float) -> DraftTree:
        """See `with_alternatives`."""
        return with_alternatives(self.chain, self.places, calibration, least)

    def teach(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """What became final instead."""
        accepted = common(self.chain, tokens[:-1])
        points = [place.point for place in self.places[: accepted + 1]]
        others = self.places[accepted].others if accepted < len(self.places) else ()
        calibration.learn(points, len(self.chain), accepted, rank(others, tokens[accepted]))


def common(chain: Sequence[int], tokens: Sequence[int]) -> int:
    """With how many of the same tokens both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chain, tokens, strict=False)))


def rank(tokens: Sequence[int], token: int) -> int | None:
    """Where it stands among them; None: it is not there."""
    return tokens.index(token) if token in tokens else None
