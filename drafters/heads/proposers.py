"""Grows a head's chains in the target's process: one token after another, or several in one forward.

`StepProposer` drafts with heads that predict one token after another. `BlockProposer` drafts several tokens in one
forward; a slot does not know the tokens of others, so a walk along the block chooses them, with a link each by the
token before it. Only the few best candidates of a linked slot are scored, with the noise included, because noise
promotes tokens that are unlikely by themselves. Tokens are chosen by the target's own contract (`engine.sampling`).

`ChainState` is a committed text and the tokens chosen after it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from outrider.drafters.fan_out import Calibration
from outrider.drafters.growth import WIDTH, AlternativesAt, ChainAlternatives, Continuation
from outrider.drafters.heads.head import BlockHead, Head, MaskedHead, StepHead
from outrider.drafters.heads.layers import FEW, BlockLink
from outrider.drafters.heads.pair_kv_cache import (
    FeatureKVCache,
    HeadKVCache,
    PairFeed,
    PairKVCache,
)
from outrider.engine.flat import FlatSequence
from outrider.engine.ort.forward import OrtForward
from outrider.engine.sampling import Sampler
from outrider.engine.steps import SamplingMetadata, Step, score
from outrider.protocol.errors import CannotDraft
from outrider.protocol.trees import Candidate, one_hot


class FollowedText(Protocol):
    """A text that a head follows: its sampler, its read pairs and its unread features."""

    sampler: Sampler

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
    """A token of a chain: `row` of the tokens `chosen` [R] for several chains.

    `few`: the best candidates and their scores [R, C], in any order, if requested. `odds` [R]: the probability that the
    token is accepted if the one before it is, if the head estimates that.
    """

    row: int
    chosen: mx.array
    few: tuple[mx.array, mx.array] | None = None
    odds: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.chosen, *(self.few or ()), self.odds) if array is not None]

    def of(self, array: mx.array) -> Any:
        """Returns the token's element of `array`. Waits."""
        return cast("list[Any]", array.tolist())[self.row]


@dataclass(slots=True)
class ChainState:
    """A committed text, and the chain that grows after it to `depth` tokens: its `picks`.

    `width`: the number of candidates kept at each position.
    """

    follower: FollowedText
    tokens: Sequence[int]
    width: int = 0
    depth: int = 0
    picks: list[ChosenToken] = field(default_factory=list)
    alternatives: AlternativesHistory | None = None

    @property
    def chain(self) -> tuple[int, ...]:
        """The chosen tokens. Waits."""
        return tuple(pick.of(pick.chosen) for pick in self.picks)

    @property
    def odds(self) -> tuple[float, ...]:
        """The head's estimate for each token; (): it has none. Waits."""
        return tuple(pick.of(pick.odds) for pick in self.picks if pick.odds is not None)

    @property
    def candidates(self) -> list[list[Candidate]]:
        """The `width` best candidates at each position, best first. Waits."""
        return [_ranked(*map(pick.of, pick.few))[: self.width] for pick in self.picks if pick.few is not None]

    def metadata(self, count: int = 1) -> SamplingMetadata:
        """Returns the sampling metadata of its next tokens; of one only if the choice depends on the tokens before."""
        sampler, history = self.follower.sampler, None
        if sampler.needs_history:
            history = [[*self.tokens, *self.chain][-sampler.reach :]]
        begin = len(self.tokens) + len(self.picks)
        return SamplingMetadata(sampler, range(begin, begin + count), history)

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        if self.alternatives is not None:
            return self.alternatives.continuation(chain, self.candidates)
        drawn = self.follower.sampler.params.is_residual and chain
        return Continuation(chain, one_hot(chain) if drawn else None, odds=self.odds)


