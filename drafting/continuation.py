"""What a drafter says comes next: a chain, or a tree whose first branch is one."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.messages import Beside
from outrider.protocol.sparse import SparseQ
from outrider.protocol.trees import DraftTree, spine


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
    def beside(self) -> Beside | None:
        """Of a tree whose first branch comes first what stands beside that."""
        count = len(spine(self.parents))
        return Beside(self.chain[count:], self.parents[count:], self.odds[count:]) if self.parents else None
