"""How chains come of a head: one token after another, or several in one forward.

`HeadProposer`: how chains come of a head, which differs with its kind: one token after another, or several in one
forward.

`StepProposer`: chains of a head that drafts one token after another, its own vectors for features.

`BlockProposer`: chains of a head that drafts several tokens in one forward, which know nothing of each other at first.

The coupled walk along a block: each slot's token by the target's own contract, by the token before it where linked.

Of a linked slot's tokens a few are looked at: those that are best with the noise already in, for noise promotes tokens
that are unlikely by themselves.

`FeatureKVCache`: what a block head remembers of all its texts: their features; and one forward over blocks behind many
of them. A block's own keys and values are written behind the features and left there for what comes next to overwrite.

`proposer_of`: which way of drafting belongs to a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.chain_state import ChainState, ChosenToken, choose, take
from outrider.drafters.heads.head import BlockHead, Head, MaskedHead, StepHead
from outrider.drafters.heads.layers import FEW, BlockLink
from outrider.drafters.heads.pair_kv_cache import HeadKVCache, MaskedPairKVCache, NumpyHead, PairFeed, PairKVCache
from outrider.engine.flat import FlatRows, Segment
from outrider.engine.steps import Step, score
from outrider.protocol.errors import CannotDraft


class HeadProposer(Protocol):
    """Drafts with one head. What it feeds behind true pairs stays in the texts; their length is the caller's."""

    @property
    def kv_cache(self) -> HeadKVCache:
        """What the head remembers."""
        ...

    @property
    def depth(self) -> int:
        """The most tokens of a chain."""
        ...

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        """Reads each line's last true pairs and chooses its chain behind them, its `depth` tokens.

        Lines stand in the order of their rows. Lazy where nothing looks at tokens; what comes back tells, evaluated,
        whether the vectors were numbers.
        """
        ...


class CheckableProposer(HeadProposer, Protocol):
    """One whose pairing can be tried."""

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        """The likeliest token behind each pair of a text by what it has read up to there, [T]."""
        ...


class StepProposer:
    """A `HeadProposer`: one token of every chain a forward."""

    depth = sys.maxsize

    def __init__(self, head: StepHead, numpy: NumpyHead | None = None) -> None:
        self._head, self.kv_cache = numpy or head, PairKVCache(head, numpy)

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        return grow(chains, feeds, self.kv_cache.forward, self._head.logits, self._head.onward)

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        hidden = self.kv_cache.hidden([PairFeed(self.kv_cache.open(), tokens, features)])
        return mx.argmax(self._head.logits(hidden), axis=-1)


def grow(
    chains: Sequence[ChainState],
    feeds: Sequence[PairFeed],
    forward: Callable[[Sequence[PairFeed]], mx.array],
    logits: Callable[[mx.array], mx.array],
    onward: Callable[[mx.array], mx.array],
) -> mx.array:
    """Each line's chain behind its feed, one token of all a forward; what came of the feeds themselves, [R, H].

    `forward` gives the hidden vector behind each feed, `onward` the features that stand in for those to come.
    """
    hidden = read = forward(feeds)
    while True:
        chosen = choose(chains, logits(hidden))
        rows = [row for row, chain in enumerate(chains) if len(chain.picks) < chain.depth]
        if not rows:
            return read
        if len(rows) < len(chains):
            chains, places = [chains[row] for row in rows], mx.array(rows, mx.int32)
            hidden, chosen = mx.take(hidden, places, axis=0), mx.take(chosen, places, axis=0)
        features = onward(hidden)
        hidden = forward(
            [
                PairFeed(chain.follower.text, chosen[row : row + 1], features[row : row + 1])
                for row, chain in enumerate(chains)
            ]
        )


Ints = np.ndarray[Any, np.dtype[np.int_]]


def walk(chains: Sequence[ChainState], logits: mx.array, hidden: mx.array, link: BlockLink | None) -> None:
    """Chooses each line's `depth` tokens by its rows of logits [S, V] and vectors [S, H], one line's after the other's.

    Those that ask for the same are scored together. Lazy where nothing looks at tokens.
    """
    begins = np.cumsum([0, *(chain.depth for chain in chains)])[:-1].tolist()
    groups: dict[Hashable, list[int]] = {}
    for number, chain in enumerate(chains):
        groups.setdefault(chain.follower.sampler.kind, []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: -chains[number].depth)
        own, places = [chains[number] for number in numbers], [begins[number] for number in numbers]
        if own[0].follower.sampler.needs_history:
            _walk_scoring(own, places, logits, hidden, link)
        else:
            _walk_scored(own, places, logits, hidden, link)


def _walk_scored(
    chains: Sequence[ChainState], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: BlockLink | None
) -> None:
    """The whole block is scored at once, for no choice depends on those before but by `link`."""
    rows = np.concatenate([np.arange(b, b + line.depth) for b, line in zip(begins, chains, strict=True)])
    step = score([line.asked(line.depth) for line in chains], _rows(logits, rows))
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


def _walk_scoring(
    chains: Sequence[ChainState], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: BlockLink | None
) -> None:
    """Slot by slot, for penalties and grammars look at the tokens before."""
    chain = None if link is None else _Linked(chains, link)
    for slot in range(chains[0].depth):
        able = [line for line in chains if line.depth > slot]
        at = np.array([begin + slot for begin in begins[: len(able)]])
        step: Step = score([line.asked() for line in able], _rows(logits, at))
        if chain is not None:
            chain.choose(*step.few(FEW), _rows(hidden, at))
        else:
            take(step, [(line, [row]) for row, line in enumerate(able)])


