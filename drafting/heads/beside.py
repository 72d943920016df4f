"""What a head thought next best beside a request's chains, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.beside import WIDTH, Place, Said
from outrider.drafting.calibration import Calibration
from outrider.drafting.continuation import Continuation
from outrider.drafting.heads.line import Followed, Line


class BesideLine(Line):
    """A line whose continuation is a tree where others may hold, too, with a probability of more than `least`."""

    __slots__ = ("_begin", "_calibration", "_least", "_said")

    def __init__(self, follower: Followed, tokens: Sequence[int], calibration: Calibration, least: float) -> None:
        super().__init__(follower, tokens, WIDTH)
        self._calibration, self._least, self._begin = calibration, least, len(tokens)
        self._said: Said | None = None

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        places = [Place.of(token, found) for token, found in zip(chain, self.candidates, strict=True)]
        self._said = Said(chain, places)
        return Continuation.of(self._said.tree(self._calibration, self._least))

    def learn(self, committed: Sequence[int]) -> None:
        """What became final behind its text: the calibration counts what held."""
        new = committed[self._begin :]
        if new and self._said is not None and self._said.places:
            self._said.teach(self._calibration, new)


class Turns:
    """A request's turns, each of which learns from the one before."""

    def __init__(self) -> None:
        self._last: Line | None = None

    def line(self, follower: Followed, tokens: Sequence[int], calibration: Calibration, least: float) -> Line:
        """The next one's."""
        if isinstance(self._last, BesideLine):
            self._last.learn(tokens)
        self._last = BesideLine(follower, tokens, calibration, least) if least < 1.0 else Line(follower, tokens)
        return self._last
