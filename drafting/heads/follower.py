"""What a head has heard of one text: the features it has read, and those that wait for their turn.

A target's slot tells the hidden rows of committed tokens as they come. They are read when drafting is first wanted, so
plain decoding costs their keeping only; of many the newest are kept, and those alone that can matter. Where some were
missed, as those of a remembered prompt are, reading begins behind the gap: positions count from there, and the head
sees less of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.drafting.heads.pairs import PairFeed, Reader
from outrider.engine.flat_rows import FlatText
from outrider.engine.sampling import Sampler

MOST_WAITING = 2048
PIECE = 512


class Follower:
    """One text's features. `sampler` chooses what is drafted for it; `reach`: so many of the newest can matter."""

    def __init__(self, texts: Reader, sampler: Sampler, reach: int | None = None) -> None:
        self.sampler = sampler
        self._texts = texts
        self._most, self._kept = reach or MOST_WAITING, reach or MOST_WAITING // 2
        self._text: FlatText | None = None
        self._waiting: list[mx.array] = []
        self.waiting = 0  # how many features are to be read
        self._next = 0  # the position whose feature is to come
        self._closed = False

    def hear(self, position: int, features: mx.array) -> None:
        """The features [R, W] of committed tokens, the first at `position`."""
        if self._closed:
            return
        if position != self._next:
            self._begin_anew()
        self._waiting.append(features)
        self._next = position + features.shape[0]
        self.waiting += features.shape[0]
        if self.waiting > self._most:
            newest = mx.contiguous(mx.concatenate(self._waiting)[-self._kept :])
            mx.async_eval(newest)  # type: ignore[no-untyped-call]  # else it holds on to the older ones
            self._begin_anew()
            self._wait_for(newest)

    @property
    def text(self) -> FlatText:
        """Its place among the head's texts."""
        if self._text is None:
            self._text = self._texts.open()
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

    def close(self) -> None:
        """It hears no more, and gives its place back."""
        self._closed = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._text is not None:
            self._texts.close(self._text)
        self._text, self._waiting, self.waiting = None, [], 0

    def _wait_for(self, features: mx.array) -> None:
        self._waiting, self.waiting = [features], int(features.shape[0])
