"""A token tree of a head: what it drafts behind committed tokens, whose rows the target tells as they are made.

Before the first rows come there is nothing to grow from. Where the target has spoken since, what was fed a guess is no
node any more, so committed tokens are fed again with what is true. Where rows were missed, as those of a remembered
prompt are, reading begins behind the gap. Satisfies `drafting.drafter.HearingTree`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.drafting.heads.columns import PairColumns
from outrider.drafting.heads.head import GuessingHead
from outrider.drafting.heads.host_columns import HostColumns
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.engine.layout import Layout
from outrider.engine.sampling import Sampler
from outrider.engine.tree import NOWHERE, Tree, feed_together
from outrider.engine.tree_feed import TreeFeed


class HeadTree(Tree):
    """One request's tree of pairs. Tokens before the first pair's are committed and have no column."""

    columns: PairColumns

    def __init__(
        self, head: GuessingHead, sampler: Sampler, tokens: Sequence[int], numpy: NumpyHead | None = None
    ) -> None:
        """`numpy` makes the forwards of few pairs."""
        columns = PairColumns(head) if numpy is None else HostColumns(head, numpy)
        super().__init__(columns, sampler, head.context_length, tokens)

    def ready(self, ahead: int = 0) -> bool:
        """Whether it can grow, or could once `ahead` tokens more were read."""
        return bool(self._nodes) or len(self._committed) + ahead - 2 in self.columns.heard

    def hear(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """The target's rows [N, W] of committed tokens, the first at `position`. Waits where they are read."""
        self.columns.hear(position, rows)
        if not self._nodes:
            self._read_on(True)

    def child(self, node: int, token: int, told: bool | None = None) -> int | None:
        for child in self._node(node).children:
            entry = self._nodes[child]
            if self._token(entry) == token and not self.columns.is_stale(entry.column):
                return child
        return None

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        self.columns.heard.forget(len(self._committed) - 1)

    def _read(self, tokens: Sequence[int], more: bool, progress: Callable[[int, int], None] | None = None) -> None:
        self._committed += tokens
        self._recent, self._nodes = [], {}
        self._read_on(not more)

    def _read_on(self, to_end: bool) -> None:
        """Feeds the committed tokens whose rows have been heard; behind the last one, if that may be, it can grow."""
        heard, total = self.columns.heard, len(self._committed)
        if heard.begin == heard.end:
            return
        if not self._column_tokens or heard.begin > self._origin + len(self._column_tokens) - 1:
            self._origin, self._column_tokens = heard.begin + 1, []
            self.columns.begin_at(self._origin)
            self._layout = Layout(0)
        fed, end = self._origin + len(self._column_tokens), min(heard.end + 1, total)
        if end <= fed:
            return
        has_root = to_end and end == total
        start = len(self._column_tokens)
        self._column_tokens += self._committed[fed : end - has_root]
        self.columns.prefill(self._column_tokens, None, total, start)
        self._layout = Layout(len(self._column_tokens))
        if has_root:
            last = self._committed.pop()
            (root,) = feed_together([self], [TreeFeed([NOWHERE], [last])])[0]
            self._settle(root)
        heard.forget(self._origin + len(self._column_tokens) - 1)
