"""Does a tree over this model say what the model says? A small branched tree against plain forwards, once at load.

Catches models whose attention ignores the mask, the positions or the columns it is given. Knows trees only by feeding,
committing and reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine.loading import LoadedModel
from outrider.engine.ort.serve import alone
from outrider.engine.tree import Tree, feed_together
from outrider.engine.tree_feed import TreeFeed

_PROMPT, _BRANCHES, _DEPTH = 9, 3, 2
_EXACT, _HALF = 1e-4, 0.1  # of the logits' standard deviation, or of 1 if that is more
_ROUNDED = 0.3  # the same, root mean square, where activations are rounded to 8 bits


def agrees(model: LoadedModel, open_tree: Callable[[Sequence[int]], Tree], prompt: int = _PROMPT) -> bool:
    """True if the tree's logits are the model's own, up to rounding: before a commit and after it.

    `prompt`: how many tokens it is opened with.
    """
    tokens = [(7919 * i + 13) % model.vocab_size for i in range(prompt + 4 * _BRANCHES * _DEPTH)]
    text, rest = tokens[:prompt], tokens[prompt:]
    tree = open_tree(text)
    texts = {tree.root: text}
    worst = _check(model, tree, texts)
    for _ in range(2):
        tips = [tree.root] * _BRANCHES
        for _ in range(_DEPTH):
            fed, rest = rest[:_BRANCHES], rest[_BRANCHES:]
            above, tips = tips, tree.feed(tips, fed)
            texts |= {tip: [*texts[up], token] for tip, up, token in zip(tips, above, fed, strict=True)}
        worst = max(worst, _check(model, tree, texts))
        path = [node for node in texts if texts[node] == texts[tips[1]][: len(texts[node])] and node > tree.root]
        tree.commit(path)
        texts = {tree.root: texts[tips[1]]}
    tree.close()
    return worst <= 1.0


def _check(model: LoadedModel, tree: Tree, texts: dict[int, list[int]]) -> float:
    """The largest difference between the tree's and the model's logits, in units of what is allowed."""
    own = Own(model)
    return max((own.distance(text, tree.scores(node)) for node, text in texts.items()), default=0.0)


class Own:
    """The model's own logits, of each text once: several ways of holding texts are tried with the same ones."""

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._cpu = model.model, model.cpu
        self._known: dict[tuple[int, ...], mx.array] = {}

    def distance(self, text: Sequence[int], found: mx.array) -> float:
        """How far logits [V] lie from the model's own after `text`, in units of what rounding explains. Waits."""
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self._of(text)
        own = self._known[key]
        allowed = _EXACT if own.dtype == mx.float32 else _HALF
        said = own != -mx.inf  # a draft may be able to say fewer tokens than there are
        own, found = mx.where(said, own.astype(mx.float32), 0.0), mx.where(said, found.astype(mx.float32), 0.0)
        if self._cpu is not None and self._cpu.quantised:  # other sums, and roundings to 8 bits fall another way
            off = mx.sqrt(mx.mean((found - own) ** 2)) / mx.maximum(mx.std(own), 1.0)
            return float(off.item()) / _ROUNDED  # type: ignore[arg-type]
        difference = mx.abs(found - own).max() / mx.maximum(mx.std(own), 1.0)
        return float(difference.item()) / allowed  # type: ignore[arg-type]

    def _of(self, text: Sequence[int]) -> mx.array:
        if self._cpu is not None:  # which was held to the model itself when it was loaded
            return mx.array(alone(self._cpu, np.array(text, np.int32), (len(text),))[-1])
        own: mx.array = self._model(mx.array([list(text)]), cache=make_prompt_cache(self._model))[0, -1]
        return own


def agrees_in_company(model: LoadedModel, open_tree: Callable[[Sequence[int]], Tree]) -> bool:
    """True if trees of unlike lengths that share a forward have the model's own logits, up to rounding."""
    texts = [[(7919 * i + 104729 * n + 13) % model.vocab_size for i in range(_PROMPT + 5 * n)] for n in range(2)]
    trees = [open_tree(text) for text in texts]
    fed = [[5 % model.vocab_size, 7 % model.vocab_size][: n + 1] for n in range(2)]
    nodes = feed_together(trees, [TreeFeed([tree.root] * len(new), new) for tree, new in zip(trees, fed, strict=True)])
    worst = 0.0
    for tree, text, new, own in zip(trees, texts, fed, nodes, strict=True):
        worst = max(worst, _check(model, tree, {node: [*text, t] for node, t in zip(own, new, strict=True)}))
        tree.close()
    return worst <= 1.0
