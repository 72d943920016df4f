"""A drafter in the target's process: draft, then verify, without a hop between, for a machine with one device.

Owns the draft model and one token tree a request. Knows slots and tokens; knows nothing of messages. It can't work
ahead: draft and target take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from outrider.engine.draws import Draws
from outrider.engine.loading import LoadedModel
from outrider.engine.open_tree import open_tree, tree_form
from outrider.engine.slots import Slot
from outrider.engine.tree import Tree
from outrider.engine.verify import Verdict, verify
from outrider.protocol import clock
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import SparseQ

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_PIECE = 256  # committed tokens a forward, when the draft has been left behind
_BESIDE = 16  # so few are fed like a chain


@dataclass(frozen=True, slots=True)
class Proposed:
    """What may follow the committed text, and what it was drawn from, if it was."""

    chain: tuple[int, ...] = ()
    q: SparseQ | None = None


@dataclass(frozen=True, slots=True)
class DraftedRound:
    """A round in its two parts: the `chain` and when it was drafted, the verdict on it and when it was verified."""

    chain: tuple[int, ...]
    drafting: Span
    verdict: Verdict
    work: Span


class Colocated:
    """The draft model beside the target."""

    def __init__(self, model: LoadedModel) -> None:
        """
        Raises:
            ModelError: no tree of this model is exact.
        """
        tree_form(model)
        self.model = model

    def open(self, tokens: Sequence[int], sampling: SamplingParams, progress: Progress | None = None) -> Drafting:
        """Reads `tokens` for a request; `progress(done, total)` may raise to end that."""
        return Drafting(self.model, tokens, sampling, progress)


class Drafting:
    """What the draft knows of one request. Follows the committed tokens whenever it is asked to propose."""

    def __init__(
        self, model: LoadedModel, tokens: Sequence[int], sampling: SamplingParams, progress: Progress | None
    ) -> None:
        self._model = model
        self._tree: Tree | None = None
        # Nothing is prepared for ahead of its time, so there are no tokens whose weight Saguaro's factor would lower.
        self._draws = Draws.of(replace(sampling, saguaro=1.0), 1) if sampling.is_residual else None
        if self._can_read(tokens, len(tokens)):
            self._tree = open_tree(model, tokens, sampling, progress, self._draws)

    def propose(self, tokens: Sequence[int], depth: int) -> Proposed:
        """Up to `depth` tokens after the committed `tokens`, which begin with those of the call before.

        The chain is drafted on the device and read once. It ends with the draft's context, and is empty from there on.
        """
        tree = self._follow(tokens)
        depth = min(depth, tree.room) if tree is not None else 0
        if tree is None or depth < 1:
            return Proposed()
        nodes = [tree.root]
        for _ in range(depth - 1):
            nodes += tree.feed(nodes[-1:], [None])
        chain = tuple(tree.best(nodes))
        return Proposed(chain, tree.drawn_from(nodes) if self._draws is not None else None)

    def column_tokens(self) -> list[int]:
        """The token of every committed KV column, in order; must equal the committed tokens."""
        return self._tree.column_tokens() if self._tree is not None else []

    def _follow(self, tokens: Sequence[int]) -> Tree | None:
        """The tree with all `tokens` committed: what was drafted along them is kept, the rest fed."""
        tree = self._tree
        if tree is None or not self._can_read(tokens[tree.committed_len :], len(tokens)):
            self._tree = None
            return None
        _commit(tree, tokens[tree.committed_len :])
        return tree

    def _can_read(self, new: Sequence[int], length: int) -> bool:
        """The target may know tokens that the draft does not: padding, which nobody but a random model says."""
        if max(new, default=0) >= self._model.vocab_size:
            log.warning("token %d is not among the draft's %d; no drafting", max(new), self._model.vocab_size)
            return False
        return length < self._model.context_length


class DraftedRounds:
    """SD of one slot, round after round: the counterpart of `engine.verify.RunAhead` with a draft."""

    def __init__(self, slot: Slot, drafting: Drafting, depth: int, room: int, eos: Collection[int]) -> None:
        """`room`: how many tokens the request may still grow by, at least one."""
        self._slot, self._drafting = slot, drafting
        self._depth, self._room, self._eos = depth, room, frozenset(eos)

    @property
    def over(self) -> bool:
        """Whether the request can't go on: it has no room left, or has said an end token."""
        return self._room < 1

    def next(self) -> DraftedRound:
        """Drafts, verifies and commits one chain; its bonus token still fits."""
        slot, started_ns = self._slot, clock.now()
        proposed = self._drafting.propose(slot.tokens, min(self._depth, self._room - 1))
        drafted_ns = clock.now()
        verdict = verify(slot, proposed.chain, proposed.q)
        work = Span(drafted_ns, clock.now())
        committed = slot.tokens[-verdict.accepted - 1 :]
        self._room = 0 if self._eos.intersection(committed) else self._room - len(committed)
        return DraftedRound(proposed.chain, Span(started_ns, drafted_ns), verdict, work)

    def stop(self) -> None:
        """Nothing is ever in flight between two rounds."""


def _commit(tree: Tree, tokens: Sequence[int]) -> None:
    path: list[int] = []
    for token in tokens:
        child = tree.child(path[-1] if path else tree.root, token)
        if child is None:
            break
        path.append(child)
    tree.commit(path)
    rest = list(tokens[len(path) :])
    if len(rest) > _BESIDE:
        for start in range(0, len(rest), _PIECE):
            tree.read(rest[start : start + _PIECE], more=start + _PIECE < len(rest))
    elif rest:
        first = tree.next_node
        tree.commit(tree.feed([tree.root, *range(first, first + len(rest) - 1)], list(rest)))
