"""A token tree of a block head: branches are blocks, whose first tokens are known and the rest masks.

Outcomes are told as tokens, so each opens a block of its own: the last token with a feature before it, what was
committed or accepted since, and the bonus. What grows behind it is that block's. A block ends somewhere, so there is
`room` for so many tokens only. Satisfies `drafting.drafter.HearingTree`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.drafting.heads.block_columns import Block, BlockColumns, NewBlocks
from outrider.drafting.heads.columns import NO_NUMBERS
from outrider.drafting.heads.head import BlockHead
from outrider.engine.layout import Layout
from outrider.engine.sampling import Sampler
from outrider.engine.tree import NOWHERE, Growth, Tree, feed_together
from outrider.engine.tree_feed import TreeFeed
from outrider.protocol.guard import ModelFault


class BlockTree(Tree):
    """One request's tree. Every committed token has a column; what is read of them are rows."""

    columns: BlockColumns

    def __init__(self, head: BlockHead, sampler: Sampler, tokens: Sequence[int]) -> None:
        self._depth = head.depth
        super().__init__(BlockColumns(head), sampler, head.context_length, tokens)

    @property
    def room(self) -> int:
        return max(0, min(super().room, self.columns.reach(len(self._committed) - 1)))

    def ready(self, ahead: int = 0) -> bool:
        """Whether it can grow, or could once `ahead` tokens more were read."""
        return bool(self._nodes) or self.columns.end >= len(self._committed) + ahead - 1

    def hear(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """The target's rows [N, W] of committed tokens, the first at `position`. Waits where many are read."""
        self.columns.hear(position, rows)
        self._plant()

    def child(self, node: int, token: int, told: bool | None = None) -> int | None:
        """A block's own choice is a node for who goes on with it: else what follows a token is asked of a block that
        knows it. Where the target has spoken since, neither is."""
        parent, own = self._node(node), told is False
        for child in parent.children:
            entry = self._nodes[child]
            is_own = entry.fork == parent.fork
            if is_own == own and self._token(entry) == token and not self.columns.is_stale(entry.column):
                return child
        return None

    def begin(self, feed: TreeFeed) -> Growth:
        opened = self._opened(feed)
        growth = super().begin(feed)
        new = growth.new
        blocks = NewBlocks(new.tokens, new.start, new.positions, new.seen, new.parents, opened)
        return replace(growth, new=blocks)

    def _opened(self, feed: TreeFeed) -> list[Block | None]:
        """The block of each token; None for what goes on in that of its parent."""
        first, wanted = self._next, feed.wanted or [self._depth] * len(feed.tokens)
        found: list[Block | None] = []
        for index, (parent, token) in enumerate(zip(feed.parents, feed.tokens, strict=True)):
            goes_on = token is None and parent < first and self.columns.goes_on(self._node(parent).column)
            found.append(None if goes_on else self._block(self._down_to(feed, index), wanted[index]))
        return found

    def _block(self, path: list[int], wanted: int) -> Block:
        """That of the last token of a path behind the committed ones."""
        last = len(self._committed) + len(path) - 1
        anchor = self.columns.anchor(last)
        pending = anchor - len(self._committed)
        tokens = path[pending:] if pending > 0 else [*self._committed[anchor:], *path]
        return Block(anchor, tokens, max(1, min(wanted, self._depth - (last - anchor))))

    def _down_to(self, feed: TreeFeed, index: int) -> list[int]:
        """The pending tokens down to one that is to be fed, its own included. Waits for what was not read."""
        parent, token = feed.parents[index], feed.tokens[index]
        above = self._path(parent) if parent < self._next else self._down_to(feed, parent - self._next)
        return [*above, self._best(self._node(parent)) if token is None else token]

    def _read(self, tokens: Sequence[int], more: bool, progress: Callable[[int, int], None] | None = None) -> None:
        self._committed += tokens
        self._column_tokens = list(self._committed)
        self._recent, self._nodes = [], {}
        self._layout = Layout(len(self._committed))
        if not more:
            self._plant()

    def _plant(self) -> None:
        """The last committed token becomes the root, once the rows before it have been heard."""
        if self._nodes or not self.ready():
            return
        last = self._committed.pop()
        self._column_tokens = list(self._committed)
        self._layout = Layout(len(self._committed))
        (root,) = feed_together([self], [TreeFeed([NOWHERE], [last])])[0]
        self._settle(root)
        if not self.columns.is_sound(self._nodes[root].column):
            raise ModelFault(NO_NUMBERS)
