"""A head as a drafter in the target's process: chains of several requests, in forwards that the requests share.

After each verify the head reads the true pairs of the accepted tokens; drafted pairs are dropped. Tokens are chosen by
the target's own contract (`engine.sampling`), with its noise and its vocabulary. `ChainState` is a committed text and
the tokens chosen after it.

Some heads predict one token after another. Others draft several tokens in one forward; a slot does not know the tokens
of others, so a walk along the block chooses them, with a link each by the token before it. Only the few best candidates
of a linked slot are scored, with the noise included, because noise promotes tokens that are unlikely by themselves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from outrider.drafters.fan_out import Calibration
from outrider.drafters.growth import WIDTH, ChainAlternatives, Continuation
from outrider.drafters.heads.head import NO_NUMBERS, BlockHead, Head, MaskedHead
from outrider.drafters.heads.layers import FEW, BlockLink
from outrider.drafters.heads.pair_kv_cache import FeatureFollower, HeadKVCache, PairFeed, kv_cache_of
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.sampling import Sampler, SamplingMetadata
from outrider.engine.steps import Step, score
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelFault, OutriderError, named_errors
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import Candidate, one_hot

log = logging.getLogger(__name__)


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

    With a `min_prob` below 1 the chain becomes a tree: it has alternatives with a greater probability than that.
    """

    follower: FeatureFollower
    tokens: Sequence[int]
    min_prob: float = 1.0
    depth: int = 0
    picks: list[ChosenToken] = field(default_factory=list)
    proposed: ChainAlternatives | None = None

    @property
    def width(self) -> int:
        """The number of candidates that are kept at each position."""
        return WIDTH if self.min_prob < 1.0 else 0

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

    def continuation(self, calibration: Calibration) -> Continuation:
        """Returns the proposal. Waits."""
        chain = self.chain
        if self.min_prob < 1.0:
            self.proposed = ChainAlternatives.of(chain, self.candidates)
            return self.proposed.tree(calibration, self.min_prob)
        drawn = self.follower.sampler.params.is_residual and chain
        return Continuation(chain, one_hot(chain) if drawn else None, odds=self.odds)


def _by_kind(chains: Sequence[ChainState]) -> list[list[int]]:
    """Returns the indices of the chains whose samplers are equal and score together."""
    groups: dict[Hashable, list[int]] = {}
    for number, chain in enumerate(chains):
        groups.setdefault(chain.follower.sampler.kind, []).append(number)
    return list(groups.values())


def choose(chains: Sequence[ChainState], logits: mx.array) -> mx.array:
    """Chooses each chain's next token [R] by its row of logits [R, V]."""
    groups, parts = _by_kind(chains), []
    for rows in groups:
        own = logits if len(groups) == 1 else _rows(logits, rows)
        step = score([chains[row].metadata() for row in rows], own, at_once=True)
        take(step, [(chains[row], [number]) for number, row in enumerate(rows)])
        parts.append(step.chosen())
    if len(parts) == 1:
        return parts[0]
    return _rows(mx.concatenate(parts), np.argsort(np.concatenate(groups)).tolist())


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


def walk(chains: Sequence[ChainState], logits: mx.array, hidden: mx.array, link: BlockLink | None) -> None:
    """Chooses each chain's `depth` tokens by its rows of logits [S, V] and vectors [S, H], chain after chain.

    Lazy, unless a sampler needs the tokens.
    """
    begins = np.cumsum([0, *(chain.depth for chain in chains)])[:-1].tolist()
    for numbers in _by_kind(chains):
        numbers.sort(key=lambda number: -chains[number].depth)
        _walk([chains[number] for number in numbers], [begins[number] for number in numbers], logits, hidden, link)


def _walk(
    chains: Sequence[ChainState], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: BlockLink | None
) -> None:
    """Chooses the tokens of chains with equal samplers, deepest first.

    The whole block is scored at once, unless the choice depends on the tokens before by penalties or a grammar.
    """
    linked = _Linked(chains, link) if link is not None else None
    at_once = not chains[0].follower.sampler.needs_history
    few: tuple[mx.array, mx.array] | None = None
    if at_once:
        rows = [row for b, line in zip(begins, chains, strict=True) for row in range(b, b + line.depth)]
        step = score([line.metadata(line.depth) for line in chains], _rows(logits, rows))
        starts = np.cumsum([0, *(line.depth for line in chains)])[:-1].tolist()
        if linked is None:
            take(step, [(line, range(b, b + line.depth)) for b, line in zip(starts, chains, strict=True)])
            return
        few = step.few(FEW)
    for slot in range(chains[0].depth):
        longer = [line for line in chains if line.depth > slot]
        at = [begin + slot for begin in begins[: len(longer)]]
        if few is not None and linked is not None:
            own = [start + slot for start in starts[: len(longer)]]
            linked.choose(_rows(few[0], own), _rows(few[1], own), _rows(hidden, at))
            continue
        step = score([line.metadata() for line in longer], _rows(logits, at))
        if linked is not None:
            linked.choose(*step.few(FEW), _rows(hidden, at))
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


