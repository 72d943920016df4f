"""A drafter's part in one request: what it knows of the text, what it was asked for, and how far that has come."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.messages import Branches, Drafted

NO_RANKS = range(0)


@dataclass(slots=True)
class Part:
    """It was told the first `known_len` tokens.

    What it was asked for last is of `round`: branches for the outcomes of these `ranks`, likeliest first, or, where
    there are none, a chain; `depth` tokens. `asked_ns`: when; 0: with a text to read, so that the answer's time tells
    nothing. `heard_ns`: when the latest of its `pushes` came. `done`: no more is to come, or nobody waits for it.
    """

    known_len: int = 0
    round: int = 0
    ranks: range = NO_RANKS
    depth: int = 0
    asked_ns: int = 0
    heard_ns: int = 0
    pushes: int = 0
    done: bool = True

    def is_asked(self, round_: int, ranks: range, depth: int, known_len: int, now_ns: int) -> None:
        """It is told the text up to `known_len`, and to do this."""
        self.round, self.ranks, self.depth, self.known_len = round_, ranks, depth, known_len
        self.asked_ns, self.heard_ns, self.pushes, self.done = now_ns, now_ns, 0, False

    def is_awaited(self, message: Branches | Drafted) -> bool:
        """Whether this answers what it was asked for last, which was not answered in full."""
        is_kind = isinstance(message, Branches) == bool(self.ranks)
        return is_kind and not self.done and (message.round, message.base_len) == (self.round, self.known_len)
