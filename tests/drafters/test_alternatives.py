"""A drafter's next best tokens are added to its chain if they are likely enough by the learned odds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from outrider.drafters.fan_out import Calibration, ForkPoint
from outrider.drafters.growth import MAX_CHILDREN, ChainAlternatives, count_worthwhile_positions
from outrider.protocol.trees import Candidate, tree_fault

CLOSE = [Candidate(5, 0.0), Candidate(6, 0.1), Candidate(7, 0.2), Candidate(8, 0.3)]
SURE = [Candidate(5, 0.0), Candidate(6, 11.0), Candidate(7, 12.0)]


def chain_of_fives(*found: list[Candidate]) -> ChainAlternatives:
    return ChainAlternatives.of([5] * len(found), found)


def test_alternatives_are_added_where_the_drafter_is_unsure() -> None:
    tree = chain_of_fives(SURE, CLOSE).tree(Calibration(), 0.05)
    assert tree.chain[:2] == (5, 5) and set(tree.chain[2:]) <= {6, 7} and tree.chain[2:]
    assert set(tree.parents[2:]) == {0} and not tree_fault(tree.chain, tree.parents)
    assert len(tree.odds) == len(tree.chain) and sum(tree.odds[1:]) <= 1.0


def test_chain_stays_a_chain_when_no_alternative_is_likely() -> None:
    tree = chain_of_fives(SURE, CLOSE).tree(Calibration(), 0.9)
    assert (tree.chain, tree.parents) == ((5, 5), ())
    assert (
        count_worthwhile_positions(4, Calibration(), 0.9) == 0 < count_worthwhile_positions(4, Calibration(), 0.1) <= 4
    )


def test_number_of_alternatives_is_limited() -> None:
    tree = chain_of_fives(*[CLOSE] * 40).tree(Calibration(), 0.0)
    assert len(tree.chain) == 40 + 16 and max(tree.parents.count(node) for node in range(40)) <= MAX_CHILDREN


def test_token_of_the_chain_is_never_its_own_alternative() -> None:
    point = ForkPoint.of(6, CLOSE)
    assert 6 not in point.others and point.own_gap == pytest.approx(-0.1)


def test_a_token_without_alternatives_is_sure() -> None:
    """Such as when a grammar or a filter allows no other token."""
    (odds,) = chain_of_fives([Candidate(5, 0.0)]).tree(Calibration(), 1.0).odds
    assert odds == Calibration().acceptance(0, math.inf)


def test_learned_rate_decides_the_odds(make_point: Callable[[float], ForkPoint]) -> None:
    taught = Calibration()
    for _ in range(200):
        taught.learn([make_point(0.1)], 1, 0, 0)
    odds = ChainAlternatives((5,), [make_point(0.1)]).tree(taught, 0.01).odds
    assert odds[0] < 0.1 and odds[1] > 0.8


@pytest.fixture
def make_point() -> Callable[[float], ForkPoint]:
    return lambda gap: ForkPoint.of(5, [Candidate(5, 0.0), Candidate(6, gap)])
