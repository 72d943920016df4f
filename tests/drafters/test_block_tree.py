"""Trees of block heads: blocks with known prefixes equal an independent forward, and extend themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.fan_out import FAN_OUT_POLICIES, Calibration
from outrider.drafters.growth import BranchTask
from outrider.drafters.heads.dflash import DFlash
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.trees import BlockTree
from outrider.drafters.work_ahead import WorkAhead
from outrider.engine.noise import gumbel
from outrider.engine.tree import Tree
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import TreeFeed
from tests.columns import column_tokens
from tests.drafters.dflash_heads import NumpyHead, write
from tests.drafters.dflash_layouts import BLOCK, LAYOUTS, V
from tests.drafters.test_dflash import EMBEDDING, OUTPUT, ROWS, TEXTS, head_of
from tests.drafting import advance, draft_chain


def open_tree(head: DFlash, length: int, n: int = 0, drafter: HeadDrafter | None = None, **params: Any) -> BlockTree:
    """A tree that has read the first `length` tokens of text `n` and all features of their context."""
    drafter = drafter or HeadDrafter(head, V)
    text = TEXTS[n][:length].tolist()
    tree = drafter.open(text, SamplingParams(**params))
    assert isinstance(tree, BlockTree)
    add_features(tree, head, 0, length - 1, n)
    assert tree.read(text) == length
    return tree


def add_features(tree: BlockTree, head: DFlash, begin: int, end: int, n: int = 0) -> None:
    tree.add_features(begin, np.array(head.fuse(mx.array(ROWS[n][begin:end]))))


def check_scores(scores: mx.array, logits: np.ndarray[Any, Any]) -> None:
    """Checks that scores and logits are equal up to a constant."""
    own = np.array(scores)
    known = np.isfinite(logits)
    assert (np.isfinite(own) == known).all()
    np.testing.assert_allclose(own[known] - own[known].max(), logits[known] - logits[known].max(), atol=3e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_block_with_a_known_prefix_equals_an_independent_forward(tmp_path: Path, name: str) -> None:
    """Outcomes of two texts, after prefixes of several lengths, in one forward; then along each block's own tokens."""
    head, truth = head_of(write(tmp_path, name)), NumpyHead(LAYOUTS[name], EMBEDDING, OUTPUT)
    drafter, lengths = HeadDrafter(head, V), (9, 30)
    trees = [open_tree(head, length, n, drafter) for n, length in enumerate(lengths)]
    feeds = []
    for tree in trees:
        at = tree.next_node
        feeds.append(TreeFeed([tree.root, at, tree.root, at + 1], [11, 12, 13, 14], [1, 1, 3, 2]))
    nodes = Tree.feed_together(trees, feeds)
    paths = ([11], [11, 12], [13], [11, 12, 14])
    wanted = (1, 1, 3, 2)
    for n, tree in enumerate(trees):
        features = truth.fuse(ROWS[n][: lengths[n] - 1])
        last = int(TEXTS[n][lengths[n] - 1])
        for node, path, count in zip(nodes[n], paths, wanted, strict=True):
            hidden = truth.hidden(features, [last, *path], count)
            check_scores(tree.scores(node), truth.scores_after(path[-1], hidden[0]))
            before = node
            for slot in hidden[1:]:
                (token,) = tree.best([before])
                (before,) = tree.feed([before], [None])
                check_scores(tree.scores(before), truth.scores_after(token, slot))


def test_own_choices_of_a_block_cost_no_forward_until_the_block_ends(tmp_path: Path) -> None:
    head, truth = head_of(write(tmp_path, "z-lab")), NumpyHead(LAYOUTS["z-lab"], EMBEDDING, OUTPUT)
    tree = open_tree(head, 20)
    (bonus,) = tree.feed([tree.root], [7])
    forwards: list[int] = []
    block = DFlash.block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlash, "block", lambda *given: forwards.append(given[1].shape[1]) or block(*given))
        (node,) = tree.feed([bonus], [None])
        (node,) = tree.feed([node], [None])
        assert forwards == []
        (token,) = tree.best([bonus])
        assert tree.child(bonus, token, given=False) is not None and tree.child(bonus, token) is None
        ((short,),) = Tree.feed_together([tree], [TreeFeed([tree.root], [8], [1])])
        (node,) = tree.feed([short], [None])
    assert forwards == [3, BLOCK]  # the anchor, 8 and a mask; then the anchor, 8, what it chose, and masks to the end
    features, last = truth.fuse(ROWS[0][:19]), int(TEXTS[0][19])
    known = [last, 8, *tree.best([short])]
    check_scores(tree.scores(node), truth.logits(truth.hidden(features, known, BLOCK - 3))[0])


@pytest.mark.parametrize("name", ["z-lab", "DeepSpec"])
def test_late_rows_replace_nodes_computed_without_them(tmp_path: Path, name: str) -> None:
    head, truth = head_of(write(tmp_path, name)), NumpyHead(LAYOUTS[name], EMBEDDING, OUTPUT)
    text = TEXTS[0].tolist()
    tree = open_tree(head, 20)
    nodes = tree.feed([tree.root, tree.next_node, tree.next_node + 1], text[20:23])
    add_features(tree, head, 18, 21)  # the last two are new
    assert [tree.child(node, token) for node, token in zip([tree.root, *nodes], text[20:23], strict=False)] == [
        None
    ] * 3
    again = tree.feed([tree.root, tree.next_node, tree.next_node + 1], text[20:23])
    features = truth.fuse(ROWS[0][:21])
    for node, anchor, known in zip(again, (20, 21, 21), (text[20:21], text[21:22], text[21:23]), strict=True):
        hidden = truth.hidden(features[:anchor], known, head.depth - len(known) + 1)
        check_scores(tree.scores(node), truth.scores_after(known[-1], hidden[0]))
    assert [tree.child(node, token) for node, token in zip([tree.root, *again], text[20:23], strict=False)] == again
    tree.commit(again[:2])
    assert column_tokens(tree) == text[:22] and tree.child(again[1], text[22]) == again[2]