class _Linked:
    """Chains whose tokens are chosen behind one another; deepest first, so that those which go on stand in front."""

    def __init__(self, chains: Sequence[ChainState], link: BlockLink) -> None:
        temp = chains[0].follower.sampler.params.temp
        self._lines, self._link, self._scale = chains, link, 1 / temp if temp else 1.0
        self._before = mx.array([chain.tokens[-1] for chain in chains], mx.int32)
        self._memory = link.begin(len(chains))

    def choose(self, tokens: mx.array, scores: mx.array, hidden: mx.array) -> None:
        """One more of the first R chains, of these candidates [R, C]."""
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


class BlockKVCache(HeadKVCache, Protocol):
    """Texts behind which several tokens are drafted at once."""

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads them all, in the order of their rows; the hidden vectors of so many tokens behind each [sum, H]."""
        ...


class BlockProposer:
    """A `HeadProposer`: every chain in one forward, then a walk along it where its tokens are `link`ed."""

    def __init__(
        self,
        head: BlockHead | MaskedHead,
        texts: BlockKVCache,
        link: BlockLink | None = None,
        numpy: NumpyHead | None = None,
    ) -> None:
        """`numpy` makes its logits."""
        self._head, self._slots, self._link = head, texts, link
        self._logits = (numpy or head).logits

    @property
    def kv_cache(self) -> HeadKVCache:
        return self._slots

    @property
    def depth(self) -> int:
        return self._head.depth

    def draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        hidden = self._slots.slots(feeds, [chain.depth for chain in chains])
        walk(chains, self._logits(hidden), hidden, self._link)
        return hidden

    def foretell(self, tokens: mx.array, features: mx.array) -> mx.array:
        sequence, found = self._slots.open(), []
        for pair in range(tokens.shape[0]):
            feed = PairFeed(sequence, tokens[pair : pair + 1], features[pair : pair + 1])
            found.append(self._slots.slots([feed], [1]))
            sequence.roll_back(pair + 1)
        hidden = mx.concatenate(found)
        logits = self._logits(hidden)
        if self._link is None:
            return mx.argmax(logits, axis=-1)
        few = mx.argpartition(-logits, kth=FEW - 1, axis=-1)[:, :FEW]
        gains, _ = self._link(tokens, hidden, few, self._link.begin(tokens.shape[0]))
        best = mx.argmax(mx.take_along_axis(logits, few, axis=-1) + gains, axis=-1, keepdims=True)
        return mx.take_along_axis(few, best, axis=-1)[:, 0]


class FeatureKVCache(FlatRows):
    """The texts of one head. A text's `length` counts its features."""

    def __init__(self, head: BlockHead, from_anchor: bool | None = None) -> None:
        """`from_anchor`: in place of what the head says of itself."""
        super().__init__(head)
        self._head = head
        self._masks_more = 0 if (head.from_anchor if from_anchor is None else from_anchor) else 1

    def read(self, feed: PairFeed) -> None:
        self._read([feed])

    def slots(self, feeds: Sequence[PairFeed], depths: Sequence[int]) -> mx.array:
        """Reads them all, in the order of their rows; the hidden vectors of so many tokens behind each [sum, H]."""
        self._read(feeds)
        counts = [depth + self._masks_more for depth in depths]
        texts = [feed.text for feed in feeds]
        self._frame.begin([Segment(t.row, t.length, n, whole=True) for t, n in zip(texts, counts, strict=True)])
        blocks = [self._block(feed, count) for feed, count in zip(feeds, counts, strict=True)]
        places = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        hidden = self._head.block(mx.concatenate(blocks)[None], mx.array(places), self._caches)[0]
        if not self._masks_more:
            return hidden
        return mx.take(hidden, mx.array(np.flatnonzero(places).astype(np.int32)), axis=0)

    def _read(self, feeds: Sequence[PairFeed]) -> None:
        self._frame.begin([Segment(feed.text.row, feed.text.length, feed.count) for feed in feeds])
        self._head.read(mx.concatenate([feed.features for feed in feeds])[None], self._caches)
        for feed in feeds:
            feed.text.length += feed.count

    def _block(self, feed: PairFeed, count: int) -> mx.array:
        masks = mx.full((count - 1,), self._head.mask_token, mx.int32)
        return mx.concatenate([feed.tokens[-1:], masks])


def proposer_of(head: Head, numpy: NumpyHead | None = None) -> CheckableProposer:
    """`numpy` makes its forwards of few pairs. Raises CannotDraft: it is of no known kind."""
    if isinstance(head, BlockHead):
        return BlockProposer(head, FeatureKVCache(head), head.link)
    if isinstance(head, MaskedHead):
        return BlockProposer(head, MaskedPairKVCache(head, numpy), numpy=numpy)
    if isinstance(head, StepHead):
        return StepProposer(head, numpy)
    raise CannotDraft(f"nothing here drafts with a {type(head).__name__}")


def wrong_proposers_of(head: Head) -> Iterator[tuple[str, CheckableProposer]]:
    """Ways that a head may have been meant to draft in, though its checkpoint does not say so, by name."""
    if isinstance(head, BlockHead):
        other = not head.from_anchor
        name = "the first token drafted by the last one's own row" if other else "the first token drafted by a mask"
        yield name, BlockProposer(head, FeatureKVCache(head, other), head.link)