def _rows(array: mx.array, rows: list[int]) -> mx.array:
    return mx.take(array, mx.array(rows, mx.int32), axis=0)


class HeadDrafter:
    """Drafts with `head` in the target's process. `note` is a note for users; `agreement` how often the head predicted
    the target's next token in a trial, if there was one."""

    def __init__(
        self,
        head: Head,
        vocab_size: int,
        note: str = "",
        kv_cache: HeadKVCache | None = None,
        agreement: float | None = None,
    ) -> None:
        """`vocab_size`: the target's. `kv_cache`: None for one whose forwards MLX computes."""
        self.head, self.note, self.agreement = head, note, agreement
        self.vocab_size, self.weight_bytes = vocab_size, head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))
        self.kv_cache = kv_cache or kv_cache_of(head)
        self.calibration = Calibration()

    def follow(self, sampling: SamplingParams, constraint: Constraint | None = None) -> FeatureFollower:
        """Returns a collector of the features of a text to draft for."""
        return FeatureFollower(self.kv_cache, self.sampler(sampling, constraint), self.head.reach, self.prompt_cache)

    def keep(self, follower: FeatureFollower, tokens: Sequence[int]) -> None:
        """Keeps the pairs of these committed tokens for later texts."""
        if not self.prompt_cache.wants(tokens):
            return
        try:
            with named_errors("storing the head's state"):
                length = follower.read_all(tokens)
                if length:
                    self.prompt_cache.keep(tokens[:length], follower.save(length))
        except OutriderError as error:
            log.warning("%s; the head will read it again", error)

    def sampler(self, sampling: SamplingParams, constraint: Constraint | None = None) -> Sampler:
        return Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)

    def continuations(self, chains: Sequence[ChainState], depths: Sequence[int]) -> list[Continuation]:
        """Returns the `depths` tokens after each committed text; empty if features are missing. Waits.

        If a joint forward fails, each request is tried alone. One that fails alone gets no further drafts.
        """
        for chain, depth in zip(chains, depths, strict=True):
            room = self.head.context_length - len(chain.tokens)
            depth = min(depth, room, self.head.depth if isinstance(self.head, BlockHead | MaskedHead) else depth)
            chain.depth = depth if chain.follower.is_up_to(chain.tokens) else 0
        # Texts are fed in the order of their rows in the buffers.
        able = sorted((chain for chain in chains if chain.depth > 0), key=lambda chain: chain.follower.text.row)
        if able:
            self._try_to_grow(able)
        return [chain.continuation(self.calibration) for chain in chains]

    def _try_to_grow(self, chains: Sequence[ChainState]) -> None:
        try:
            self._grow(chains)
            return
        except OutriderError as error:
            log.warning("%s%s", error, "; each is tried alone" if len(chains) > 1 else "")
        for chain in chains:
            chain.picks.clear()
            if len(chains) > 1:
                self._try_to_grow([chain])
            else:
                log.warning("the head stops drafting for this request")
                chain.follower.close()

    def _grow(self, chains: Sequence[ChainState]) -> None:
        followers = [chain.follower for chain in chains]
        with named_errors("the head's reading"):
            feeds = [chain.follower.catch_up(chain.tokens) for chain in chains]
        read = [follower.length for follower in followers]
        try:
            with named_errors("the head's forward"):
                begun = [feed.text.length + feed.count * feed.stays for feed in feeds]
                sound = mx.isfinite(self._draft(chains, feeds)).all()
                mx.eval(sound, [pick.arrays for chain in chains for pick in chain.picks])
            if not sound.item():
                raise ModelFault(NO_NUMBERS)
            read = begun
            for follower in followers:
                follower.has_read()
        finally:
            for follower, length in zip(followers, read, strict=True):
                follower.text.roll_back(length)

    def _draft(self, chains: Sequence[ChainState], feeds: Sequence[PairFeed]) -> mx.array:
        """Reads each chain's last true pairs and chooses its `depth` tokens after them, in the order of their rows.

        Drafted pairs stay in the texts after the true ones; the caller sets the texts' length. Lazy, unless a sampler
        needs the tokens; returns the vectors [R, H] of the true pairs, which the caller checks for being finite.
        """
        head = self.head
        if isinstance(head, BlockHead | MaskedHead):
            hidden, logits = self.kv_cache.slots(feeds, [chain.depth for chain in chains])
            walk(chains, logits, hidden, head.link if isinstance(head, BlockHead) else None)
            return hidden
        read, logits = self.kv_cache.slots(feeds, [1] * len(feeds))
        hidden = read
        while True:
            chosen = choose(chains, logits)
            rows = [row for row, chain in enumerate(chains) if len(chain.picks) < chain.depth]
            if not rows:
                return read
            if len(rows) < len(chains):
                chains, hidden, chosen = [chains[row] for row in rows], _rows(hidden, rows), _rows(chosen, rows)
            features, texts = head.onward(hidden), [chain.follower.text for chain in chains]
            feeds = [PairFeed(t, chosen[n : n + 1], features[n : n + 1]) for n, t in enumerate(texts)]
            hidden, logits = self.kv_cache.slots(feeds, [1] * len(feeds))
