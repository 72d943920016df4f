"""The drafter's work ahead for one request: which tokens to feed next, and what is ready to be pushed.

Works on a `TokenTree` and on commits; knows nothing of sockets. One `advance` is one forward of the drafter, so that its
caller can look for news between two. Paper sections 3 and 4; the words are docs/architecture.md's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from draft_worker.calibration import MAX_RANK, Calibration
from draft_worker.drafter import TokenTree
from draft_worker.fan_out import FanOut
from protocol.messages import Branch


@dataclass(slots=True)
class Growing:
    """A branch in the making: `tip` is its last fed node (None before the bonus token is fed), `chain` what follows."""

    accepted: int
    bonus: int
    tip: int | None = None
    chain: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ready:
    """What one forward brought: branches to push, as deep as they are, and whether that is all of the round."""

    entries: tuple[Branch, ...]
    depth: int
    final: bool


class WorkAhead:
    """Prepares the likely outcomes of the chain under verification, all branches one token deeper a forward.

    `spine[k]` is the node after which the outcome (k, t) places its bonus token t: the root, then the chain's nodes.
    """

    def __init__(self, tree: TokenTree, eos: Collection[int], fan_out: FanOut, calibration: Calibration) -> None:
        self.tree = tree
        self._eos = frozenset(eos)
        self._fan_out = fan_out
        self._calibration = calibration
        self._drop_plan()

    @property
    def busy(self) -> bool:
        """True while there is a forward worth making."""
        return bool(self._unfed or self._unforked or self._growing)

    def commit(self, tokens: Sequence[int], verifying: Sequence[int] | None, depth: int, branches: int) -> None:
        """Makes `tokens` final, then plans the outcomes of the chain `verifying`: `branches` of them, `depth` deep.

        What was drafted along that path is kept, all else is dropped. Near the end of the context branches get shorter,
        then none are prepared. `verifying` None plans nothing.
        """
        self._learn(tokens)
        self._drop_plan()
        chain = tuple(verifying or ())
        known = self._walk(self.tree.root, [*tokens, *chain])
        if len(known) < len(tokens):
            known += self._feed_line(known[-1] if known else self.tree.root, [*tokens, *chain][len(known) :])
        self.tree.commit(known[: len(tokens)])
        if verifying is not None:
            self._plan(chain, known[len(tokens) :], depth, branches)

    def continuation(self, depth: int) -> list[int]:
        """The `depth` tokens that follow the committed text, chained on the device and evaluated once (SD)."""
        depth = min(depth, self.tree.room)
        if depth < 1:
            return []
        nodes = [self.tree.root]
        for _ in range(depth - 1):
            nodes += self.tree.feed(nodes[-1:], [None])
        return self.tree.best(nodes)

    def advance(self) -> Ready:
        """One forward: what the chain still lacks is fed, every growing branch gets one token deeper, new forks begin."""
        self._fork_known()
        line, self._unfed = self._unfed, ()
        first = self.tree.next_node
        parents = [self._spine[-1], *range(first, first + len(line) - 1)] if line else []
        parents += [self._spine[g.accepted] if g.tip is None else g.tip for g in self._growing]
        tokens: list[int | None] = [*line, *(g.bonus if g.tip is None else None for g in self._growing)]
        nodes = self.tree.feed(parents, tokens)
        self._spine += nodes[: len(line)]
        for growing, node in zip(self._growing, nodes[len(line) :], strict=True):
            growing.tip = node
        moved, self._reused = self._growing + self._reused, []
        for growing, token in zip(self._growing, self.tree.best(nodes)[len(line) :], strict=True):
            growing.chain.append(token)
        self._growing = [growing for growing in self._growing if len(growing.chain) < self._depth]
        entries = tuple(Branch(g.accepted, g.bonus, tuple(g.chain[: self._depth])) for g in moved)
        return Ready(entries, max((len(entry.chain) for entry in entries), default=0), not self.busy)

    def _plan(self, chain: tuple[int, ...], known: list[int], depth: int, branches: int) -> None:
        self._chain = chain
        self._depth = min(depth, self.tree.room - len(chain) - 1)
        self._spine = [self.tree.root, *known]
        if self._depth < 1 or branches < 1:
            return
        self._counts = self._fan_out(len(chain), branches, self._calibration)
        self._unfed = chain[len(known) :]
        self._unforked = list(range(len(chain) + 1))

    def _fork_known(self) -> None:
        """Starts branches wherever the chain has been fed: the best candidates, never the chain's own token or EOS."""
        points = [k for k in self._unforked if k < len(self._spine)]
        self._unforked = self._unforked[len(points) :]
        points = [k for k in points if self._counts[k] > 0]
        if not points:
            return
        widest = max(self._counts[k] for k in points) + 1 + len(self._eos)
        found = self.tree.candidates([self._spine[k] for k in points], widest)
        for k, candidates in zip(points, found, strict=True):
            own = self._chain[k] if self._chain and k < len(self._chain) else None
            bonuses = [c.token for c in candidates if c.token != own and c.token not in self._eos][: self._counts[k]]
            for bonus in bonuses:
                self._begin(k, bonus)

    def _begin(self, accepted: int, bonus: int) -> None:
        """A new branch; where an earlier round already fed its first tokens, they are taken over."""
        growing = Growing(accepted, bonus, self.tree.child(self._spine[accepted], bonus))
        node = growing.tip
        while node is not None:
            growing.tip = node
            growing.chain += self.tree.best([node])
            node = self.tree.child(node, growing.chain[-1])
        if growing.chain:
            self._reused.append(growing)
        if len(growing.chain) < self._depth:
            self._growing.append(growing)

    def _walk(self, node: int, tokens: Sequence[int]) -> list[int]:
        """The fed nodes along `tokens` from `node`, as far as they go."""
        path: list[int] = []
        for token in tokens:
            child = self.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _feed_line(self, node: int, tokens: Sequence[int]) -> list[int]:
        first = self.tree.next_node
        return self.tree.feed([node, *range(first, first + len(tokens) - 1)], list(tokens))

    def _learn(self, tokens: Sequence[int]) -> None:
        """Counts what the outcome (k, t) of the prepared chain was, before the tree forgets it."""
        accepted = len(tokens) - 1
        if self._chain is None or not 0 <= accepted < len(self._spine) or tuple(tokens[:-1]) != self._chain[:accepted]:
            return
        own = self._chain[accepted] if accepted < len(self._chain) else None
        candidates = self.tree.candidates([self._spine[accepted]], MAX_RANK + 1)[0]
        ranked = [c.token for c in candidates if c.token != own]
        rank = ranked.index(tokens[-1]) if tokens[-1] in ranked else None
        self._calibration.learn(len(self._chain), accepted, rank)

    def _drop_plan(self) -> None:
        self._chain: tuple[int, ...] | None = None
        self._spine: list[int] = []
        self._counts: list[int] = []
        self._unfed: tuple[int, ...] = ()
        self._unforked: list[int] = []
        self._growing: list[Growing] = []
        self._reused: list[Growing] = []
        self._depth = 0
