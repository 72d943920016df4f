"""What a way of making rounds was measured to bring, and a try of one. Tokens per millisecond; knows no formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

# What an old episode counts when a new one comes: of a request alone, and in company, where others run by then.
FADE, FADE_IN_COMPANY = 0.9, 0.7
# What is believed of a way counts as much as this many milliseconds of measuring.
BELIEF_MS = 150.0
# A round counts as so many usual ones at most: what took longer was held up by something else. Of few nobody knows yet.
HELD_UP, FEW = 4.0, 8
# A try ends early when it has brought less than this share of the best.
HOPELESS = 0.8
# Where a record's numbers are from, in words for people.
MEASURED, MEASURED_BEFORE = "measured", "measured before"


@dataclass(slots=True)
class Record:
    """What a way was measured to bring, and what the formula had `promised` meanwhile, old episodes fading; `told`: a
    rate from elsewhere. `waits`: how many times as long as at first until its next try.

    `source` says where the numbers are from; empty: there are none.
    """

    tokens: float = 0.0
    milliseconds: float = 0.0
    promised: float = 0.0
    rounds: float = 0.0
    told: float = 0.0
    last_episode: float = 0.0
    waits: int = 1
    source: str = ""
    _squares: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def rate(self) -> float | None:
        """What it brought, in whatever texts."""
        told_ms = BELIEF_MS if self.told else 0.0
        measured_ms = told_ms + self.milliseconds
        return (self.told * told_ms + self.tokens) / measured_ms if measured_ms > 0 else None

    def rate_where(self, formula: float) -> float:
        """What it should bring where the formula says this: at first what it was told or the formula itself, then by
        and by as many times the formula as in its own rounds."""
        believed = self.told or formula
        if self.promised <= 0:
            return believed
        own = formula * self.tokens / self.promised
        return (believed * BELIEF_MS + own * self.milliseconds) / (BELIEF_MS + self.milliseconds)

    @property
    def noise(self) -> float:
        """The standard error of its own rate, by how much its rounds differ; what no round was measured of has none."""
        if self.milliseconds <= 0:
            return 0.0
        tokens, mixed, milliseconds = self._squares
        rate = self.tokens / self.milliseconds
        return math.sqrt(max(tokens - 2 * rate * mixed + rate**2 * milliseconds, 0.0)) / self.milliseconds

    def elsewhere(self) -> Record:
        """What it says of texts of another kind."""
        part = min(BELIEF_MS / self.milliseconds, 1.0) if self.milliseconds > 0 else 0.0
        known = Record(self.tokens * part, self.milliseconds * part, self.promised * part)
        return replace(known, told=self.told, source=self.source)

    def counted(self, milliseconds: float) -> float:
        """What a round counts that took so long."""
        return min(milliseconds, HELD_UP * self.milliseconds / self.rounds) if self.rounds >= FEW else milliseconds

    def add(self, tokens: float, milliseconds: float, promised: float, episode: float, each: bool) -> None:
        """`each`: what is known fades with each episode since, else with one however long ago it was."""
        age = episode - self.last_episode
        fade = FADE_IN_COMPANY**age if each else FADE ** min(age, 1.0)
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds
        self.promised = self.promised * fade + promised
        self.rounds = self.rounds * fade + 1
        new = (tokens**2, tokens * milliseconds, milliseconds**2)
        self._squares = tuple(fade * known + more for known, more in zip(self._squares, new, strict=True))
        self.last_episode = episode
        self.source = MEASURED


@dataclass(frozen=True, slots=True)
class Trying:
    """How tries are made. `warm_up`: the first rounds of a way pay for the change and are not counted. `rounds`:
    so many that are counted may end a try early, where it stays below the best by `errors` of its own rate.

    `patience`: for so many episodes what promises the share `margin` of the best is left alone, what promises less
    `unlikely` times as many.
    """

    warm_up: int
    rounds: int
    errors: float
    patience: int
    margin: float
    unlikely: int


@dataclass(slots=True)
class Attempt:
    """A try of a way that is not known to be the best; `to_beat` is the rate of that one. `seen`: of its own."""

    to_beat: float
    trying: Trying
    seen: Record = field(default_factory=Record)

    @property
    def is_better(self) -> bool:
        return self.seen.rate is not None and self.seen.rate > self.to_beat

    def is_hopeless(self, rounds: int) -> bool:
        if rounds < self.trying.rounds or self.seen.rate is None:
            return False
        likely = self.seen.rate + (self.trying.errors * self.seen.noise if self.seen.noise else math.inf)
        return self.seen.rate < HOPELESS * self.to_beat or likely < self.to_beat
