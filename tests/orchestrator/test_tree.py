"""The best tree of several proposals contains their likeliest nodes, as many as pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import (
    DraftTrie,
    Lookup,
    Proposal,
    merge_into_tree,
    min_alternative_prob,
)
from outrider.protocol.messages import Alternatives, Outcome, Span
from outrider.protocol.ngrams import NgramIndex
from outrider.protocol.schema import Origin
from outrider.protocol.trees import token_paths, tree_fault
from tests.orchestrator.test_copies import estimates


def flat(rows: int) -> float:
    return 1.0 + 0.01 * (rows - 1)


def steep(rows: int) -> float:
    """The relative cost of rows on an M3 Ultra with 4-bit weights."""
    return {1: 1.0, 2: 1.83, 3: 2.6, 4: 3.26}.get(rows, 3.26 + 0.71 * (rows - 4))


def make_trie(*odds: float) -> DraftTrie:
    drafts = DraftTrie()
    drafts.add(range(10, 10 + len(odds)), odds, Origin.PREPARED)
    return drafts


def tokens(drafts: DraftTrie, nodes: Sequence[int]) -> list[int]:
    return [drafts.tokens[node] for node in nodes]


def parents(drafts: DraftTrie, nodes: Sequence[int]) -> list[int]:
    return [nodes.index(drafts.parents[node]) if drafts.parents[node] >= 0 else -1 for node in nodes]


def expected_tokens(drafts: DraftTrie, nodes: Sequence[int]) -> float:
    """Returns the expected tokens of a round, including the bonus token."""
    masses = drafts.masses()
    return 1.0 + sum(masses[node] for node in nodes)


def test_single_chain_grows_into_a_chain() -> None:
    drafts = make_trie(0.9, 0.8, 0.7)
    assert drafts.best(flat) == [0, 1, 2]
    assert expected_tokens(drafts, [0, 1, 2]) == pytest.approx(1 + 0.9 + 0.72 + 0.504)
    assert drafts.by == [Origin.PREPARED] * 3


def test_rows_that_do_not_pay_are_left_out() -> None:
    assert make_trie(0.9, 0.8, 0.7).best(steep) == [0]
    assert make_trie(0.7, 0.5).best(steep) == []
    assert make_trie(0.9, 0.8, 0.05).best(flat, worth=6.0) == [0, 1]


def test_tree_fills_the_rows_up_to_a_cost_step() -> None:
    """If more rows cost nothing up to the end of a tile of rows, a tree fills the tile."""
    drafts = make_trie(0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
    assert len(drafts.best(lambda rows: 1.0 if rows <= 4 else 4.0)) == 3
    assert len(drafts.best(lambda rows: 1.0 if rows <= 8 else 4.0)) == 7


def test_shared_prefixes_are_merged_and_the_rest_branches() -> None:
    drafts = make_trie(0.6, 0.7, 0.7)
    drafts.add((10, 5, 6), (0.3, 0.25, 0.9), Origin.COPIED)
    drafts.add((4,), (0.35,), Origin.GUESSED)
    nodes = drafts.best(flat)
    tree = tokens(drafts, nodes), parents(drafts, nodes)
    assert not tree_fault(*tree)
    assert token_paths(*tree) == [[10], [10, 11], [10, 11, 12], [10, 5], [10, 5, 6], [4]]
    assert [drafts.by[node] for node in nodes] == [Origin.PREPARED] * 3 + [Origin.COPIED] * 2 + [Origin.GUESSED]


def test_exclusive_tokens_add_at_most_one_expected_token() -> None:
    drafts = make_trie(0.8)
    drafts.add((5,), (0.8,), Origin.COPIED)
    assert expected_tokens(drafts, drafts.best(flat)) == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(5))
def test_grown_tree_is_the_best_of_its_size(seed: int) -> None:
    """Compared with all trees of each size."""
    draws, drafts = random.Random(seed), DraftTrie()
    for _ in range(3):
        chain = [draws.randrange(3) for _ in range(3)]
        drafts.add(chain, [draws.uniform(0.05, 0.3) for _ in chain], Origin.DRAFTED)
    whole = drafts.best(lambda rows: 1.0)
    nodes = {tuple(down): node for node, down in enumerate(token_paths(drafts.tokens, drafts.parents))}
    masses = drafts.masses()
    assert len(whole) == len(masses)
    for size in range(1, len(masses) + 1):
        best = max(
            sum(masses[nodes[down]] for down in chosen)
            for chosen in combinations(nodes, size)
            if all(down[:-1] in chosen or len(down) == 1 for down in chosen)
        )
        assert expected_tokens(drafts, drafts.best(lambda rows: 1.0, most=size)) == pytest.approx(1.0 + best)


def hit(*chain: int) -> Proposal:
    return Proposal(chain, Origin.PREPARED, Lookup.HIT, drafter="draft-0")


def test_differing_copy_is_added_beside_the_branch() -> None:
    known, ngrams = estimates(), NgramIndex((1, 2, 3, 4, 5, 6, 7, 1, 2))
    for _ in range(50):
        known.alternatives.add(ngrams.lookup(4), (3, 4, 5, 6))
    found = merge_into_tree(known, ngrams, hit(3, 9, 9), (), max_chain_tokens=50)
    assert found is not None and found.lookup is Lookup.HIT and found.drafter == "draft-0"
    assert [3, 9, 9] in token_paths(found.chain, found.parents) and [3, 4, 5, 6] in token_paths(
        found.chain, found.parents
    )
    assert found.by.count(Origin.PREPARED) == len(found.drafter_nodes) == 3
    assert [found.chain[node] for node in found.drafter_nodes] == [3, 9, 9]


def test_merged_is_none_if_proposals_agree_or_rows_are_costly() -> None:
    ngrams = NgramIndex((1, 2, 3, 4, 5, 6, 7, 1, 2))
    assert merge_into_tree(estimates(), ngrams, hit(3, 4, 5), (), max_chain_tokens=50) is None
    assert merge_into_tree(estimates(), ngrams, hit(), (), max_chain_tokens=50) is None
    costly = estimates(row_ms=9.0, drafted=1)
    assert merge_into_tree(costly, ngrams, hit(8), (), max_chain_tokens=50) is None
    assert min_alternative_prob(costly, True) == 1.0 and min_alternative_prob(estimates(), False) == 1.0
    assert 0.0 < min_alternative_prob(estimates(row_ms=0.1), True) < 0.3


def test_alternatives_of_the_drafter_are_added_beside_its_tokens() -> None:
    beside = Alternatives((7, 8, 6), (-1, 0, 2), (0.5, 0.5, 0.5))
    found = merge_into_tree(estimates(), NgramIndex(), hit(3, 4), (), max_chain_tokens=50, alternatives=beside)
    assert found is not None and Origin.GUESSED in found.by
    assert [7] in token_paths(found.chain, found.parents) and [3, 8] in token_paths(found.chain, found.parents)
    assert 6 not in found.chain, "the node before it was cut off"


def test_alternative_after_a_cut_chain_fits_the_remaining_room() -> None:
    beside_and_behind = Alternatives((7, 6), (0, 1), (0.5, 0.9))
    for room in (2, 3):
        found = merge_into_tree(estimates(), NgramIndex(), hit(3, 4), (), room, beside_and_behind)
        assert found is not None and found.depth == room


def test_tree_depth_fits_the_remaining_room() -> None:
    known, ngrams = estimates(), NgramIndex((1, 2, 3, 4, 5, 6, 7, 1, 2))
    for _ in range(50):
        known.alternatives.add(ngrams.lookup(4), (3, 4, 5, 6))
    for max_chain_tokens in (2, 3, 4):
        found = merge_into_tree(known, ngrams, hit(9, 9), (), max_chain_tokens=max_chain_tokens)
        assert found is not None and found.depth == max_chain_tokens


def test_tokens_of_a_replaced_chain_count_as_accepted_if_the_copy_has_them() -> None:
    copy = Proposal((3, 4, 5, 6), Origin.COPIED, Lookup.HIT, offered=(3, 4, 9))
    assert [copy.count_on_chain(range(count)) for count in range(5)] == [0, 1, 2, 2, 2]


def test_tree_outcome_identifies_the_accepted_path() -> None:
    tree = Proposal(
        (3, 9, 4, 5), Origin.PREPARED, parents=(-1, 0, 0, 2), by=(Origin.PREPARED,) * 2 + (Origin.COPIED,) * 2
    )

    def outcome(accepted: int, path: tuple[int, ...] | None = None) -> Outcome:
        return Outcome("r", 0, 1, 9, accepted, 7, Span(0, 1), path=path)

    assert tree.nodes(outcome(2)) == (0, 1) and tree.nodes(outcome(3, (0, 2, 3))) == (0, 2, 3)
    assert tree.origins((0, 2, 3)) == (Origin.PREPARED, Origin.COPIED, Origin.COPIED, Origin.TARGET)
    assert tree.count_on_chain((0, 2, 3)) == 1 and tree.depth == 3 and tree.line == (3, 9)
    for wrong in (outcome(3), outcome(2, (0,)), outcome(1, (2,)), outcome(2, (0, 4)), outcome(2, (1, 0))):
        assert tree.nodes(wrong) is None
    assert Proposal((3, 9)).nodes(outcome(2)) == range(2) and Proposal((3, 9)).nodes(outcome(3)) is None


def test_contradicted_copies_have_their_own_acceptance_rate() -> None:
    found = Estimates()
    copy = NgramIndex((1, 2, 3, 4, 5, 1, 2)).lookup(3)
    before = found.copied.rate(copy.evidence, 0)
    for _ in range(30):
        found.alternatives.add(copy, (9,))
    assert found.alternatives.rate(copy.evidence, 0) < 0.05 and found.copied.rate(copy.evidence, 0) == before
