"""A committed text that a head drafts behind, and what it has chosen there so far.

`AlternativesChainState`: what a head thought next best beside a request's chains, and what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx

from outrider.drafters.continuation import WIDTH, AlternativesAt, ChainAlternatives, Continuation
from outrider.drafters.fan_out import Calibration
from outrider.drafters.heads.pair_kv_cache import PairFeed
from outrider.engine.flat import FlatSequence
from outrider.engine.sampling import Sampler
from outrider.engine.steps import SamplingMetadata, Step, score
from outrider.engine.tree_feed import Candidate
from outrider.protocol.trees import one_hot


class FollowedText(Protocol):
    """A text that a head follows: what it has read of it, and what it is still to read."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def text(self) -> FlatSequence: ...

    @property
    def length(self) -> int: ...

    def is_up_to(self, tokens: Sequence[int]) -> bool: ...

    def catch_up(self, tokens: Sequence[int]) -> PairFeed: ...

    def has_read(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token of a chain: `row` of what was `chosen` [R] of several chains.

    `few`: the best of each and their scores [R, C], in any order, where they are wanted. `odds` [R]: that it holds
    where the one before it does, if the head can tell.
    """

    row: int
    chosen: mx.array
    few: tuple[mx.array, mx.array] | None = None
    odds: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.chosen, *(self.few or ()), self.odds) if array is not None]

    def of(self, array: mx.array) -> Any:
        """What `array` has of it. Waits."""
        return cast("list[Any]", array.tolist())[self.row]


@dataclass(slots=True)
class ChainState:
    """A committed text, and the chain that grows behind it to `depth` tokens: its `picks`.

    `width`: so many of the best of each place are to be told.
    """

    follower: FollowedText
    tokens: Sequence[int]
    width: int = 0
    depth: int = 0
    picks: list[ChosenToken] = field(default_factory=list)

    @property
    def chain(self) -> tuple[int, ...]:
        """What was chosen. Waits."""
        return tuple(pick.of(pick.chosen) for pick in self.picks)

    @property
    def odds(self) -> tuple[float, ...]:
        """What the head says of each token; (): nothing. Waits."""
        return tuple(pick.of(pick.odds) for pick in self.picks if pick.odds is not None)

    @property
    def candidates(self) -> list[list[Candidate]]:
        """The `width` best of each place, best first. Waits."""
        return [_ranked(*map(pick.of, pick.few))[: self.width] for pick in self.picks if pick.few is not None]

    def asked(self, count: int = 1) -> SamplingMetadata:
        """How its next tokens are chosen; one where the choice looks at those before."""
        sampler, history = self.follower.sampler, None
        if sampler.needs_history:
            history = [[*self.tokens, *self.chain][-sampler.reach :]]
        begin = len(self.tokens) + len(self.picks)
        return SamplingMetadata(sampler, range(begin, begin + count), history)

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        drawn = self.follower.sampler.params.is_residual and chain
        return Continuation(chain, one_hot(chain) if drawn else None, odds=self.odds)


def choose(chains: Sequence[ChainState], logits: mx.array) -> mx.array:
    """Each line's next token [R] by its row of logits [R, V]; those that ask for the same are scored together."""
    groups: dict[Hashable, list[int]] = {}
    for row, chain in enumerate(chains):
        groups.setdefault(chain.follower.sampler.kind, []).append(row)
    parts, order = [], [row for rows in groups.values() for row in rows]
    for rows in groups.values():
        own = logits if len(groups) == 1 else mx.take(logits, mx.array(rows, mx.int32), axis=0)
        step = score([chains[row].asked() for row in rows], own, at_once=True)
        take(step, [(chains[row], [number]) for number, row in enumerate(rows)])
        parts.append(step.chosen())
    if len(parts) == 1:
        return parts[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return mx.take(mx.concatenate(parts), mx.array(back, mx.int32))


def take(step: Step, places: Sequence[tuple[ChainState, Iterable[int]]]) -> None:
    """Each line's next tokens, by these rows of what was scored."""
    chosen, width = step.chosen(), max(chain.width for chain, _ in places)
    few = step.few(width) if width else None
    for chain, rows in places:
        chain.picks += [ChosenToken(row, chosen, few if chain.width else None) for row in rows]


def _ranked(tokens: Sequence[int], scores: Sequence[float]) -> list[Candidate]:
    order = sorted(range(len(tokens)), key=lambda number: -scores[number])
    best = scores[order[0]]
    return [Candidate(tokens[n], best - scores[n]) for n in order if scores[n] > -math.inf]


class AlternativesChainState(ChainState):
    """A line whose continuation is a tree where others may hold, too, with a probability of more than `least`."""

    __slots__ = ("_alternatives", "_begin", "_calibration", "_min_prob")

    def __init__(self, follower: FollowedText, tokens: Sequence[int], calibration: Calibration, least: float) -> None:
        super().__init__(follower, tokens, WIDTH)
        self._calibration, self._min_prob, self._begin = calibration, least, len(tokens)
        self._alternatives: ChainAlternatives | None = None

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        places = [AlternativesAt.of(token, found) for token, found in zip(chain, self.candidates, strict=True)]
        self._alternatives = ChainAlternatives(chain, places)
        return Continuation.of(self._alternatives.tree(self._calibration, self._min_prob))

    def learn(self, committed: Sequence[int]) -> None:
        """What became final behind its text: the calibration counts what held."""
        new = committed[self._begin :]
        if new and self._alternatives is not None and self._alternatives.places:
            self._alternatives.teach(self._calibration, new)


class AlternativesHistory:
    """A request's turns, each of which learns from the one before."""

    def __init__(self) -> None:
        self._last: ChainState | None = None

    def line(self, follower: FollowedText, tokens: Sequence[int], calibration: Calibration, least: float) -> ChainState:
        """The next one's."""
        if isinstance(self._last, AlternativesChainState):
            self._last.learn(tokens)
        self._last = (
            AlternativesChainState(follower, tokens, calibration, least)
            if least < 1.0
            else ChainState(follower, tokens)
        )
        return self._last
