"""What a head has heard of one text: the features it has read, and those that wait for their turn.

A target's slot tells the hidden rows of committed tokens as they come. They are read when drafting is first wanted, so
plain decoding costs their keeping only; of many the newest are kept, and those alone that can matter. Where some were
missed, reading begins behind the gap: positions count from there, and the head sees less of the text. Of a prompt that
the target remembers the head remembers its own part, or goes without.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.drafting.heads.pairs import PairFeed, Reader
from outrider.drafting.heads.remembered import SavedPairs
from outrider.engine.flat_rows import FlatText
from outrider.engine.prompt_cache import PromptCache, Start
from outrider.engine.sampling import Sampler

MOST_WAITING = 2048
PIECE = 512
READ_AGAIN = 16  # tokens that the target reads though it remembers them, where the head would miss all before them else


class Follower:
    """One text's features. `sampler` chooses what is drafted for it; `reach`: so many of the newest can matter."""

    def __init__(
        self, texts: Reader, sampler: Sampler, reach: int | None = None, cache: PromptCache | None = None
    ) -> None:
        """`cache`: what the head remembers of other texts."""
        self.sampler = sampler
        self._texts, self._cache = texts, cache
        self._most, self._kept = reach or MOST_WAITING, reach or MOST_WAITING // 2
        self._text: FlatText | None = None
        self._waiting: list[mx.array] = []
        self.waiting = 0  # how many features are to be read
        self._begin, self._next = 0, 0  # the positions of its first feature and of the one to come
        self._start: Start | None = None  # what it begins with, when it begins
        self._closed = False

    def begin(self, tokens: Sequence[int], length: int, exact: bool) -> int:
        """Of these tokens the target remembers so many; from which on their rows should be told.

        `exact`: the target can forget some of them, and read them again.
        """
        found = self._cache.find(tokens) if self._cache is not None else None
        if found is None or not isinstance(found.saved, SavedPairs):
            return length
        known = min(found.length - 1, length)
        if known <= found.saved.begin or known < length - (READ_AGAIN if exact else 0):
            return length
        self._begin, self._next, self._start = found.saved.begin, known, found.saved.up_to(known)
        return known

    def hear(self, position: int, features: mx.array) -> None:
        """The features [R, W] of committed tokens, the first at `position`."""
        if self._closed:
            return
        if position != self._next:
            self._begin_anew(position)
        self._waiting.append(features)
        self._next = position + features.shape[0]
        self.waiting += features.shape[0]
        if self.waiting > self._most:
            newest = mx.contiguous(mx.concatenate(self._waiting)[-self._kept :])
            mx.async_eval(newest)  # type: ignore[no-untyped-call]  # else it holds on to the older ones
            self._begin_anew(self._next - newest.shape[0])
            self._wait_for(newest)

    @property
    def text(self) -> FlatText:
        """Its place among the head's texts."""
        if self._text is None:
            self._text = self._texts.open()
            if self._start is not None:
                self._texts.adopt(self._text, self._start)
                self._start = None
        return self._text

    @property
    def length(self) -> int:
        """How many pairs have been read."""
        return self._text.length if self._text is not None else 0

    def is_up_to(self, tokens: Sequence[int]) -> bool:
        """Whether it has heard of all but the last of these, which has no feature yet, and has something to read."""
        return not self._closed and self._next == len(tokens) - 1 and bool(self._waiting)

    def catch_up(self, tokens: Sequence[int]) -> PairFeed:
        """The last piece of what is to be read of committed `tokens`; what comes before it is read here.

        `has_read` is to be said once it was fed.
        """
        waiting = mx.concatenate(self._waiting)
        while waiting.shape[0] > PIECE:
            self._texts.read(self._feed(tokens, waiting[:PIECE]))
            mx.eval(self._texts.state())
            waiting = waiting[PIECE:]
            self._wait_for(waiting)
        return self._feed(tokens, waiting)

    def has_read(self) -> None:
        """What `catch_up` gave has been fed."""
        self._waiting, self.waiting = [], 0

    def _feed(self, tokens: Sequence[int], features: mx.array) -> PairFeed:
        begin = self._next - self.waiting + 1
        behind = mx.array(list(tokens[begin : begin + features.shape[0]]), mx.int32)
        return PairFeed(self.text, behind, features)

    def lendable(self, tokens: Sequence[int]) -> Sequence[int]:
        """The first of these committed tokens of which all pairs have been read; none where it began behind a gap."""
        return tokens[: self.length + 1] if self.length and not self._begin else ()

    def save(self, length: int) -> SavedPairs:
        """A copy of what was read of the first `length` tokens."""
        pairs = self._texts.save(self.text, length - 1 - self._begin)
        return SavedPairs(length, pairs.layers, begin=self._begin)

    def read_all(self, tokens: Sequence[int]) -> int:
        """Reads what waits of committed `tokens`; how many of them it knows then, 0: nothing that could be kept."""
        if self._text is None or self._next >= len(tokens):
            return 0
        if self._waiting:
            self._texts.read(self.catch_up(tokens))
            self.has_read()
        return self._next + 1

    def close(self) -> None:
        """It hears no more, and gives its place back."""
        self._closed = True
        self._begin_anew(0)

    def _begin_anew(self, position: int) -> None:
        if self._text is not None:
            self._texts.close(self._text)
        self._text, self._waiting, self.waiting = None, [], 0
        self._begin, self._start = position, None

    def _wait_for(self, features: mx.array) -> None:
        self._waiting, self.waiting = [features], int(features.shape[0])
