"""The controller of `--mode auto`: which mode and which K the next rounds use, by expected tokens per second.

It predicts with the formula (see `speedup`), trusts what it measured over what it predicts, tries what it has
not measured lately when the prediction says it might pay, and goes back to AR when nothing does. What a tuning found
best it begins with, and keeps, K and B too, until something else was measured to be better. Shared by all requests, so
it remembers. It has no clock and no chance: what it is told decides what it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.speedup import Costs, Odds, ar_rate, sd_rate, ssd_rate
from outrider.orchestrator.core.tuning import Choice

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
# An episode is long enough to be measured: rounds are kept in one mode for this many.
EPISODE_ROUNDS = 12
# A mode not measured for this many episodes may be tried again, if the formula puts it within the margin of the best;
# else after so many times as long.
FIRST_RETRY = 6
TUNED_RETRY = 24  # of what a tuning has looked at
LAST_RETRY = 192
TRY_MARGIN = 0.9
UNLIKELY = 8
# A try ends early when it has brought less than this share of the best in so many measured rounds.
TRY_ROUNDS = 4
HOPELESS = 0.8
# What an old episode counts when a new one comes.
FADE = 0.7
# Another K than the tuned one is worth a try when the formula, right or wrong about both, sees this much more in it.
OTHER_DEPTH_MARGIN = 1.05
# Whoever is in use stays unless another is better by this much: noise should not make it waver.
STAY_MARGIN = 1.02
# From what a tuning recommends only by this much and the error of both rates: other work comes and goes meanwhile.
HOME_MARGIN = 1.05
# What a tuning says counts as much as this many milliseconds of measuring.
TUNING_WEIGHT_MS = 100.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How rounds are made: `mode` is ar, sd or ssd; `depth` is K, `branches` B."""

    mode: str
    depth: int
    branches: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """What there is to choose from: a mode that keeps to a tuned K and B, or, without a depth, follows the formula."""

    mode: str
    depth: int = 0
    branches: int = 0


@dataclass(slots=True)
class Record:
    """What a way was measured to bring, old episodes fading; `retry` grows each time trying it was no use.

    `source` says where the numbers are from.
    """

    tokens: float = 0.0
    milliseconds: float = 0.0
    last_episode: int = 0
    retry: int = FIRST_RETRY
    source: str = "measured"
    _squares: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def rate(self) -> float | None:
        return self.tokens / self.milliseconds if self.milliseconds > 0 else None

    @property
    def noise(self) -> float:
        """The standard error of `rate`, by how much its rounds differ; what no round was measured of has none."""
        if self.milliseconds <= 0:
            return 0.0
        tokens, mixed, milliseconds = self._squares
        rate = self.tokens / self.milliseconds
        return math.sqrt(max(tokens - 2 * rate * mixed + rate**2 * milliseconds, 0.0)) / self.milliseconds

    def add(self, tokens: float, milliseconds: float, episode: int) -> None:
        fade = FADE if episode != self.last_episode else 1.0
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds
        new = (tokens**2, tokens * milliseconds, milliseconds**2)
        self._squares = tuple(fade * known + more for known, more in zip(self._squares, new, strict=True))
        self.last_episode = episode
        self.source = "measured"


@dataclass(slots=True)
class Attempt:
    """An episode of a way that is not known to be the best; `to_beat` is the rate of that one."""

    to_beat: float
    tokens: float = 0.0
    milliseconds: float = 0.0

    def is_hopeless(self, rounds: int) -> bool:
        return rounds >= TRY_ROUNDS and self.tokens < HOPELESS * self.to_beat * self.milliseconds


