"""The policy of `--mode auto`: which mode, K and B the next rounds use, by the tokens per second that all requests
bring.

With one request, an arm counts by the formula (`forecasts`) times the formula's error in that arm's own rounds
(`ArmRecord`), and other arms are tried seldom. With several, the policy begins with a few rounds of AR, which cost
little and show what the others must beat; it trusts measurements over predictions, tries an unmeasured arm when the
prediction says that it pays, and returns to AR when nothing does. What a tuning found best for one request it begins
with, and keeps, K and B too, until another arm was measured to be better. All requests of a kind follow one plan, so
plain decoding is plain for all. Measurements are kept by load, since the best arm may differ with each. Takes no clock
and draws nothing at random: the same observations give the same plans.

`ArmRecord`: what an arm was measured to bring. `ArmTrial`: a try of one. Tokens per millisecond; knows no formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecast, Forecasts, RoundPlan
from outrider.orchestrator.core.policy.text_profiles import TextAcceptance
from outrider.orchestrator.core.policy.tuning import TunedArm
from outrider.protocol.heads import NGRAM

# What an old episode counts when a new one comes: of a request alone, and with other requests, where others run by
# then.
FADE, FADE_TOGETHER = 0.9, 0.7
# What is believed of a way counts as much as this many milliseconds of measuring.
BELIEF_MS = 250.0
# A round counts as so many usual ones at most: what took longer was held up by something else. Not known of a few.
HELD_UP, FEW = 4.0, 8
# A try ends early when it has brought less than this share of the best.
HOPELESS = 0.8
# Where a record's numbers are from, in words for people.
MEASURED, MEASURED_BEFORE = "measured", "measured before"


@dataclass(slots=True)
class ArmRecord:
    """What a way was measured to bring, and what the formula had `promised` meanwhile, old episodes fading;
    `prior_rate`: a rate from elsewhere. `waits`: how many times as long as at first until its next try.

    `source` says where the numbers are from; empty: there are none.
    """

    tokens: float = 0.0
    milliseconds: float = 0.0
    promised: float = 0.0
    rounds: float = 0.0
    prior_rate: float = 0.0
    last_episode: float = 0.0
    waits: int = 1
    source: str = ""
    _squares: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def rate(self) -> float | None:
        """What it brought, in whatever texts."""
        told_ms = BELIEF_MS if self.prior_rate else 0.0
        measured_ms = told_ms + self.milliseconds
        return (self.prior_rate * told_ms + self.tokens) / measured_ms if measured_ms > 0 else None

    def rate_where(self, formula: float) -> float:
        """What it should bring where the formula says this: at first the prior rate or the formula itself, then by
        and by as many times the formula as in its own rounds."""
        believed = self.prior_rate or formula
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

    def elsewhere(self) -> ArmRecord:
        """What it says of texts of another kind."""
        part = min(BELIEF_MS / self.milliseconds, 1.0) if self.milliseconds > 0 else 0.0
        known = ArmRecord(self.tokens * part, self.milliseconds * part, self.promised * part)
        return replace(known, prior_rate=self.prior_rate, source=self.source)

    def counted(self, milliseconds: float) -> float:
        """What a round counts that took so long."""
        return min(milliseconds, HELD_UP * self.milliseconds / self.rounds) if self.rounds >= FEW else milliseconds

    def add(self, tokens: float, milliseconds: float, promised: float, episode: float, each: bool) -> None:
        """`each`: what is known fades with each episode since, else with one however long ago it was."""
        age = episode - self.last_episode
        fade = FADE_TOGETHER**age if each else FADE ** min(age, 1.0)
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds
        self.promised = self.promised * fade + promised
        self.rounds = self.rounds * fade + 1
        new = (tokens**2, tokens * milliseconds, milliseconds**2)
        self._squares = tuple(fade * known + more for known, more in zip(self._squares, new, strict=True))
        self.last_episode = episode
        self.source = MEASURED


@dataclass(frozen=True, slots=True)
class TrialRules:
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
class ArmTrial:
    """A try of a way that is not known to be the best; `to_beat` is the rate of that one. `seen`: of its own."""

    to_beat: float
    rules: TrialRules
    seen: ArmRecord = field(default_factory=ArmRecord)

    @property
    def is_better(self) -> bool:
        return self.seen.rate is not None and self.seen.rate > self.to_beat

    def is_hopeless(self, rounds: int) -> bool:
        if rounds < self.rules.rounds or self.seen.rate is None:
            return False
        likely = self.seen.rate + (self.rules.errors * self.seen.noise if self.seen.noise else math.inf)
        return self.seen.rate < HOPELESS * self.to_beat or likely < self.to_beat


# An episode is long enough to be measured: rounds are kept in one mode for this many. What was measured in fewer than
# `KNOWN` is asked about after each few.
EPISODE_ROUNDS, FEW_ROUNDS, KNOWN = 12, 4, 36
# Rounds beside the reading of a prompt say little of a way. Where so many in a row were, no others will come.
LONGEST_READING = 6 * EPISODE_ROUNDS
# The wait for another try of a way that was no use grows so many times at most.
LONGEST_WAIT = 32
# Another K than the tuned one is worth a try when the formula, right or wrong about both, sees this much more in it.
OTHER_DEPTH_MARGIN = 1.05
# With many requests speculation delays the reading of prompts, and texts end one by one, the last in few rows: while
# all run it has to bring so many times as much as plain decoding for each time that there are twice as many as two.
DEARER = 1.025
# Whoever is in use stays unless another is better by this much: noise should not make it waver.
STAY_MARGIN = 1.02
# From what a tuning recommends only by this much and the error of both rates: other work comes and goes meanwhile.
HOME_MARGIN = 1.05
# The formula's error about a way at one load is half of it, by factors, at the next; more than this is another matter.
MOST_ERROR = 1.5
# With other requests it is half of it after so many episodes, too: by then others run.
HALF_FORGOTTEN = 24
# What was never measured has to promise so much more than what a tuning or an earlier server recommends.
UNKNOWN_MARGIN = 1.1

# With other requests drafters have several texts to catch up with, and several requests show as much in fewer rounds; a
# try is as dear as all of them. A crowd ends after a few episodes, so what may be better does not wait for the next.
ALONE, TOGETHER = TrialRules(1, 4, math.inf, 24, 0.9, 2), TrialRules(2, 2, 1.0, 6, 0.95, 32)


@dataclass(slots=True)
class Policy:
    """Chooses among `modes`, SD by each of `others`, who draft without a draft worker, and SSD with those of the
    target's process beside draft workers; with K up to `max_depth` and B up to `branches`, or, `fixed`, just that,
    where nothing was tuned. `odds`: of its kind of text, for a request alone. `why` explains the latest choice.
    """

    estimates: Estimates
    modes: tuple[str, ...]
    max_depth: int
    branches: int = 0
    fixed: bool = False
    others: tuple[str, ...] = ()
    odds: TextAcceptance | None = None
    why: str = "not started"
    _active: int = 1
    _plan: RoundPlan | None = None
    _arm: Arm | None = None
    _promised: float = 0.0
    _counted_ms: float = 0.0
    _home: Arm | None = None
    _tuned: dict[Arm, Arm] = field(default_factory=dict)
    _by_load: dict[int, dict[Arm, ArmRecord]] = field(default_factory=dict)
    _episode: float = 0.0
    _rounds: int = 0
    _trial: ArmTrial | None = None
    _is_first: bool = False
    _reading: bool = False
    _leaving: bool = False
    _read_beside: int = 0
    _warm_up: int = 0

    def start_from(self, choices: Iterable[TunedArm]) -> None:
        """Takes rates, best first, for first measurements, soon outweighed by real ones, and a tuning's K and B."""
        for choice in choices:
            branches = choice.branches if choice.mode == "ssd" else 0
            arm = Arm(choice.mode, choice.depth, branches, choice.drafter)
            if arm.kind not in self._kinds or choice.tokens_per_second <= 0:
                continue
            source = MEASURED_BEFORE if choice.measured else "a forecast of tune's"
            if choice.depth and self._tuned.setdefault(arm.kind, arm) != arm:
                continue  # of an older tuning
            rate, records = choice.tokens_per_second / 1000, self._by_load.setdefault(_load(choice.at_once), {})
            records[arm] = ArmRecord(prior_rate=rate, source=source)
            if choice.at_once == 1 and self._home is None:
                self._home = arm

    def start_like(self, other: Policy) -> None:
        """Takes what texts of another kind taught of the formula's errors, soon outweighed by its own."""
        self._by_load[0] = {arm: record.elsewhere() for arm, record in other._by_load.get(0, {}).items()}

    @property
    def has_records(self) -> bool:
        """Whether it began from anything, or has measured anything."""
        return any(self._by_load.values())

    def learned(self) -> Iterator[TunedArm]:
        """What was measured here, as `start_from` takes it."""
        for load, records in self._by_load.items():
            for arm, record in records.items():
                if record.rate is not None and record.source == MEASURED:
                    rate = 1000 * record.rate
                    yield TunedArm(arm.mode, arm.depth, arm.branches, rate, True, 1 << load, arm.drafter)

    def set_load(self, active: int, reading: bool = False) -> None:
        """So many requests run at once now; where that is another load, what was measured at that one decides.

        `reading`: some prompt is still read. With other requests nothing is tried until it is.
        """
        if _load(active) != _load(self._active):
            self._plan, self._leaving = None, active < self._active
        self._active = max(active, 1)
        self._reading = reading and active > 1

    def plan(self) -> RoundPlan:
        """The plan for the next round. A load at which no round was made was no episode."""
        if self._plan is None or self.is_due:
            self._episode += self._rounds / self._active / EPISODE_ROUNDS
            self._rounds = 0
            self._plan = self._choose(passing=self._plan is None)
        return self._plan

    @property
    def is_due(self) -> bool:
        """Whether the next `plan` chooses anew."""
        rounds = self._rounds // self._active
        hopeless = self._trial is not None and self._trial.is_hopeless(rounds - self._warm_up)
        return self._plan is None or rounds >= (FEW_ROUNDS if self._is_short else EPISODE_ROUNDS) or hopeless

    @property
    def _is_short(self) -> bool:
        """Whether a choice comes soon: alone, where little is known of the way and it is no try."""
        if self._active > 1 or self._arm is None:
            return self._is_first
        return self._trial is None and self._records[self._arm].rounds < KNOWN

    def observe_round(self, plan: RoundPlan, tokens: int, milliseconds: float) -> None:
        """What one request's round under `plan` brought; all that run meanwhile bring their share in the same time."""
        if plan != self._plan or self._arm is None:
            return
        self._read_beside = self._read_beside + 1 if self._reading else 0
        if 0 < self._read_beside <= LONGEST_READING * self._active:
            return
        self._rounds += 1
        if self._rounds > self._warm_up * self._active and milliseconds > 0:
            brought = tokens * self._active
            record = self._records.setdefault(self._arm, ArmRecord())
            milliseconds = record.counted(milliseconds)
            promised = self._promised * milliseconds
            self._counted_ms += milliseconds
            record.add(brought, milliseconds, promised, self._episode, self._active > 1)
            if self._trial is not None:
                if self._trial.seen.rate is None:
                    record.waits = min(record.waits * 2, LONGEST_WAIT)
                self._trial.seen.add(brought, milliseconds, promised, 0, each=False)

    @property
    def _kinds(self) -> tuple[Arm, ...]:
        """The ways with whatever K and B."""
        joint = [Arm("ssd", drafter=other) for other in self.others if other != NGRAM] if "ssd" in self.modes else []
        return (*map(Arm, self.modes), *(Arm("sd", drafter=other) for other in self.others), *joint)

    @property
    def _trial_rules(self) -> TrialRules:
        return ALONE if self._active == 1 else TOGETHER

    @property
    def _records(self) -> dict[Arm, ArmRecord]:
        return self._by_load.setdefault(_load(self._active), {})

    def _choose(self, passing: bool) -> RoundPlan:
        """`passing`: another load has just begun."""
        forecasts = self._forecasts(self._active)
        self._promise_anew()
        guesses = self._worths(self._guesses(forecasts))
        rates = self._worths(self._rates_here(forecasts))
        before, self._trial, self._is_first = self._trial, None, False
        if passing and self._leaving:
            return self._take_expected(rates, guesses, forecasts)
        if not rates and self._active > 1 and Arm("ar") in guesses:
            self._is_first = True
            return self._take(Arm("ar"), forecasts, "what all else is held against")
        best = max(rates, key=rates.__getitem__)
        current = next((arm for arm in (self._arm, self._home) if arm in rates), best)
        if rates[best] < self._to_leave(current, best, rates[current]):
            best = current
        goes_on = before is not None and before.is_better and self._active == 1
        if goes_on and self._arm in rates and self._arm != best:
            self._trial = before
            return self._take(self._arm, forecasts, "better than the best so far")
        overdue = None if self._reading else self._overdue(best, rates, forecasts, guesses)
        if overdue is not None:
            self._trial = ArmTrial(rates[best] * self._dearer(overdue), self._trial_rules)
            return self._take(overdue, forecasts, self._why_try(overdue, rates))
        return self._take(best, forecasts, self._why_best(best, rates[best]))

    def _promise_anew(self) -> None:
        """Holds the rounds since the last choice against the formula with the costs and odds that they showed.

        What was wrong about these, as all priors are, says nothing about the formula.
        """
        plan, counted, self._counted_ms = self._plan, self._counted_ms, 0.0
        if plan is None or self._arm is None or not counted or self._active > 1:
            return
        _, rate = self._formula(1).of(Arm(plan.mode, plan.depth, plan.branches, plan.drafter))
        self._records[self._arm].promised += (rate - self._promised) * counted

    def _take_expected(
        self, rates: dict[Arm, float], guesses: dict[Arm, float], forecasts: dict[Arm, Forecast]
    ) -> RoundPlan:
        """Where some have left the others may soon, too: nothing is tried, and what was never measured at this load is
        taken for what it brought in larger company."""
        others = {arm: guess / HOME_MARGIN for arm, guess in guesses.items() if self._differs(arm, forecasts)}
        expected = others | rates
        best = max(expected, key=expected.__getitem__)
        why = self._why_best(best, rates[best]) if best in rates else "by what it brought in larger company"
        return self._take(best, forecasts, why)

    def _why_best(self, arm: Arm, worth: float) -> str:
        """What was measured stands with its rate; what the formula expects is no figure to hold against a run's."""
        source = self._records[arm].source
        if source in (MEASURED, MEASURED_BEFORE):
            return f"fastest {source} ({worth * self._dearer(arm) * 1000:.0f} tokens/s)"
        return f"fastest by {source}" if source else "expected to be fastest, not measured yet"

    def _dearer(self, arm: Arm) -> float:
        """How many times as much a way has to bring as plain decoding."""
        return math.pow(DEARER, max(_load(self._active) - 1, 0)) if arm.mode != "ar" else 1.0

    def _worths(self, rates: dict[Arm, float]) -> dict[Arm, float]:
        """Tokens per millisecond of plain decoding that are worth as much."""
        return {arm: rate / self._dearer(arm) for arm, rate in rates.items()}

    def _rates_here(self, forecasts: dict[Arm, Forecast]) -> dict[Arm, float]:
        """Of what was measured at this load; alone of all, what that and the formula mean for this text."""
        if self._active > 1:
            return _rates(self._records)
        found = {}
        for arm, (_, formula) in forecasts.items():
            record = self._records.setdefault(arm, ArmRecord(last_episode=self._episode))
            if record.source or self._differs(arm, forecasts):
                unknown = self._home is not None and not record.source
                found[arm] = record.rate_where(formula) / (UNKNOWN_MARGIN if unknown else 1.0)
        return found

    def _why_try(self, arm: Arm, rates: dict[Arm, float]) -> str:
        if self._records[arm].source:
            return f"not measured for {self._age(arm):.0f} episodes"
        return "another K may be better" if arm.kind in {known.kind for known in rates} else "not measured yet"

    def _to_leave(self, current: Arm, other: Arm, rate: float) -> float:
        """What `other` must bring to take the place of `current`: luck alone must not drive it from what was tuned."""
        if current != self._home or self._active > 1:
            return rate * STAY_MARGIN
        return rate * HOME_MARGIN + math.hypot(self._records[current].noise, self._records[other].noise)

    def _overdue(
        self, best: Arm, rates: dict[Arm, float], forecasts: dict[Arm, Forecast], guesses: dict[Arm, float]
    ) -> Arm | None:
        """A way worth another try, of several the one that promises most; a try that changes nothing doubles the time
        until the next."""
        for arm in sorted(guesses, key=lambda arm: -guesses[arm]):
            if arm == best or not self._differs(arm, forecasts):
                continue
            self._records.setdefault(arm, ArmRecord(last_episode=self._episode))
            if self._age(arm) >= self._patience(arm, rates, rates[best], guesses[arm]):
                return arm
        self._records[best].waits = 1
        return None

    def _patience(self, arm: Arm, rates: dict[Arm, float], best: float, guess: float) -> int:
        """For how many episodes a way is left alone; with other requests what was never measured, and promises as much,
        for none."""
        trying, patience = self._trial_rules, self._records[arm].waits * self._trial_rules.patience
        if arm.mode == "ar" and self._active > 1:  # measured in a crowd's first rounds, when much else goes on
            return patience
        if max(guess, rates.get(arm, 0.0)) <= trying.margin * best:
            return trying.unlikely * patience
        return patience if arm in rates else 0

    def _differs(self, arm: Arm, forecasts: dict[Arm, Forecast]) -> bool:
        """Whether the formula's own K is, by the formula, clearly better than the tuned one of the same mode; and where
        one of the target's drafts beside draft workers, that than these alone."""
        if arm.mode == "ssd" and arm.drafter and forecasts[arm][1] < OTHER_DEPTH_MARGIN * forecasts[Arm("ssd")][1]:
            return False
        tuned = self._tuned.get(arm.kind)
        if tuned is None or arm == tuned or tuned not in forecasts:
            return True
        (plan, rate), (known, usual) = forecasts[arm], forecasts[tuned]
        return plan.depth != known.depth and rate > OTHER_DEPTH_MARGIN * usual

    def _take(self, arm: Arm, forecasts: dict[Arm, Forecast], why: str) -> RoundPlan:
        plan, self._promised = forecasts[arm]
        settings = {"ar": "", "sd": f", K = {plan.depth}"}.get(plan.mode, f", K = {plan.depth}, B = {plan.branches}")
        by = f" by {plan.drafter}" if plan.drafter else ""
        self._warm_up = self._trial_rules.warm_up if self._active > 1 or arm != self._arm else 0
        self._arm, self.why = arm, f"{plan.mode}{by}{settings}: {why}"
        return plan

    def _age(self, arm: Arm) -> float:
        return self._episode - self._records[arm].last_episode

    def _guesses(self, forecasts: dict[Arm, Forecast]) -> dict[Arm, float]:
        """What each way should bring: the formula's rate, times its error about that way at the nearest load."""
        here = _load(self._active)
        return {arm: rate * self._error(arm, here, rate) for arm, (_, rate) in forecasts.items()}

    def _error(self, arm: Arm, here: int, rate: float) -> float:
        """What the way was measured to bring over what the formula says of it; 1 where nothing was measured."""
        rates = {load: _rates(records).get(arm) for load, records in self._by_load.items()}
        known = {load: measured for load, measured in rates.items() if measured is not None}
        if not known:
            return 1.0
        nearest = min(known, key=lambda load: abs(load - here))
        there = rate if nearest == here else self._forecasts(1 << nearest)[arm][1]
        error = min(max(known[nearest] / there, 1 / MOST_ERROR), MOST_ERROR)
        age = self._episode - self._by_load[nearest][arm].last_episode if self._active > 1 else 0
        return math.pow(error, 0.5 ** (abs(nearest - here) + age / HALF_FORGOTTEN))

    def _forecasts(self, at_once: int) -> dict[Arm, Forecast]:
        """By way: its plan, and the tokens per millisecond of that. A tuning is of one request at a time."""
        ways = [*(self._tuned.values() if at_once == 1 else ()), *self._kinds]
        formula = self._formula(at_once)
        return {way: formula.of(way) for way in ways}

    def _formula(self, at_once: int) -> Forecasts:
        odds = self.odds if self.odds is not None and at_once == 1 else self.estimates
        return Forecasts(self.estimates, odds, at_once, self.max_depth, self.branches, self.fixed)


def _rates(records: dict[Arm, ArmRecord]) -> dict[Arm, float]:
    """Of what was measured."""
    return {arm: rate for arm, record in records.items() if record.source and (rate := record.rate) is not None}


def _load(active: int) -> int:
    """Loads that are about alike: one request, two, up to four, up to eight."""
    return max(active - 1, 0).bit_length()
