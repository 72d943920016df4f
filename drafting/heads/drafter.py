"""Chains by a head, for several requests in forwards that they share.

First a text's new pairs are read, all true: each verify tells the features of what it accepted, and nothing that was
drafted is kept. Then the head goes on by itself, its own vectors for features, one token of every chain a forward.
Tokens are chosen by the target's own contract (`engine.sampling`): the same noise, by the target's names of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from outrider.drafting.heads.follower import Follower
from outrider.drafting.heads.head import Head
from outrider.drafting.heads.pairs import PairFeed, Pairs
from outrider.drafting.work_ahead import Continuation
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Asked, score
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import ModelFault, named_errors
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import one_hot

log = logging.getLogger(__name__)

_NO_NUMBERS = "the head's vectors are not numbers: its weights or the target's rows are beyond its number format"


@dataclass(slots=True)
class Line:
    """A committed text, and the chain that grows behind it to `depth` tokens: `picks` are rows of what was chosen."""

    follower: Follower
    tokens: Sequence[int]
    depth: int = 0
    picks: list[tuple[mx.array, int]] = field(default_factory=list)

    @property
    def chain(self) -> tuple[int, ...]:
        """What was chosen. Waits."""
        return tuple(cast("list[int]", chosen.tolist())[row] for chosen, row in self.picks)

    @property
    def asked(self) -> Asked:
        """How its next token is chosen."""
        sampler, history = self.follower.sampler, None
        if sampler.needs_history:
            history = [[*self.tokens, *self.chain][-sampler.reach :]]
        return Asked(sampler, [len(self.tokens) + len(self.picks)], history)

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        drawn = self.follower.sampler.params.is_residual and chain
        return Continuation(chain, one_hot(chain) if drawn else None)


class HeadDrafter:
    """Drafts with `head` in the target's process. `note`: what a person should know about it."""

    def __init__(self, head: Head, vocab_size: int, note: str = "") -> None:
        """`vocab_size`: the target's."""
        self.head, self.note = head, note
        self.vocab_size, self.weight_bytes = vocab_size, head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))
        self._pairs = Pairs(head)

    def follow(self, sampling: SamplingParams, constraint: Constraint | None = None) -> Follower:
        """What is to hear the features of a text that chains are wanted for."""
        sampler = Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)
        return Follower(self._pairs, sampler)

    def continuations(self, lines: Sequence[Line], depths: Sequence[int]) -> list[Continuation]:
        """The `depths` tokens that follow each committed text; nothing where it can't tell. Waits.

        What fails in company is tried alone; who fails alone is followed no more, and its request goes on without.
        """
        for line, depth in zip(lines, depths, strict=True):
            room = self.head.context_length - len(line.tokens)
            line.depth = min(depth, room) if line.follower.is_up_to(line.tokens) else 0
        # Rows of the buffers are fed in their order.
        able = sorted((line for line in lines if line.depth > 0), key=lambda line: line.follower.text.row)
        try:
            self._grow(able)
        except OutriderError as error:
            log.warning("%s%s", error, "; each is tried alone" if len(able) > 1 else "")
            for line in able:
                self._grow_alone(line, able)
        return [line.continuation for line in lines]

    def _grow_alone(self, line: Line, company: Sequence[Line]) -> None:
        line.picks.clear()
        try:
            if len(company) > 1:
                self._grow([line])
                return
        except OutriderError as error:
            log.warning("%s", error)
        log.warning("the head drafts no more for this request, which goes on without")
        line.picks.clear()
        line.follower.close()

    def _grow(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        followers = [line.follower for line in lines]
        with named_errors("the head's reading"):
            feeds = [line.follower.catch_up(line.tokens) for line in lines]
        read = [follower.length for follower in followers]
        try:
            with named_errors("the head's forward"):
                hidden = self._pairs.forward(feeds)
                sound, begun = mx.isfinite(hidden).all(), [follower.length for follower in followers]
                self._draft(lines, hidden)
                mx.eval(sound, [chosen for line in lines for chosen, _ in line.picks])
            if not sound.item():
                raise ModelFault(_NO_NUMBERS)
            read = begun
            for follower in followers:
                follower.has_read()
        finally:
            for follower, length in zip(followers, read, strict=True):
                follower.text.roll_back(length)

    def _draft(self, lines: Sequence[Line], hidden: mx.array) -> None:
        """Each line's chain, behind the hidden vector of its last true pair; lazy where nothing looks at its tokens."""
        while True:
            chosen = _choose(lines, self.head.logits(hidden))
            for row, line in enumerate(lines):
                line.picks.append((chosen, row))
            rows = [row for row, line in enumerate(lines) if len(line.picks) < line.depth]
            if not rows:
                return
            if len(rows) < len(lines):
                lines, places = [lines[row] for row in rows], mx.array(rows, mx.int32)
                hidden, chosen = mx.take(hidden, places, axis=0), mx.take(chosen, places, axis=0)
            features = self.head.onward(hidden)
            hidden = self._pairs.forward(
                [
                    PairFeed(line.follower.text, chosen[row : row + 1], features[row : row + 1])
                    for row, line in enumerate(lines)
                ]
            )


def _choose(lines: Sequence[Line], logits: mx.array) -> mx.array:
    """Each line's next token, [R]; those that ask for the same are scored together."""
    groups: dict[Hashable, list[int]] = {}
    for row, line in enumerate(lines):
        groups.setdefault(line.follower.sampler.kind, []).append(row)
    parts, order = [], [row for rows in groups.values() for row in rows]
    for rows in groups.values():
        own = logits if len(groups) == 1 else mx.take(logits, mx.array(rows, mx.int32), axis=0)
        parts.append(score([lines[row].asked for row in rows], own).chosen())
    if len(parts) == 1:
        return parts[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return mx.take(mx.concatenate(parts), mx.array(back, mx.int32))
