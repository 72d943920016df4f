"""Drafted tokens as a tree, and the distributions that they were drawn from.

`DraftTree` holds drafted tokens that may follow the committed text in several ways at once. Node i is a token behind
node `parents[i]`, an earlier one, or behind the text (-1). A chain is a tree without forks; empty parents, (), mean a
chain. Pure; knows numbers only.

`SparseQ` holds the draft's distributions, as sparse as they were when it drew (residual sampling). It is sent with the
chain, because a chain must be verified with exactly the q it was drawn from. Knows arrays; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.protocol.schema import Ids, Probabilities

ROOT = -1
"""Whose children follow the text itself."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What a drafter proposes. `odds` is each node's probability of being accepted if its parent is; (): not known.

    List the nodes in the order of a walk down the likeliest branch first: accepted nodes then rarely have to be moved.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)


def line(count: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(ROOT, count - 1))


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """How many nodes stand between the text and each: the place of its token behind the text."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def lines(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens down to each node, its own the last."""
    found: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else ()), token])
    return found


def walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """The nodes that hold, from the text down. `choices`: what is chosen behind the text, then behind each node."""
    path: list[int] = []
    at = ROOT
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == choices[at + 1]:
            path.append(node)
            at = node
    return tuple(path)


def spine(parents: Sequence[int]) -> list[int]:
    """The first branch, from the text down to its end: the first child of the first child, and so on."""
    path: list[int] = []
    at = ROOT
    for node, parent in enumerate(parents):
        if parent == at:
            path.append(node)
            at = node
    return path


@dataclass(frozen=True, slots=True)
class United:
    """A tree and what another has beyond it; `places[i]`: where the other's node i stands now, None: nowhere."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    places: tuple[int | None, ...]


def united(first: DraftTree, other: DraftTree, most: int) -> United:
    """All of the first, then what it has not of the other, `most` nodes at most. Both may be chains without parents."""
    tokens, parents = list(first.tokens), list(first.parents or line(len(first.tokens)))
    known = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    places: list[int | None] = []
    for token, above in zip(other.tokens, other.parents or line(len(other.tokens)), strict=True):
        parent = ROOT if above == ROOT else places[above]
        node = known.get((parent, token)) if parent is not None else None
        if node is None and parent is not None and len(tokens) < most:
            node = known[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        places.append(node)
    return United(tuple(tokens), tuple(parents), tuple(places))


def fault(tokens: Sequence[int], parents: Sequence[int]) -> str:
    """What is wrong with a tree, in words; "": nothing is."""
    if not parents:
        return ""
    if len(parents) != len(tokens):
        return f"a tree of {len(tokens)} tokens has {len(parents)} parents; expected one a token, or none at all"
    known = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < node:
            return f"node {node} of a tree stands behind node {parent}; expected an earlier one, or -1"
        if (parent, token) in known:
            return f"token {token} stands twice behind node {parent} of a tree; expected siblings that differ"
        known.add((parent, token))
    return ""


# How far a row of float32 probabilities may be from 1 in sum.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class SparseQ:
    """One distribution a token: token i was drawn from `ids[i]`, [N, m], with `probs[i]`, [N, m]; all other tokens have
    0.

    In `Branches` the rows of all entries follow one another.
    """

    ids: Ids
    probs: Probabilities

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.probs.nbytes

    def part(self, start: int, end: int) -> SparseQ:
        """The rows from `start` to before `end`."""
        return SparseQ(self.ids[start:end], self.probs[start:end])

    def of(self, tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """q of one token a row, float32 [N]."""
        own = self.ids == np.asarray(tokens, np.int32)[:, None]
        found: np.ndarray[tuple[int], np.dtype[np.float32]] = np.max(self.probs * own, axis=1, initial=0.0)
        return found

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether these can be distributions that these tokens were drawn from."""
        if self.ids.shape != self.probs.shape or len(self) != len(tokens):
            return False
        sums = self.probs.sum(axis=1)
        return bool((np.abs(sums - 1.0) < TOLERANCE).all() and (self.of(tokens) > 0).all())


def one_hot(tokens: Sequence[int]) -> SparseQ:
    """The q of tokens that were not drawn by chance, but could only be these."""
    ids = np.asarray(tokens, np.int32).reshape(-1, 1)
    return SparseQ(ids, np.ones(ids.shape, np.float32))
