"""A head as a drafter in the target's process: the features of each text, and chains in forwards that requests share.

After each verify the head reads the true pairs of the accepted tokens; drafted pairs are dropped. `proposers` grows the
chains. Tokens are chosen by the target's own contract (`engine.sampling`), with its noise and its vocabulary.

`FeatureFollower` collects the features of one text. The target's slot reports the features of committed tokens as they
are computed; they are read when a draft is first requested, so plain decoding only costs their storage. Only the newest
of many are kept. If some are missing, reading begins after the gap: positions count from there, and the head sees less
of the text. For a prompt in the target's prompt cache, the head uses its own prompt cache, or begins after it.

`SavedPairs` holds the pairs that a head read of a text, for later texts with the same beginning. Pair j consists of
tokens j and j + 1, so a common prefix of n tokens has n - 1 usable pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.drafters.fan_out import Calibration
from outrider.drafters.growth import Continuation
from outrider.drafters.heads.head import NO_NUMBERS, Head
from outrider.drafters.heads.pair_kv_cache import HeadKVCache, PairFeed
from outrider.drafters.heads.proposers import ChainState, HeadProposer, proposer_of
from outrider.engine.flat import FlatSequence
from outrider.engine.prompt_cache import LEAST, CachedPrefix, PromptCache, SavedPrefix
from outrider.engine.sampling import Sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelFault, OutriderError, named_errors
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost


@dataclass(frozen=True, slots=True)
class SavedPairs(SavedPrefix):
    """`length` counts tokens. `layers` hold the pairs from `begin` on; earlier features never arrived."""

    begin: int = 0

    def serves(self, length: int) -> int:
        shared = min(length, self.length)
        return shared if shared - 1 - self.begin >= LEAST else 0

    def up_to(self, position: int) -> CachedPrefix:
        """Returns the pairs before this position in the form that the head's texts begin with."""
        count = position - self.begin
        return CachedPrefix(SavedPrefix(count, tuple(self.columns(count))), count)


MOST_WAITING = 2048
PIECE = 512
READ_AGAIN = 16  # cached tokens that the target reads again, so that the head can continue its own prefix