@dataclass(slots=True)
class Controller:
    """Chooses among `modes`, with K up to `max_depth` and `branches` where nothing was tuned, for `width` requests at
    once, whose rounds it sees in turn. `why` explains the latest choice.
    """

    estimates: Estimates
    modes: tuple[str, ...]
    max_depth: int
    branches: int = 0
    width: int = 1
    why: str = "not started"
    _plan: Plan | None = None
    _way: Way | None = None
    _home: Way | None = None
    _tuned: dict[str, Way] = field(default_factory=dict)
    _records: dict[Way, Record] = field(default_factory=dict)
    _episode: int = 0
    _rounds: int = 0
    _trial: Attempt | None = None

    def start_from(self, choices: Iterable[Choice]) -> None:
        """Takes a tuning's rates, best first, for first measurements, soon outweighed by real ones, and its K and B."""
        for choice in choices:
            if choice.mode not in self.modes or choice.tokens_per_second <= 0:
                continue
            way = Way(choice.mode, choice.depth, choice.branches if choice.mode == "ssd" else 0)
            source = "measured before" if choice.measured else "a forecast of tune's"
            rate = choice.tokens_per_second / 1000
            self._records[way] = Record(rate * TUNING_WEIGHT_MS, TUNING_WEIGHT_MS, retry=TUNED_RETRY, source=source)
            self._home = self._home or way
            if choice.depth:
                self._tuned[choice.mode] = way
                self._records[Way(choice.mode)] = Record(retry=TUNED_RETRY)

    def plan(self) -> Plan:
        """The plan for the next round."""
        if self._plan is None or self.is_due:
            self._rounds = 0
            self._episode += 1
            self._plan = self._choose()
        return self._plan

    @property
    def is_due(self) -> bool:
        """Whether the next `plan` chooses anew."""
        hopeless = self._trial is not None and self._trial.is_hopeless(self._rounds // self.width - 1)
        return self._plan is None or self._rounds >= EPISODE_ROUNDS * self.width or hopeless

    def saw_round(self, plan: Plan, tokens: int, milliseconds: float) -> None:
        """What a round under `plan` brought. The first of an episode pays for the change and is not counted."""
        if plan != self._plan or self._way is None:
            return
        self._rounds += 1
        if self._rounds > self.width and milliseconds > 0:
            self._records.setdefault(self._way, Record()).add(tokens, milliseconds, self._episode)
            if self._trial is not None:
                self._trial.tokens += tokens
                self._trial.milliseconds += milliseconds

    def _choose(self) -> Plan:
        predicted = self._predictions()
        rates = {way: rate for way, record in self._records.items() if (rate := record.rate) is not None}
        usual = [self._tuned.get(mode, Way(mode)) for mode in self.modes]
        untried = [way for way in usual if way not in rates]
        if untried:
            self._records.setdefault(untried[-1], Record())
            return self._try(untried[-1], predicted, max(rates.values(), default=0.0), "not measured yet")
        best = max(rates, key=lambda way: rates[way])
        current = self._way if self._way in rates else best
        if rates[best] < self._to_leave(current, best, rates[current]):
            best = current
        overdue = self._overdue(best, rates, predicted)
        if overdue is not None:
            age = f"not measured for {self._age(overdue)} episodes"
            return self._try(overdue, predicted, rates[best], age if overdue in rates else "another K may be better")
        self._trial = None
        source = self._records[best].source
        return self._take(best, predicted, f"{rates[best] * 1000:.0f} tokens/s, {source}, the best")

    def _to_leave(self, current: Way, other: Way, rate: float) -> float:
        """What `other` must bring to take the place of `current`: luck alone must not drive it from what was tuned."""
        if current != self._home:
            return rate * STAY_MARGIN
        return rate * HOME_MARGIN + math.hypot(self._records[current].noise, self._records[other].noise)

    def _try(self, way: Way, predicted: dict[Way, tuple[Plan, float]], to_beat: float, why: str) -> Plan:
        self._trial = Attempt(to_beat)
        return self._take(way, predicted, why)

    def _overdue(self, best: Way, rates: dict[Way, float], predicted: dict[Way, tuple[Plan, float]]) -> Way | None:
        """A way worth another try; each try that changes nothing doubles the time until the next."""
        for way, (_, rate) in predicted.items():
            if way == best or not self._differs(way, predicted):
                continue
            record = self._records[way]
            hopeful = max(rate, rates.get(way, 0.0)) > TRY_MARGIN * rates[best]
            patience = record.retry if hopeful else UNLIKELY * record.retry
            if self._age(way) >= patience:
                record.retry = min(record.retry * 2, LAST_RETRY)
                return way
        self._records[best].retry = FIRST_RETRY
        return None

    def _differs(self, way: Way, predicted: dict[Way, tuple[Plan, float]]) -> bool:
        """Whether the formula's own K is, by the formula, clearly better than the tuned one of the same mode."""
        tuned = self._tuned.get(way.mode)
        if tuned is None or way == tuned:
            return True
        (plan, rate), (known, usual) = predicted[way], predicted[tuned]
        return plan.depth != known.depth and rate > OTHER_DEPTH_MARGIN * usual

    def _take(self, way: Way, predicted: dict[Way, tuple[Plan, float]], why: str) -> Plan:
        plan, _ = predicted[way]
        settings = {"ar": "", "sd": f", K = {plan.depth}"}.get(plan.mode, f", K = {plan.depth}, B = {plan.branches}")
        self._way, self.why = way, f"{plan.mode}{settings}: {why}"
        return plan

    def _age(self, way: Way) -> int:
        return self._episode - self._records[way].last_episode

    def _predictions(self) -> dict[Way, tuple[Plan, float]]:
        """By way: its plan, K being the formula's best where none is tuned, and the tokens per millisecond of that."""
        costs, odds = self._costs(), self._odds()
        depths = [depth for depth in DEPTHS if depth <= self.max_depth] or [self.max_depth]
        rates: dict[str, Callable[[int], float]] = {
            "ar": lambda depth: ar_rate(costs),
            "sd": lambda depth: sd_rate(costs, odds, depth),
            "ssd": lambda depth: ssd_rate(costs, odds, depth),
        }
        found = {}
        for way in (*self._tuned.values(), *map(Way, self.modes)):
            rate = rates[way.mode]
            depth = way.depth or (1 if way.mode == "ar" else max(depths, key=rate))
            found[way] = (Plan(way.mode, depth, way.branches or self.branches), rate(depth))
        return found

    def _costs(self) -> Costs:
        e = self.estimates
        return Costs(e.ar_ms(), e.verify_ms, e.draft_ms, lambda depth: (depth + 1) * e.depth_ms(), e.turnaround_ms())

    def _odds(self) -> Odds:
        return Odds(self.estimates.drafted.expected_tokens, self.estimates.hit_rate())
