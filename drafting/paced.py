"""A drafter held to a latency profile: each forward of its trees takes as long as the profile says for its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.drafting.drafter import Candidate, Drafter, TokenTree
from outrider.engine.pace import Pace
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
        self.note = drafter.note

    def open(
        self, tokens: Sequence[int], sampling: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> TokenTree:
        return PacedTree(self._drafter.open(tokens, sampling, progress), self._pace, self._ready)


class PacedTree:
    """A `TokenTree` whose answers come when the profile's machine would give them."""

    def __init__(self, tree: TokenTree, pace: Pace, ready: Callable[[], float]) -> None:
        self._tree = tree
        self._pace = pace
        self._ready = ready

    @property
    def root(self) -> int:
        return self._tree.root

    @property
    def next_node(self) -> int:
        return self._tree.next_node

    @property
    def committed_len(self) -> int:
        return self._tree.committed_len

    @property
    def room(self) -> int:
        return self._tree.room

    def column_tokens(self) -> list[int]:
        return self._tree.column_tokens()

    def child(self, node: int, token: int) -> int | None:
        return self._tree.child(node, token)

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        self._pace.begin(self._ready())
        nodes = self._tree.feed(parents, tokens)
        self._pace.end(len(nodes))
        return nodes

    def best(self, nodes: Sequence[int]) -> list[int]:
        best = self._tree.best(nodes)
        self._pace.wait()
        return best

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        candidates = self._tree.candidates(nodes, count)
        self._pace.wait()
        return candidates

    def read(self, tokens: Sequence[int], more: bool = False) -> None:
        self._pace.begin(self._ready())
        self._tree.read(tokens, more)
        self._pace.end(len(tokens))
        self._pace.wait()

    def commit(self, path: Sequence[int]) -> None:
        self._tree.commit(path)

    def close(self, spoilt: bool = False) -> None:
        self._tree.close(spoilt)
