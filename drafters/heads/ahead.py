"""A head in a draft worker: it works ahead like a draft model, on token trees fed with the target's features.

Only the weights that the head needs, such as the embedding, are read from the target's files. The trees are
`FeatureTree`s, which can't grow before the first features arrive:

- `HeadTree` consists of pairs. A feature that is not known yet is replaced by a guess. When the true one arrives, nodes
  fed with the guess become stale, and committed tokens are fed again. If features are missing, as those of a prompt
  from the cache, reading begins after the gap.
- `BlockTree` consists of blocks of known tokens and masks. Each outcome opens a block of its own: the tokens since the
  last feature, then the bonus token. The tokens after the block's own choice are in the block already. A block has a
  limited number of slots, so there is `room` for that many tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from outrider.drafters.drafter import TokenTree
from outrider.drafters.heads.head import NO_NUMBERS, BlockHead, Head
from outrider.drafters.heads.kv_rows import BlockKVRows, NewBlocks, PairKVRows
from outrider.drafters.heads.load import features_of, forward_of, read
from outrider.drafters.heads.pair_kv_cache import FeatureKVCache, OpenedBlock, PairKVCache, kv_cache_of
from outrider.engine.loading import outline
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.sampling import Sampler
from outrider.engine.tree import NOWHERE, Tree, TreeInput, TreeLayout
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import CannotDraft, ModelFault
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import TreeFeed


class HeadTree(Tree):
    """One request's tree of pairs. Committed tokens before the first pair have no column."""

    kv_rows: PairKVRows

    def __init__(self, kv_cache: PairKVCache, sampler: Sampler, tokens: Sequence[int]) -> None:
        super().__init__(PairKVRows(kv_cache), sampler, kv_cache.head.context_length, tokens)

    def ready(self, ahead: int = 0) -> bool:
        """Whether it can grow, or could after reading `ahead` more tokens."""
        return bool(self._nodes) or len(self._committed) + ahead - 2 in self.kv_rows.features

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features [N, W] of committed tokens from `position` on. Waits if they are read."""
        self.kv_rows.add_features(position, rows)
        if not self._nodes:
            self._read_on(True)

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        for child in self._node(node).children:
            entry = self._nodes[child]
            if self._token(entry) == token and not self.kv_rows.is_stale(entry.column):
                return child
        return None

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        self.kv_rows.features.forget(len(self._committed) - 1)

    def _read(self, tokens: Sequence[int], more: bool, progress: Callable[[int, int], None] | None = None) -> None:
        self._committed += tokens
        self._recent, self._nodes = [], {}
        self._read_on(not more)

    def _read_on(self, to_end: bool) -> None:
        """Feeds the committed tokens whose features have arrived; with `to_end` the last one becomes the root."""
        features, total = self.kv_rows.features, len(self._committed)
        if features.begin == features.end:
            return
        if not self._columns or features.begin > self._origin + self._columns - 1:
            self._origin = features.begin + 1
            self.kv_rows.begin_at(self._origin)
            self._layout = TreeLayout(0)
        end = min(features.end + 1, total)
        if end <= self._origin + self._columns:
            return
        has_root = to_end and end == total
        read = self._committed[self._origin : end - has_root]
        self.kv_rows.prefill(read, None, total, self._columns)
        self._layout = TreeLayout(len(read))
        if has_root:
            last = self._committed.pop()
            (root,) = self.feed([NOWHERE], [last])
            self._settle(root)
        features.forget(self._origin + self._columns - 1)


class BlockTree(Tree):
    """One request's tree of blocks. Every committed token has a column; only their features are read."""

    kv_rows: BlockKVRows

    def __init__(self, kv_cache: FeatureKVCache, sampler: Sampler, tokens: Sequence[int]) -> None:
        head, self._depth = kv_cache.head, kv_cache.head.depth
        super().__init__(BlockKVRows(kv_cache), sampler, head.context_length, tokens)

    @property
    def room(self) -> int:
        return max(0, min(super().room, self.kv_rows.reach(len(self._committed) - 1)))

    def ready(self, ahead: int = 0) -> bool:
        """Whether it can grow, or could after reading `ahead` more tokens."""
        return bool(self._nodes) or self.kv_rows.end >= len(self._committed) + ahead - 1

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features [N, W] of committed tokens from `position` on. Waits if many are read."""
        self.kv_rows.add_features(position, rows)
        self._set_root()

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        """Returns a block's own choice (`given` False), or else a token that opened a block of its own; neither is
        returned when its features have arrived."""
        parent, own = self._node(node), given is False
        for child in parent.children:
            entry = self._nodes[child]
            is_own = entry.fork == parent.fork
            if is_own == own and self._token(entry) == token and not self.kv_rows.is_stale(entry.column):
                return child
        return None

    def begin(self, feed: TreeFeed) -> TreeInput:
        opened = self._opened(feed)
        growth = super().begin(feed)
        new = growth.new
        blocks = NewBlocks(new.tokens, new.start, new.positions, new.seen, new.parents, opened)
        return replace(growth, new=blocks)

    def _opened(self, feed: TreeFeed) -> list[OpenedBlock | None]:
        """Returns the block that each token opens; None if it continues its parent's."""
        first, wanted = self.next_node, feed.wanted or [self._depth] * len(feed.tokens)
        blocks: list[OpenedBlock | None] = []
        for index, (parent, token) in enumerate(zip(feed.parents, feed.tokens, strict=True)):
            goes_on = token is None and parent < first and self.kv_rows.goes_on(self._node(parent).column)
            blocks.append(None if goes_on else self._block(self._pending_path(feed, index), wanted[index]))
        return blocks

    def _block(self, path: list[int], wanted: int) -> OpenedBlock:
        """Returns the block that the last token of a pending path opens."""
        last = len(self._committed) + len(path) - 1
        anchor = self.kv_rows.anchor(last)
        pending = anchor - len(self._committed)
        tokens = path[pending:] if pending > 0 else [*self._committed[anchor:], *path]
        return OpenedBlock(anchor, tokens, max(1, min(wanted, self._depth - (last - anchor))))

    def _pending_path(self, feed: TreeFeed, index: int) -> list[int]:
        """Returns the pending tokens down to this token of the feed. Waits for tokens that were not read yet."""
        parent, token = feed.parents[index], feed.tokens[index]
        above = self._path(parent) if parent < self.next_node else self._pending_path(feed, parent - self.next_node)
        return [*above, self._best(self._node(parent)) if token is None else token]

    def _read(self, tokens: Sequence[int], more: bool, progress: Callable[[int, int], None] | None = None) -> None:
        self._committed += tokens
        self._recent, self._nodes = [], {}
        self._layout = TreeLayout(len(self._committed))
        if not more:
            self._set_root()

    def _set_root(self) -> None:
        """Makes the last committed token the root, if the features before it have arrived."""
        if self._nodes or not self.ready():
            return
        last = self._committed.pop()
        self._layout = TreeLayout(len(self._committed))
        (root,) = self.feed([NOWHERE], [last])
        self._settle(root)
        if not self.kv_rows.is_sound(self._nodes[root].column):
            raise ModelFault(NO_NUMBERS)