def test_missing_rows_leave_a_gap_in_the_context(tmp_path: Path) -> None:
    head, truth = head_of(write(tmp_path, "z-lab")), NumpyHead(LAYOUTS["z-lab"], EMBEDDING, OUTPUT)
    text = TEXTS[0][:20].tolist()
    tree = HeadDrafter(head, V).open(text, SamplingParams())
    assert isinstance(tree, BlockTree)
    add_features(tree, head, 3, 9)
    assert tree.can_read(20) and tree.read(text) == 10
    assert not tree.can_grow() and not tree.can_read(10)
    add_features(tree, head, 12, 19)
    assert tree.read(text[10:]) == 10 and tree.can_grow()
    places = np.array([*range(3, 9), *range(12, 19)])
    hidden = truth.hidden(truth.fuse(ROWS[0][places]), int(TEXTS[0][19]), BLOCK - 1, places, 19)
    check_scores(tree.scores(tree.root), truth.logits(hidden)[0])


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_block_tokens_are_drawn_with_the_targets_noise(tmp_path: Path, temp: float) -> None:
    head, truth = head_of(write(tmp_path, "DeepSpec")), NumpyHead(LAYOUTS["DeepSpec"], EMBEDDING, OUTPUT)
    tree = open_tree(head, 20, temp=temp, seed=5)
    (node,) = tree.feed([tree.root], [9])
    features, last = truth.fuse(ROWS[0][:19]), int(TEXTS[0][19])
    hidden = truth.hidden(features, [last, 9], BLOCK - 1)
    before = 9
    for slot, vector in enumerate(hidden[:3]):
        noise = gumbel(np, 5, [21 + slot], V)[0] if temp else 0.0
        before = int(truth.scores_after(before, vector, noise, temp or 1.0).argmax())
        assert tree.best([node]) == [before]
        (node,) = tree.feed([node], [None])


def test_penalties_count_earlier_tokens_of_the_block(tmp_path: Path) -> None:
    tree = open_tree(head_of(write(tmp_path, "DeepSpec")), 10, repetition_penalty=50.0)
    chain = draft_chain(WorkAhead(tree, (), FAN_OUT_POLICIES["best-first"], Calibration()), BLOCK).chain
    assert len(set(chain) - set(TEXTS[0][:10].tolist())) == BLOCK


@pytest.mark.parametrize("name", ["z-lab", "DeepSpec"])
def test_blocks_are_never_longer_than_in_training(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chain, outcome and branch share a block, so what exceeds it is left out."""
    head, lengths = head_of(write(tmp_path, name)), set[int]()
    block = DFlash.block

    def record_length(self: DFlash, tokens: mx.array, places: mx.array, caches: Any) -> mx.array:
        lengths.add(int(places.max().item()) + 1)
        return block(self, tokens, places, caches)

    monkeypatch.setattr(DFlash, "block", record_length)
    depth = LAYOUTS[name].depth
    for chain_length in range(5):
        work = WorkAhead(open_tree(head, 20), (), FAN_OUT_POLICIES["best-first"], Calibration())
        assert len(draft_chain(work, 40).chain) == depth
        work = WorkAhead(open_tree(head, 20), (), FAN_OUT_POLICIES["best-first"], Calibration())
        work.commit((), BranchTask(draft_chain(work, chain_length).chain, 4, 6))
        deepest = 0
        while work.has_work:
            ready = advance(work)
            deepest = max([deepest, *(len(e.chain) for e in ready.entries)]) if ready else deepest
        assert deepest == max(0, min(4, depth - chain_length - 1))
    assert max(lengths) == BLOCK


def test_request_alone_opens_no_more_slots_than_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkAhead(
        open_tree(head_of(write(tmp_path, "z-lab")), 20), (), FAN_OUT_POLICIES["best-first"], Calibration()
    )
    lengths, block = list[int](), DFlash.block
    monkeypatch.setattr(DFlash, "block", lambda *given: lengths.append(int(given[2].max().item()) + 1) or block(*given))
    work.commit((), BranchTask((7,), 2, 2))
    assert advance(work) is not None
    assert lengths == [4]  # at most the anchor, a bonus token and two masks


def test_committed_tokens_without_rows_take_room_in_the_block(tmp_path: Path) -> None:
    head = head_of(write(tmp_path, "z-lab"))
    tree = open_tree(head, 20)
    assert tree.room == BLOCK - 1
    for number in range(2 * BLOCK):
        (node,) = tree.feed([tree.root], [number + 1])
        tree.commit([node])
        assert tree.room == max(0, BLOCK - 2 - number) and tree.best([tree.root])
        assert column_tokens(tree) == [*TEXTS[0][:20].tolist(), *range(1, number + 2)]
    add_features(tree, head, 19, 19 + 2 * BLOCK)
    assert tree.room == BLOCK - 1