def choose(chains: Sequence[ChainState], logits: mx.array) -> mx.array:
    """Chooses each chain's next token [R] by its row of logits [R, V]; equal samplers are scored together."""
    groups: dict[Hashable, list[int]] = {}
    for row, chain in enumerate(chains):
        groups.setdefault(chain.follower.sampler.kind, []).append(row)
    parts, order = [], [row for rows in groups.values() for row in rows]
    for rows in groups.values():
        own = logits if len(groups) == 1 else mx.take(logits, mx.array(rows, mx.int32), axis=0)
        step = score([chains[row].metadata() for row in rows], own, at_once=True)
        take(step, [(chains[row], [number]) for number, row in enumerate(rows)])
        parts.append(step.chosen())
    if len(parts) == 1:
        return parts[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return mx.take(mx.concatenate(parts), mx.array(back, mx.int32))


def take(step: Step, places: Sequence[tuple[ChainState, Iterable[int]]]) -> None:
    """Adds each chain's next tokens, from these rows of `step`."""
    chosen, width = step.chosen(), max(chain.width for chain, _ in places)
    few = step.few(width) if width else None
    for chain, rows in places:
        chain.picks += [ChosenToken(row, chosen, few if chain.width else None) for row in rows]


def _ranked(tokens: Sequence[int], scores: Sequence[float]) -> list[Candidate]:
    order = sorted(range(len(tokens)), key=lambda number: -scores[number])
    best = scores[order[0]]
    return [Candidate(tokens[n], best - scores[n]) for n in order if scores[n] > -math.inf]


class AlternativesHistory:
    """The alternatives of a request's latest chain, which update the calibration by its outcome."""

    def __init__(self) -> None:
        self._latest: ChainAlternatives | None = None
        self._begin, self._calibration, self._min_prob = 0, Calibration(), 1.0

    def line(self, follower: FollowedText, tokens: Sequence[int], calibration: Calibration, least: float) -> ChainState:
        """Returns the next chain; with `least` below 1 it becomes a tree of tokens with a higher probability."""
        if self._latest is not None and self._latest.places and (new := tokens[self._begin :]):
            self._latest.teach(self._calibration, new)
        self._latest, self._begin, self._calibration, self._min_prob = None, len(tokens), calibration, least
        return ChainState(follower, tokens, WIDTH, alternatives=self) if least < 1.0 else ChainState(follower, tokens)

    def continuation(self, chain: tuple[int, ...], candidates: Sequence[Sequence[Candidate]]) -> Continuation:
        """Returns the tree of a chain and the best `candidates` at each of its positions."""
        places = [AlternativesAt.of(token, ranked) for token, ranked in zip(chain, candidates, strict=True)]
        self._latest = ChainAlternatives(chain, places)
        return Continuation.of(self._latest.tree(self._calibration, self._min_prob))


class HeadProposer:
    """Drafts with one head, up to `depth` tokens a chain. Drafted pairs stay in the texts after the true ones; the
    caller sets the texts' length."""

    kv_cache: HeadKVCache
    depth: int = sys.maxsize

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        """Reads each chain's last true pairs and chooses its `depth` tokens after them.

        Chains are in the order of their rows. Lazy, unless a sampler needs the tokens; returns vectors that the caller
        checks for being finite.
        """
        raise NotImplementedError


class StepProposer(HeadProposer):
    """Drafts one token of every chain in each forward; the head's own vectors replace the features."""

    kv_cache: PairKVCache

    def __init__(self, head: StepHead, cpu: OrtForward | None = None) -> None:
        self._head, self.kv_cache = head, PairKVCache(head, cpu)

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        return grow(chains, feeds, lambda feeds: self.kv_cache.outputs(feeds, [1] * len(feeds)), self._head.onward)

    def predict(self, tokens: mx.array, features: mx.array) -> mx.array:
        """Returns the likeliest token after each pair of a text, given the pairs up to there [T]."""
        _, logits = self.kv_cache.outputs([PairFeed(self.kv_cache.open(), tokens, features)], [tokens.shape[0]])
        return mx.argmax(logits, axis=-1)


def grow(
    chains: Sequence[ChainState],
    feeds: Sequence[PairFeed],
    forward: Callable[[Sequence[PairFeed]], tuple[mx.array, mx.array]],
    onward: Callable[[mx.array], mx.array],
) -> mx.array:
    """Grows each chain after its feed, by one token in each forward. Returns the feeds' own vectors [R, H].

    `forward` returns the hidden vector and the logits after each feed, `onward` the stand-ins for the next features.
    """
    hidden, logits = forward(feeds)
    read = hidden
    while True:
        chosen = choose(chains, logits)
        rows = [row for row, chain in enumerate(chains) if len(chain.picks) < chain.depth]
        if not rows:
            return read
        if len(rows) < len(chains):
            chains, places = [chains[row] for row in rows], mx.array(rows, mx.int32)
            hidden, chosen = mx.take(hidden, places, axis=0), mx.take(chosen, places, axis=0)
        features = onward(hidden)
        hidden, logits = forward(
            [
                PairFeed(chain.follower.text, chosen[row : row + 1], features[row : row + 1])
                for row, chain in enumerate(chains)
            ]
        )


Ints = np.ndarray[Any, np.dtype[np.int_]]


def walk(chains: Sequence[ChainState], logits: mx.array, hidden: mx.array, link: BlockLink | None) -> None:
    """Chooses each chain's `depth` tokens by its rows of logits [S, V] and vectors [S, H], chain after chain.

    Equal samplers are scored together. Lazy, unless a sampler needs the tokens.
    """
    begins = np.cumsum([0, *(chain.depth for chain in chains)])[:-1].tolist()
    groups: dict[Hashable, list[int]] = {}
    for number, chain in enumerate(chains):
        groups.setdefault(chain.follower.sampler.kind, []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: -chains[number].depth)
        own, places = [chains[number] for number in numbers], [begins[number] for number in numbers]
        if own[0].follower.sampler.needs_history:
            _walk_by_slot(own, places, logits, hidden, link)
        else:
            _walk_at_once(own, places, logits, hidden, link)


def _walk_at_once(
    chains: Sequence[ChainState], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: BlockLink | None
) -> None:
    """Scores the whole block at once, because a choice depends on those before only by `link`."""
    rows = np.concatenate([np.arange(b, b + line.depth) for b, line in zip(begins, chains, strict=True)])
    step = score([line.metadata(line.depth) for line in chains], _rows(logits, rows))
    begins = np.cumsum([0, *(line.depth for line in chains)])[:-1].tolist()
    if link is None:
        take(step, [(line, range(b, b + line.depth)) for b, line in zip(begins, chains, strict=True)])
        return
    tokens, scores = step.few(FEW)
    chain = _Linked(chains, link)
    own = _rows(hidden, rows)
    for slot in range(chains[0].depth):
        at = np.array([begin + slot for begin, line in zip(begins, chains, strict=True) if line.depth > slot])
        chain.choose(_rows(tokens, at), _rows(scores, at), _rows(own, at))


def _walk_by_slot(
    chains: Sequence[ChainState], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: BlockLink | None
) -> None:
    """Scores slot by slot, because penalties and grammars depend on the tokens before."""
    chain = None if link is None else _Linked(chains, link)
    for slot in range(chains[0].depth):
        longer = [line for line in chains if line.depth > slot]
        at = np.array([begin + slot for begin in begins[: len(longer)]])
        step: Step = score([line.metadata() for line in longer], _rows(logits, at))
        if chain is not None:
            chain.choose(*step.few(FEW), _rows(hidden, at))
        else:
            take(step, [(line, [row]) for row, line in enumerate(longer)])


class _Linked:
    """Chains whose tokens are chosen one after the other; deepest first, so that the chains that continue are first."""

    def __init__(self, chains: Sequence[ChainState], link: BlockLink) -> None:
        temp = chains[0].follower.sampler.params.temp
        self._lines, self._link, self._scale = chains, link, 1 / temp if temp else 1.0
        self._before = mx.array([chain.tokens[-1] for chain in chains], mx.int32)
        self._memory = link.begin(len(chains))

    def choose(self, tokens: mx.array, scores: mx.array, hidden: mx.array) -> None:
        """Chooses the next token of the first R chains, from these candidates [R, C]."""
        before = self._before[: tokens.shape[0]]
        odds = self._link.odds(before, hidden)
        gains, self._memory = self._link(before, hidden, tokens, self._memory[: tokens.shape[0]])
        scores = scores + gains * self._scale
        best = mx.argmax(scores, axis=-1, keepdims=True)
        self._before = mx.take_along_axis(tokens, best, axis=-1)[:, 0]
        for row, chain in enumerate(self._lines[: tokens.shape[0]]):
            chain.picks.append(ChosenToken(row, self._before, (tokens, scores) if chain.width else None, odds))


def _rows(array: mx.array, rows: Ints) -> mx.array:
    return mx.take(array, mx.array(rows.astype(np.int32)), axis=0)


class BlockProposer(HeadProposer):
    """Drafts every chain in one forward, then chooses its tokens by a walk along it."""

    def __init__(self, head: BlockHead | MaskedHead, kv_cache: HeadKVCache) -> None:
        self.kv_cache, self.depth = kv_cache, head.depth
        self._link = head.link if isinstance(head, BlockHead) else None

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        hidden, logits = self.kv_cache.slots(feeds, [chain.depth for chain in chains])
        walk(chains, logits, hidden, self._link)
        return hidden

    def predict(self, tokens: mx.array, features: mx.array) -> mx.array:
        """The same as `StepProposer.predict`."""
        sequence, slots = self.kv_cache.open(), []
        for pair in range(tokens.shape[0]):
            feed = PairFeed(sequence, tokens[pair : pair + 1], features[pair : pair + 1])
            slots.append(self.kv_cache.slots([feed], [1]))
            sequence.roll_back(pair + 1)
        hidden, logits = (mx.concatenate(list(parts)) for parts in zip(*slots, strict=True))
        if self._link is None:
            return mx.argmax(logits, axis=-1)
        few = mx.argpartition(-logits, kth=FEW - 1, axis=-1)[:, :FEW]
        gains, _ = self._link(tokens, hidden, few, self._link.begin(tokens.shape[0]))
        best = mx.argmax(mx.take_along_axis(logits, few, axis=-1) + gains, axis=-1, keepdims=True)
        return mx.take_along_axis(few, best, axis=-1)[:, 0]


CheckableProposer = StepProposer | BlockProposer


def proposer_of(head: Head, cpu: OrtForward | None = None) -> CheckableProposer:
    """Returns the proposer of a head's kind; `cpu` computes its forwards. Raises CannotDraft: unknown kind."""
    if isinstance(head, BlockHead):
        return BlockProposer(head, FeatureKVCache(head))
    if isinstance(head, MaskedHead):
        return BlockProposer(head, PairKVCache(head, cpu))
    if isinstance(head, StepHead):
        return StepProposer(head, cpu)
    raise CannotDraft(f"a {type(head).__name__} is not a head of a supported kind")


def wrong_proposers_of(head: Head) -> Iterator[tuple[str, CheckableProposer]]:
    """Yields other proposers, by name, for which a head may have been trained although its checkpoint says not."""
    if isinstance(head, BlockHead):
        other = not head.from_anchor
        name = "the first token drafted by the last one's own row" if other else "the first token drafted by a mask"
        yield name, BlockProposer(head, FeatureKVCache(head, other))