UNTRAINED = (
    "this head was not trained for blocks whose first tokens are known (dflash_config's loss_type variable_prefix), as"
    " those of outcomes are, so its branches are accepted less often than its chains; expected one that was, or head_in"
    " target"
)


class AheadHead:
    """A `Drafter` with `head`, whose trees read features. `features`: the required source of the features."""

    def __init__(
        self,
        head: Head,
        backend: str,
        vocab_size: int,
        features: str = "",
        cpu: OrtForward | None = None,
    ) -> None:
        """`vocab_size`: the target's. `cpu` computes the head's forwards; None: MLX does.

        Raises:
            CannotDraft: it can't continue where the target's features have not arrived yet.
        """
        self._kv_cache = kv_cache_of(head, cpu)
        self.note = ""
        if isinstance(head, BlockHead):
            if head.link is not None and head.link.recalls:
                raise CannotDraft(
                    f"this {backend} head's memory starts with each block, so it can't continue from an outcome inside"
                    " one; use head_in target"
                )
            self.note = "" if head.sees_prefixes else UNTRAINED
        self.head, self.backend, self.features = head, backend, features
        self.vocab_size, self.context_length = vocab_size, head.context_length
        self.parameters = sum(value.size for _, value in tree_flatten(head.parameters()))
        self.weight_bytes = head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))

    @classmethod
    def load(cls, kind: str, path: str, target: str, progress: Callable[[str], None]) -> AheadHead:
        """Loads the head of this kind in folder `path`, for the target in folder `target`.

        Raises:
            CannotDraft: there is none, or it can't draft for this target.
        """
        model = outline(target)
        head = read(kind, path, model, progress)
        features = features_of(head, Path(path), Path(target))
        cpu = forward_of(head, model)
        drafter = cls(head, kind, model.vocab_size, features, cpu)
        if cpu is not None:
            head.release()
        return drafter

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
        cached: int = 1,
    ) -> TokenTree:
        """Returns a tree that reads `tokens` when their features arrive."""
        sampler = Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)
        if isinstance(self._kv_cache, FeatureKVCache):
            return BlockTree(self._kv_cache, sampler, tokens)
        return HeadTree(self._kv_cache, sampler, tokens)
