"""Drafted tokens as a tree: what may follow the committed text, in several ways at once.

Node i is a token behind node `parents[i]`, an earlier one, or behind the text (-1). A chain is a tree without forks;
where parents are left out, (), the tokens are one. Pure; knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
"""Whose children follow the text itself."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What a drafter proposes. `odds`: of each node, that it holds where its parent does; (): it does not say.

    Nodes best in the order of walking down the likeliest branch first: what holds then seldom has to be moved.
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
