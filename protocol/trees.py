"""Drafted tokens as a tree, and the distributions that they were drawn from.

Several tokens may follow the same token. Node i follows node `parents[i]`, an earlier one, or the committed text (-1).
A chain is a tree without forks; empty parents, (), mean a chain. Knows arrays; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

import numpy as np
from msgspec import Meta

from outrider.protocol.schema import MAX_CHAIN, Probabilities, Record, Token, TokenRows

ROOT = -1
"""The parent of nodes that follow the text itself."""

# How far the sum of a row of float32 probabilities may be from 1.
SUM_TOLERANCE = 1e-3


Chain = Annotated[tuple[Token, ...], Meta(max_length=MAX_CHAIN)]
Node = Annotated[int, Meta(ge=-1, le=MAX_CHAIN - 1)]
"""A token of a tree or a chain by its index; -1: the text before them."""

Parents = Annotated[tuple[Node, ...], Meta(max_length=MAX_CHAIN)]
"""The parents of a tree: the node that each token follows, or -1; (): the tokens are a chain."""


class DraftTree(Record, frozen=True):
    """Draft tokens: a chain, or a tree if they have `parents`.

    The nodes of the likeliest branch should come first: accepted nodes then rarely have to be moved.
    """

    chain: Chain = ()
    parents: Parents = ()


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def chain_parents(count: int) -> tuple[int, ...]:
    """Returns the parents of a chain."""
    return tuple(range(ROOT, count - 1))


def node_depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each node: the number of nodes between the text and it."""
    result: list[int] = []
    for parent in parents:
        result.append(result[parent] + 1 if parent >= 0 else 0)
    return result


def token_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Returns the tokens from the text down to each node, including its own."""
    result: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        result.append([*(result[parent] if parent >= 0 else ()), token])
    return result


def accepted_path(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """Returns the accepted nodes, from the text down. `choices`: the target's token after the text and each node."""
    path: list[int] = []
    at = ROOT
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == choices[at + 1]:
            path.append(node)
            at = node
    return tuple(path)


def first_branch(parents: Sequence[int]) -> list[int]:
    """Returns the first branch from the text down: the first child, its first child, and so on."""
    path: list[int] = []
    at = ROOT
    for node, parent in enumerate(parents):
        if parent == at:
            path.append(node)
            at = node
    return path


@dataclass(frozen=True, slots=True)
class TreeUnion:
    """The union of two trees; `places[i]`: the index of the second tree's node i, or None if it was left out."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    places: tuple[int | None, ...]


def merge_trees(first: DraftTree, other: DraftTree, most: int) -> TreeUnion:
    """Returns all nodes of the first tree, then the other's new ones, up to `most` in all. Either may be a chain."""
    tokens, parents = list(first.chain), list(first.parents or chain_parents(len(first.chain)))
    known = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    places: list[int | None] = []
    for token, above in zip(other.chain, other.parents or chain_parents(len(other.chain)), strict=True):
        parent = ROOT if above == ROOT else places[above]
        node = known.get((parent, token)) if parent is not None else None
        if node is None and parent is not None and len(tokens) < most:
            node = known[parent, token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        places.append(node)
    return TreeUnion(tuple(tokens), tuple(parents), tuple(places))


def tree_fault(tokens: Sequence[int], parents: Sequence[int]) -> str:
    """Returns what is wrong with a tree, or ""."""
    if not parents:
        return ""
    if len(parents) != len(tokens):
        return f"a tree of {len(tokens)} tokens has {len(parents)} parents; expected one for each token, or none"
    known = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < node:
            return f"node {node} of a tree follows node {parent}; expected an earlier node, or -1"
        if (parent, token) in known:
            return f"token {token} follows node {parent} of a tree twice; expected siblings that differ"
        known.add((parent, token))
    return ""


class SparseQ(TokenRows, frozen=True, eq=False):
    """A drafter's distributions, one per token, as sparse as when it drew from them (residual sampling): token i was
    drawn from `ids[i]`, [N, m], with the probabilities `probs[i]`, [N, m]; all other tokens have 0. They are sent with
    the chain, because it must be verified with exactly the q it was drawn from.

    In `Branches` the rows of all entries follow one another.
    """

    probs: Probabilities

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.probs.nbytes

    def of(self, tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Returns q of one token per row, float32 [N]."""
        own = self.ids == np.asarray(tokens, np.int32)[:, None]
        q: np.ndarray[tuple[int], np.dtype[np.float32]] = np.max(self.probs * own, axis=1, initial=0.0)
        return q

    def fits(self, tokens: Sequence[int]) -> bool:
        """Returns whether the rows are distributions, and each of these tokens can be drawn from its row."""
        if self.ids.shape != self.probs.shape or len(self) != len(tokens):
            return False
        sums = self.probs.sum(axis=1)
        return bool((np.abs(sums - 1.0) < SUM_TOLERANCE).all() and (self.of(tokens) > 0).all())


def one_hot(tokens: Sequence[int]) -> SparseQ:
    """Returns the q of tokens that were chosen with certainty."""
    ids = np.asarray(tokens, np.int32).reshape(-1, 1)
    return SparseQ(ids, np.ones(ids.shape, np.float32))


@dataclass(frozen=True, slots=True)
class TreeFeed:
    """The next tokens of a drafter's token tree, one after each parent (`drafters.drafter.TokenTree`).

    `depths`: how many tokens will be requested after each, for drafters of several tokens at once; (): not known.
    """

    parents: Sequence[int]
    tokens: Sequence[int | None]
    depths: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node; `gap`: the best score after that node minus this token's (nats, >= 0)."""

    token: int
    gap: float
