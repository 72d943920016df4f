"""A drafter held to a latency profile: each forward of its trees takes as long as the profile says for its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from outrider.drafting.drafter import Candidate, Drafter, JoiningDrafter, TokenTree, TreeFeed
from outrider.engine.pace import Pace
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams


class PacedDrafter:
    """Wraps `drafter`; its trees share one `pace`. `ready` tells when the newest message arrived."""

    def __init__(self, drafter: Drafter, name: str, pace: Pace, ready: Callable[[], float]) -> None:
        self._drafter = drafter
        self._pace = pace
        self._ready = ready
        self.backend = f"{drafter.backend}, simulating {name}"
        self.vocab_size = drafter.vocab_size
        self.context_length = drafter.context_length
        self.parameters = drafter.parameters
        self.weight_bytes = drafter.weight_bytes
        self.prompt_cache = drafter.prompt_cache
        self.note = drafter.note

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> TokenTree:
        return PacedTree(self._drafter.open(tokens, sampling, progress, constraint), self._pace, self._ready)

    def feed_together(self, trees: Sequence[TokenTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        """One forward of the profile's machine, whatever makes it here."""
        inner = [cast(PacedTree, tree).inner for tree in trees]
        self._pace.begin(self._ready())
        if isinstance(self._drafter, JoiningDrafter):
            nodes = self._drafter.feed_together(inner, feeds)
        else:
            nodes = [tree.feed(feed.parents, feed.tokens) for tree, feed in zip(inner, feeds, strict=True)]
        self._pace.end(sum(len(fed) for fed in nodes))
        return nodes


class PacedTree:
    """A `TokenTree` whose answers come when the profile's machine would give them."""

    def __init__(self, tree: TokenTree, pace: Pace, ready: Callable[[], float]) -> None:
        self.inner = tree
        self._pace = pace
        self._ready = ready

    @property
    def root(self) -> int:
        return self.inner.root

    @property
    def next_node(self) -> int:
        return self.inner.next_node

    @property
    def cached(self) -> int:
        return self.inner.cached

    @property
    def committed_len(self) -> int:
        return self.inner.committed_len

    @property
    def room(self) -> int:
        return self.inner.room

    def column_tokens(self) -> list[int]:
        return self.inner.column_tokens()

    def child(self, node: int, token: int) -> int | None:
        return self.inner.child(node, token)

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        self._pace.begin(self._ready())
        nodes = self.inner.feed(parents, tokens)
        self._pace.end(len(nodes))
        return nodes

    def best(self, nodes: Sequence[int]) -> list[int]:
        best = self.inner.best(nodes)
        self._pace.wait()
        return best

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        candidates = self.inner.candidates(nodes, count)
        self._pace.wait()
        return candidates

    def read(self, tokens: Sequence[int], more: bool = False) -> None:
        self._pace.begin(self._ready())
        self.inner.read(tokens, more)
        self._pace.end(len(tokens))
        self._pace.wait()

    def commit(self, path: Sequence[int]) -> None:
        self.inner.commit(path)

    def close(self, spoilt: bool = False) -> None:
        self.inner.close(spoilt)
