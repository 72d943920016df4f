"""The controller of `--mode auto`: which mode and which K the next rounds use, by expected tokens per second.

It predicts with the formula (see `speedup`), trusts what it measured over what it predicts, tries what it has
not measured lately when the prediction says it might pay, and goes back to AR when nothing does. Shared by all
requests, so it remembers. It has no clock and no chance: what it is told decides what it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.orchestrator.core.estimates import Estimates
from outrider.orchestrator.core.speedup import Costs, Odds, ar_rate, sd_rate, ssd_rate
from outrider.orchestrator.core.tuning import Choice

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
# An episode is long enough to be measured: rounds are kept in one mode for this many.
EPISODE_ROUNDS = 12
# The target decodes plainly by itself; when so many rounds of that are left it is told whether to go on.
NOTICE_ROUNDS = 2
# A mode not measured for this many episodes may be tried again, if the formula puts it within the margin of the best;
# else after so many times as long.
FIRST_RETRY = 6
LAST_RETRY = 192
TRY_MARGIN = 0.9
UNLIKELY = 8
# A try ends early when it has brought less than this share of the best in so many measured rounds.
TRY_ROUNDS = 4
HOPELESS = 0.8
# Whoever is in use stays unless another is better by this much: noise should not make it waver.
STAY_MARGIN = 1.02
# A forecast counts as much as this many milliseconds of measuring.
TUNING_WEIGHT_MS = 100.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How rounds are made: `mode` is ar, sd or ssd; `depth` is K."""

    mode: str
    depth: int


@dataclass(slots=True)
class Record:
    """What a mode was measured to bring, old episodes fading; `retry` grows each time trying it was no use."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    last_episode: int = -1
    retry: int = FIRST_RETRY

    @property
    def rate(self) -> float | None:
        return self.tokens / self.milliseconds if self.milliseconds > 0 else None

    def add(self, tokens: float, milliseconds: float, episode: int) -> None:
        fade = 0.7 if episode != self.last_episode else 1.0
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds
        self.last_episode = episode


@dataclass(slots=True)
class Trial:
    """An episode of a mode that is not known to be the best; `to_beat` is the rate of that one."""

    to_beat: float
    tokens: float = 0.0
    milliseconds: float = 0.0

    def is_hopeless(self, rounds: int) -> bool:
        return rounds >= TRY_ROUNDS and self.tokens < HOPELESS * self.to_beat * self.milliseconds


@dataclass(slots=True)
class Controller:
    """Chooses among `modes`, with K up to `max_depth`. `why` explains the latest choice."""

    estimates: Estimates
    modes: tuple[str, ...]
    max_depth: int
    why: str = "not started"
    _plan: Plan | None = None
    _records: dict[str, Record] = field(default_factory=dict)
    _episode: int = 0
    _rounds: int = 0
    _trial: Trial | None = None

    def start_from(self, choices: Iterable[Choice]) -> None:
        """Takes a tuning's forecasts for a first measurement; real ones soon outweigh them."""
        for choice in choices:
            if choice.mode in self.modes:
                rate = choice.tokens_per_second / 1000
                self._records[choice.mode] = Record(rate * TUNING_WEIGHT_MS, TUNING_WEIGHT_MS, 0)

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
        hopeless = self._trial is not None and self._trial.is_hopeless(self._rounds - 1)
        return self._plan is None or self._rounds >= EPISODE_ROUNDS or hopeless

    def saw_round(self, plan: Plan, tokens: int, milliseconds: float) -> None:
        """What a round under `plan` brought. The first of an episode pays for the change and is not counted."""
        if plan != self._plan:
            return
        self._rounds += 1
        if self._rounds > 1 and milliseconds > 0:
            self._records.setdefault(plan.mode, Record()).add(tokens, milliseconds, self._episode)
            if self._trial is not None:
                self._trial.tokens += tokens
                self._trial.milliseconds += milliseconds

    def predictions(self) -> dict[str, tuple[int, float]]:
        """By mode: the best K and the tokens per millisecond the formula gives it."""
        costs, odds = self._costs(), self._odds()
        depths = [depth for depth in DEPTHS if depth <= self.max_depth] or [self.max_depth]
        found = {"ar": (0, ar_rate(costs))}
        for mode, rate in (("sd", sd_rate), ("ssd", ssd_rate)):
            best = max(depths, key=lambda depth: rate(costs, odds, depth))
            found[mode] = (best, rate(costs, odds, best))
        return {mode: found[mode] for mode in self.modes}

    def _choose(self) -> Plan:
        predicted = self.predictions()
        rates = {mode: record.rate or predicted[mode][1] for mode, record in self._records.items()}
        untried = [mode for mode in self.modes if mode not in rates]
        if untried:
            return self._try(untried[-1], predicted, max(rates.values(), default=0.0), "not measured yet")
        best = max(self.modes, key=lambda mode: rates[mode])
        current = self._plan.mode if self._plan else best
        if rates[best] < rates[current] * STAY_MARGIN:
            best = current
        overdue = self._overdue(best, rates, predicted)
        if overdue is not None:
            return self._try(overdue, predicted, rates[best], f"not measured for {self._age(overdue)} episodes")
        self._trial = None
        return self._take(best, predicted, f"measured {rates[best] * 1000:.0f} tokens/s, the best")

    def _try(self, mode: str, predicted: dict[str, tuple[int, float]], to_beat: float, why: str) -> Plan:
        self._trial = Trial(to_beat)
        return self._take(mode, predicted, why)

    def _overdue(self, best: str, rates: dict[str, float], predicted: dict[str, tuple[int, float]]) -> str | None:
        """A mode worth another try; each try that changes nothing doubles the time until the next."""
        for mode in self.modes:
            record = self._records[mode]
            hopeful = max(predicted[mode][1], rates[mode]) > TRY_MARGIN * rates[best]
            patience = record.retry if hopeful else UNLIKELY * record.retry
            if mode != best and self._age(mode) >= patience:
                record.retry = min(record.retry * 2, LAST_RETRY)
                return mode
        self._records[best].retry = FIRST_RETRY
        return None

    def _take(self, mode: str, predicted: dict[str, tuple[int, float]], why: str) -> Plan:
        self.why = f"{mode}: {why}"
        return Plan(mode, max(predicted[mode][0], 1))

    def _age(self, mode: str) -> int:
        return self._episode - self._records[mode].last_episode

    def _costs(self) -> Costs:
        e = self.estimates
        return Costs(e.ar_ms(), e.verify_ms, e.draft_ms, lambda depth: (depth + 1) * e.depth_ms(), e.turnaround_ms())

    def _odds(self) -> Odds:
        return Odds(self.estimates.drafted.expected_tokens, self.estimates.hit_rate())
