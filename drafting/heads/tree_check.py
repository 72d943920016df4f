"""May numpy grow a head's trees? Tried at load: ragged branches of several texts in one forward, some behind rows that
have been heard and some behind guesses, and what became final, against MLX's.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.head import GuessingHead
from outrider.drafting.heads.numpy_check import alike
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.drafting.heads.tree import HeadTree
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.engine.tree import feed_together
from outrider.engine.tree_feed import TreeFeed
from outrider.protocol.sampling import SamplingParams

_LENGTHS = (9, 2, 14)
# Behind what of the root (0) and these each token is fed. Of the first so many branches end that columns are moved.
_PARENTS = ((0,) * 10 + (1, 11, 11, 2), (0, 0), (0, 1, 2, 2, 0))
_FINAL = ((1, 11), (2,), (1, 2))
_ROUNDS = 3


def agrees(head: GuessingHead, numpy: NumpyHead, target: LoadedModel) -> bool:
    """Whether trees over texts of no meaning get the logits that MLX gives them."""
    draws = np.random.default_rng(0)
    texts = [draws.integers(0, 9, length).tolist() for length in _LENGTHS]
    ways = [[_open(head, target, text, by) for text in texts] for by in (None, numpy)]
    heard = [0] * len(texts)
    for _ in range(_ROUNDS):
        for number, tree in enumerate(ways[0]):
            known = tree.committed_len - 1
            raw = draws.standard_normal((known - heard[number], head.points.count * int(target.config["hidden_size"])))
            rows = np.array(head.fuse(mx.array(raw, mx.float32)).astype(mx.float32))
            for way in ways:
                way[number].hear(heard[number], rows)
            heard[number] = known
        tokens = [draws.integers(0, 9, len(parents)).tolist() for parents in _PARENTS]
        own, found = (_grown(way, tokens) for way in ways)
        if not all(alike(*both) for both in zip(own, found, strict=True)):
            return False
    return True


def _open(head: GuessingHead, target: LoadedModel, text: Sequence[int], numpy: NumpyHead | None) -> HeadTree:
    sampler = Sampler(SamplingParams(), target.vocab_size, normalised=False)
    return HeadTree(head, sampler, text, numpy)


def _grown(trees: Sequence[HeadTree], tokens: Sequence[Sequence[int]]) -> list[mx.array]:
    """The logits at the root and behind all that is fed, tree by tree; then some of them are final."""
    feeds = []
    for tree, parents, own in zip(trees, _PARENTS, tokens, strict=True):
        names = [tree.root, *range(tree.next_node, tree.next_node + len(parents))]
        feeds.append(TreeFeed([names[parent] for parent in parents], own))
    found = []
    for tree, nodes, final in zip(trees, feed_together(trees, feeds), _FINAL, strict=True):
        found.append(mx.stack([tree.scores(node) for node in (tree.root, *nodes)]))
        tree.commit([nodes[name - 1] for name in final])
    return found
