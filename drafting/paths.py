"""A tree followed by tokens, and what is thought on the way: what has been fed already is not fed again."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.beside import WIDTH, Place
from outrider.drafting.drafter import DrawingTree, TokenTree, TreeFeed
from outrider.protocol.sparse import SparseQ


class Paths:
    """Paths through `tree`; `drawing`: the same, where its continuations are drawn."""

    def __init__(self, tree: TokenTree, drawing: DrawingTree | None = None) -> None:
        self.tree = tree
        self._drawing = drawing

    @property
    def are_drawn(self) -> bool:
        return self._drawing is not None

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        """What followed these nodes was drawn from it, if it was."""
        return self._drawing.drawn_from(nodes) if self._drawing is not None else None

    def child(self, node: int, token: int, told: bool) -> int | None:
        """The fed node for `token` right after `node`. Of drawn chains only one that noise of the right place follows.

        A chain begins with a token that was told. Had it been drawn itself, what follows it would be drawn by noise of
        an earlier place, which a chain under verification may have been drawn by too.
        """
        if self._drawing is None:
            return self.tree.child(node, token)
        return self._drawing.child(node, token, told)

    def along(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along `tokens` from `node`, as far as they go."""
        path: list[int] = []
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def committed(self, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along committed `tokens`; the last of them is to be one that a chain may begin with."""
        path = self.along(self.tree.root, tokens[:-1])
        if tokens and len(path) == len(tokens) - 1:
            last = self.child((path or [self.tree.root])[-1], tokens[-1], told=True)
            path += [last] if last is not None else []
        return path

    def line(self, node: int, tokens: Sequence[int], wanted: int = 1) -> TreeFeed:
        """What feeds `tokens` one behind the other, the first behind `node`. `wanted`: so many more behind the last."""
        following = range(self.tree.next_node, self.tree.next_node + len(tokens) - 1)
        return TreeFeed([node, *following][: len(tokens)], tokens, [*[1] * len(tokens[1:]), wanted][: len(tokens)])

    def places(self, chain: Sequence[int], nodes: Sequence[int], ends: int) -> list[Place]:
        """What is thought at each place of a chain; `nodes[i]` is the one that its token i follows.

        `ends`: so many tokens may be told that nothing follows.
        """
        found = self.tree.candidates(nodes, WIDTH + ends)
        return [Place.of(token, candidates) for token, candidates in zip(chain, found, strict=True)]