class FeatureFollower:
    """The features of one text. `sampler` chooses its tokens; `reach`: the number of newest features that matter."""

    def __init__(
        self, texts: HeadKVCache, sampler: Sampler, reach: int | None = None, cache: PromptCache | None = None
    ) -> None:
        """`cache` is the head's prompt cache."""
        self.sampler = sampler
        self._kv_cache, self._cache = texts, cache
        self._most, self._kept = reach or MOST_WAITING, reach or MOST_WAITING // 2
        self._text: FlatSequence | None = None
        self._waiting: list[mx.array] = []
        self.waiting = 0  # the number of features to read
        self._begin, self._next = 0, 0  # the positions of its first feature and of the next one
        self._start: CachedPrefix | None = None  # the cached prefix that it begins with
        self._closed = False

    def begin(self, tokens: Sequence[int], length: int, exact: bool) -> int:
        """Returns the position from which the target should report features; it has the first `length` tokens cached.

        `exact`: the target can drop some of them and read them again.
        """
        cached = self._cache.find(tokens) if self._cache is not None else None
        if cached is None or not isinstance(cached.saved, SavedPairs):
            return length
        count = min(cached.length - 1, length)
        if count <= cached.saved.begin or count < length - (READ_AGAIN if exact else 0):
            return length
        self._begin, self._next, self._start = cached.saved.begin, count, cached.saved.up_to(count)
        return count

    def add_features(self, position: int, features: mx.array) -> None:
        """Adds the features [R, W] of committed tokens from `position` on."""
        if self._closed:
            return
        if position != self._next:
            self._restart(position)
        self._waiting.append(features)
        self._next = position + features.shape[0]
        self.waiting += features.shape[0]
        if self.waiting > self._most:
            newest = mx.contiguous(mx.concatenate(self._waiting)[-self._kept :])
            mx.async_eval(newest)  # type: ignore[no-untyped-call]  # otherwise it keeps the older ones alive
            self._restart(self._next - newest.shape[0])
            self._wait_for(newest)

    @property
    def text(self) -> FlatSequence:
        """The text in the head's KV cache."""
        if self._text is None:
            self._text = self._kv_cache.open()
            if self._start is not None:
                self._kv_cache.adopt(self._text, self._start)
                self._start = None
        return self._text

    @property
    def length(self) -> int:
        """The number of pairs read."""
        return self._text.length if self._text is not None else 0

    def is_up_to(self, tokens: Sequence[int]) -> bool:
        """Whether it has the features of all but the last of these tokens, and some of them are unread."""
        return not self._closed and self._next == len(tokens) - 1 and bool(self._waiting)

    def catch_up(self, tokens: Sequence[int]) -> PairFeed:
        """Reads the unread pairs of committed `tokens` except the last piece, which it returns.

        Call `has_read` when that was fed.
        """
        waiting = mx.concatenate(self._waiting)
        while waiting.shape[0] > PIECE:
            self._kv_cache.read(self._feed(tokens, waiting[:PIECE]))
            mx.eval(self._kv_cache.state())
            waiting = waiting[PIECE:]
            self._wait_for(waiting)
        return self._feed(tokens, waiting)

    def has_read(self) -> None:
        """Records that the piece that `catch_up` returned was fed."""
        self._waiting, self.waiting = [], 0

    def _feed(self, tokens: Sequence[int], features: mx.array) -> PairFeed:
        begin = self._next - self.waiting + 1
        behind = mx.array(list(tokens[begin : begin + features.shape[0]]), mx.int32)
        return PairFeed(self.text, behind, features)

    def lendable(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the first of these committed tokens, whose pairs have all been read; none if it began after a gap."""
        return tokens[: self.length + 1] if self.length and not self._begin else ()

    def save(self, length: int) -> SavedPairs:
        """Returns a copy of the pairs of the first `length` tokens."""
        pairs = self._kv_cache.save(self.text, length - 1 - self._begin)
        return SavedPairs(length, pairs.layers, begin=self._begin)

    def read_all(self, tokens: Sequence[int]) -> int:
        """Reads the unread pairs of committed `tokens`. Returns the number of tokens read; 0: none to keep."""
        if self._text is None or self._next >= len(tokens):
            return 0
        if self._waiting:
            self._kv_cache.read(self.catch_up(tokens))
            self.has_read()
        return self._next + 1

    def close(self) -> None:
        """Ignores further features, and frees the text in the KV cache."""
        self._closed = True
        self._restart(0)

    def _restart(self, position: int) -> None:
        if self._text is not None:
            self._kv_cache.close(self._text)
        self._text, self._waiting, self.waiting = None, [], 0
        self._begin, self._start = position, None

    def _wait_for(self, features: mx.array) -> None:
        self._waiting, self.waiting = [features], int(features.shape[0])


log = logging.getLogger(__name__)


class HeadDrafter:
    """Drafts with `head` in the target's process. `note` is a note for users; `agreement` how often the head predicted
    the target's next token in a trial, if there was one."""

    def __init__(
        self,
        head: Head,
        vocab_size: int,
        note: str = "",
        proposer: HeadProposer | None = None,
        agreement: float | None = None,
    ) -> None:
        """`vocab_size`: the target's. `proposer`: None for that of the head's kind."""
        self.head, self.note, self.agreement = head, note, agreement
        self.vocab_size, self.weight_bytes = vocab_size, head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))
        self._proposer = proposer or proposer_of(head)
        self.calibration = Calibration()

    @property
    def kv_cache(self) -> HeadKVCache:
        """The head's KV cache."""
        return self._proposer.kv_cache

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
            chain.depth = min(depth, room, self._proposer.depth) if chain.follower.is_up_to(chain.tokens) else 0
        # Texts are fed in the order of their rows in the buffers.
        able = sorted((chain for chain in chains if chain.depth > 0), key=lambda chain: chain.follower.text.row)
        try:
            self._grow(able)
        except OutriderError as error:
            log.warning("%s%s", error, "; each is tried alone" if len(able) > 1 else "")
            for chain in able:
                self._grow_alone(chain, able)
        return [chain.continuation for chain in chains]

    def _grow_alone(self, chain: ChainState, chains: Sequence[ChainState]) -> None:
        chain.picks.clear()
        try:
            if len(chains) > 1:
                self._grow([chain])
                return
        except OutriderError as error:
            log.warning("%s", error)
        log.warning("the head stops drafting for this request")
        chain.picks.clear()
        chain.follower.close()

    def _grow(self, chains: Sequence[ChainState]) -> None:
        if not chains:
            return
        followers = [chain.follower for chain in chains]
        with named_errors("the head's reading"):
            feeds = [chain.follower.catch_up(chain.tokens) for chain in chains]
        read = [follower.length for follower in followers]
        try:
            with named_errors("the head's forward"):
                begun = [feed.text.length + feed.count * feed.stays for feed in feeds]
                sound = mx.isfinite(self._proposer.draft(chains, feeds)).all()
                mx.eval(sound, [pick.arrays for chain in chains for pick in chain.picks])
            if not sound.item():
                raise ModelFault(NO_NUMBERS)
            read = begun
            for follower in followers:
                follower.has_read()
        finally:
            for follower, length in zip(followers, read, strict=True):
                follower.text.roll_back(length)
