"""What a head thought next best beside a request's chains, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from outrider.drafting.beside import WIDTH, Place, with_others
from outrider.drafting.calibration import Calibration
from outrider.drafting.heads.line import Followed, Line
from outrider.drafting.work_ahead import Continuation


class BesideLine(Line):
    """A line whose continuation is a tree where others may hold, too, with a probability of more than `least`."""

    __slots__ = ("_begin", "_calibration", "_least", "_places")

    def __init__(self, follower: Followed, tokens: Sequence[int], calibration: Calibration, least: float) -> None:
        super().__init__(follower, tokens, WIDTH)
        self._calibration, self._least, self._begin = calibration, least, len(tokens)
        self._places: list[Place] = []

    @property
    def continuation(self) -> Continuation:
        chain = self.chain
        self._places = [Place.of(token, found) for token, found in zip(chain, self.candidates, strict=True)]
        tree = with_others(chain, self._places, self._calibration, self._least)
        return Continuation(tree.tokens, None, tree.parents, tree.odds)

    def learn(self, committed: Sequence[int]) -> None:
        """What became final behind its text: the calibration counts what held."""
        new, chain = committed[self._begin :], self.chain
        if not new or not self._places:
            return
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chain, new[:-1], strict=False)))
        others = self._places[accepted].others if accepted < len(self._places) else ()
        rank = others.index(new[accepted]) if new[accepted] in others else None
        self._calibration.learn([place.point for place in self._places[: accepted + 1]], len(chain), accepted, rank)


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
