"""The policy of `--mode auto`: chooses the mode, K and B of the next rounds for the most tokens per second in all.

With one request, an arm's rate is its forecast (`forecasts`) times the error of the forecasts for that arm's own rounds
(`ArmRecord`), and trials of other arms are rare. With several requests, the policy begins with a few rounds of AR,
which cost little and set the rate to beat; it trusts measurements over forecasts, tries an unmeasured arm whose
forecast is good enough, and returns to AR when no arm pays. A tuned arm comes first with one request and stays, with
its K and B, until another arm is measured to be better. All requests of a policy follow one plan, so none drafts
under plain decoding. Measurements are kept by load, since the best arm may differ with each. The policy reads no clock
and draws nothing at random: the same observations give the same plans. Rates are in tokens per millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.orchestrator.core.policy.acceptance import TextAcceptance
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm, Forecast, Forecasts
from outrider.orchestrator.core.policy.tuning import TunedArm
from outrider.protocol.heads import NGRAM

# The source of a record's numbers, as shown to users.
MEASURED, MEASURED_BEFORE = "measured", "measured before"


@dataclass(slots=True)
class ArmRecord:
    """The measurements of an arm, and the tokens that the formula forecast for the same rounds (`forecast_tokens`) with
    one request; old episodes fade.

    `prior_rate` is a rate from a tuning or an earlier server, which weighs as much as `prior_ms` of rounds and fades as
    they do, `wait_factor` the factor on the wait until the next trial (each trial doubles it), `source` the origin of
    the numbers (empty: there are none).
    """

    tokens: float = 0.0
    milliseconds: float = 0.0
    forecast_tokens: float = 0.0
    rounds: float = 0.0
    prior_rate: float = 0.0
    prior_ms: float = 0.0
    last_episode: float = 0.0
    wait_factor: int = 1
    source: str = ""

    @property
    def rate(self) -> float | None:
        """The measured rate over all texts, the prior rate included; None without either."""
        total_ms = self.prior_ms + self.milliseconds
        return (self.prior_rate * self.prior_ms + self.tokens) / total_ms if total_ms > 0 else None

    def corrected_rate(self, formula: float) -> float:
        """Estimates the rate from the forecast `formula`: at first the prior rate or the forecast itself, with more
        measurements the forecast times its error in this arm's rounds."""
        prior = self.prior_rate or formula
        if self.forecast_tokens <= 0:
            return prior
        weight = self.prior_ms if self.prior_rate else POLICY.prior_weight_ms
        corrected = formula * self.tokens / self.forecast_tokens
        return (prior * weight + corrected * self.milliseconds) / (weight + self.milliseconds)

    def cap_stall(self, milliseconds: float) -> float:
        """Returns the time that counts for a round of `milliseconds` (`max_stall_factor`)."""
        most = POLICY.max_stall_factor * self.milliseconds / self.rounds if self.rounds else math.inf
        return min(milliseconds, most)

    def add(self, tokens: float, milliseconds: float, episode: float, each: bool) -> None:
        """Adds a round. Older rounds fade with every episode since the last one if `each`, otherwise once at most."""
        age = episode - self.last_episode
        fade = POLICY.episode_fade ** (age if each else min(age, 1.0))
        self.prior_ms *= POLICY.episode_fade ** min(age, 1.0)
        self.tokens = self.tokens * fade + tokens
        self.milliseconds = self.milliseconds * fade + milliseconds
        self.forecast_tokens *= fade
        self.rounds = self.rounds * fade + 1
        self.last_episode = episode
        self.source = MEASURED


@dataclass(slots=True)
class ArmTrial:
    """A trial of an arm that is not known to be the best: `best_rate` is the best one's, `seen` the trial's rounds."""

    best_rate: float
    seen: ArmRecord = field(default_factory=ArmRecord)

    def is_hopeless(self, rounds: int) -> bool:
        """Whether its rate, after this many rounds, is below the best."""
        return rounds >= POLICY.min_episode_rounds and (self.seen.rate or math.inf) < self.best_rate


@dataclass(slots=True)
class Policy:
    """Chooses among `modes`, SD by each of `others` (in-process drafters and n-grams), and SSD by draft workers with an
    in-process drafter.

    K is at most `max_depth`; B is at most `branches`, or exactly that if `fixed`; tuned values take precedence.
    `acceptance` is that in the text of a request alone, `why` the reason of the latest choice, for users.
    """

    estimates: Estimates
    modes: tuple[str, ...]
    max_depth: int
    branches: int = 0
    fixed: bool = False
    others: tuple[str, ...] = ()
    acceptance: TextAcceptance | None = None
    why: str = "not started"
    _active: int = 1
    _plan: Arm | None = None
    _arm: Arm | None = None
    _counted_ms: float = 0.0
    _tuned_best: Arm | None = None
    _tuned: dict[Arm, Arm] = field(default_factory=dict)
    _records_by_load: dict[int, dict[Arm, ArmRecord]] = field(default_factory=dict)
    _episode: float = 0.0
    _rounds: int = 0
    _trial: ArmTrial | None = None
    _is_baseline: bool = False
    _load_fell: bool = False
    _warm_up_rounds: int = 0

    def start_from(self, choices: Iterable[TunedArm]) -> None:
        """Begins from these arms, best first: their K and B, and their rates as priors, soon outweighed by rounds."""
        for choice in choices:
            arm = Arm(choice.mode, choice.depth, choice.branches if choice.mode == "ssd" else 0, choice.drafter)
            if arm.kind not in self._base_arms or choice.tokens_per_second <= 0:
                continue
            source = MEASURED_BEFORE if choice.measured else "tune's forecast"
            if choice.depth and (choice.at_once > 1 or self._tuned.setdefault(arm.kind, arm) != arm):
                continue  # tune does not choose K for several requests; or from an older tuning
            records = self._records_by_load.setdefault(_load_class(choice.at_once), {})
            rate = choice.tokens_per_second / 1000
            records[arm] = ArmRecord(prior_rate=rate, prior_ms=POLICY.prior_weight_ms, source=source)
            if choice.at_once == 1 and self._tuned_best is None:
                self._tuned_best = arm

    def learned(self) -> Iterator[TunedArm]:
        """Yields the measured arms in the form that `start_from` takes."""
        for load, records in self._records_by_load.items():
            for arm, record in records.items():
                if record.rate is not None and record.source == MEASURED:
                    yield TunedArm(arm.mode, arm.depth, arm.branches, 1000 * record.rate, True, 1 << load, arm.drafter)

    def set_load(self, active: int) -> None:
        """Sets how many requests run; another load has its own records."""
        if _load_class(active) != _load_class(self._active):
            self._add_forecast_tokens()
            self._plan, self._load_fell = None, active < self._active
        self._active = max(active, 1)

    def plan(self) -> Arm:
        """Returns the plan for the next round, and chooses again when that is due."""
        if self._plan is None or self.is_due:
            self._episode += self._rounds / self._active / POLICY.episode_rounds
            self._rounds = 0
            self._plan = self._choose(is_new_load=self._plan is None)
        return self._plan

    @property
    def is_due(self) -> bool:
        """Whether the next `plan` chooses again."""
        if self._plan is None:
            return True
        rounds = self._rounds // self._active - self._warm_up_rounds
        hopeless = self._trial is not None and self._trial.is_hopeless(rounds)
        enough = POLICY.min_episode_rounds if self._is_short else POLICY.episode_rounds
        return rounds + min(self._warm_up_rounds, 1) >= enough or hopeless

    @property
    def _is_short(self) -> bool:
        """Whether the episode is a short one: the first AR rounds of a load, or, with one request, a new arm."""
        if self._active > 1 or self._arm is None:
            return self._is_baseline
        return self._trial is None and self._records[self._arm].rounds < POLICY.min_known_rounds

    def observe_round(self, plan: Arm, tokens: int, milliseconds: float, hit: bool = True) -> None:
        """Records a round of one request under `plan`, which verified a branch if it was a `hit`; the others are
        assumed to gain as many tokens in that time."""
        if plan != self._plan or self._arm is None:
            return
        self._rounds += 1
        if hit:
            self._warm_up_rounds = min(self._warm_up_rounds, self._rounds // self._active + 1)
        if self._rounds > self._warm_up_rounds * self._active and milliseconds > 0:
            all_tokens = tokens * self._active
            record = self._records.setdefault(self._arm, ArmRecord())
            milliseconds = record.cap_stall(milliseconds)
            self._counted_ms += milliseconds
            record.add(all_tokens, milliseconds, self._episode, self._active > 1)
            if self._trial is not None:
                if self._trial.seen.rate is None:
                    record.wait_factor = min(record.wait_factor * 2, POLICY.max_wait_factor)
                self._trial.seen.add(all_tokens, milliseconds, 0, each=False)

    @property
    def _base_arms(self) -> tuple[Arm, ...]:
        """The arms without K and B."""
        joint = [Arm("ssd", drafter=other) for other in self.others if other != NGRAM] if "ssd" in self.modes else []
        return (*map(Arm, self.modes), *(Arm("sd", drafter=other) for other in self.others), *joint)

    @property
    def _records(self) -> dict[Arm, ArmRecord]:
        return self._records_by_load.setdefault(_load_class(self._active), {})

    def _choose(self, is_new_load: bool) -> Arm:
        """Chooses the arm and plan of the next rounds; `is_new_load`: another load has just begun."""
        forecasts = self._forecasts(self._active)
        self._add_forecast_tokens()
        guesses = self._ar_equivalents(
            {arm: rate * self._forecast_error(arm, rate) for arm, (_, rate) in forecasts.items()}
        )
        rates = self._ar_equivalents(self._current_rates(forecasts))
        before, self._trial, self._is_baseline = self._trial, None, False
        if is_new_load and self._load_fell:
            return self._choose_expected(rates, guesses, forecasts)
        if not rates and self._active > 1:
            self._is_baseline = True
            return self._adopt(Arm("ar"), forecasts, "baseline for the other arms")
        best = max(rates, key=rates.__getitem__)
        current = next((arm for arm in (self._arm, self._tuned_best) if arm in rates), best)
        if rates[best] < rates[current] * POLICY.stay_margin:
            best = current
        trial_continues = before is not None and (before.seen.rate or 0.0) > before.best_rate and self._active == 1
        if trial_continues and self._arm in rates and self._arm != best:
            self._trial = before
            return self._adopt(self._arm, forecasts, "better than the best so far")
        trial_arm = self._find_due_trial(best, rates, forecasts, guesses)
        if trial_arm is not None:
            self._trial = ArmTrial(rates[best] * self._required_gain(trial_arm))
            return self._adopt(trial_arm, forecasts, self._explain_trial(trial_arm, rates))
        return self._adopt(best, forecasts, self._explain_best(best, rates[best]))

    def _add_forecast_tokens(self) -> None:
        """Records the tokens that the formula forecasts for the rounds since the last choice, by updated estimates.

        Errors of the estimates, which all priors have, must not count as errors of the formula.
        """
        counted, self._counted_ms = self._counted_ms, 0.0
        if counted and self._plan is not None and self._arm is not None and self._active == 1:
            self._records[self._arm].forecast_tokens += self._formula(1).forecast(self._plan)[1] * counted

    def _choose_expected(
        self, rates: dict[Arm, float], guesses: dict[Arm, float], forecasts: dict[Arm, Forecast]
    ) -> Arm:
        """Chooses after requests have ended: the others may end soon, so nothing is tried, and an arm unmeasured
        at this load counts with its rate at a larger one."""
        others = {
            arm: guess / POLICY.stay_margin for arm, guess in guesses.items() if self._beats_alternative(arm, forecasts)
        }
        expected = others | rates
        best = max(expected, key=expected.__getitem__)
        why = self._explain_best(best, rates[best]) if best in rates else "expected from its rate with more requests"
        return self._adopt(best, forecasts, why)

    def _explain_best(self, arm: Arm, worth: float) -> str:
        """Explains the best arm; only a measured rate is shown, since a forecast is not comparable with a run's."""
        source = self._records[arm].source
        if source in (MEASURED, MEASURED_BEFORE):
            return f"fastest {source} ({worth * self._required_gain(arm) * 1000:.0f} tokens/s)"
        return f"fastest by {source}" if source else "expected to be fastest, not measured yet"

    def _required_gain(self, arm: Arm) -> float:
        """Returns the factor by which an arm must beat plain decoding."""
        return math.pow(POLICY.gain_per_doubling, max(_load_class(self._active) - 1, 0)) if arm.mode != "ar" else 1.0

    def _ar_equivalents(self, rates: dict[Arm, float]) -> dict[Arm, float]:
        """Converts rates to the rates of plain decoding that they must exceed."""
        return {arm: rate / self._required_gain(arm) for arm, rate in rates.items()}

    def _current_rates(self, forecasts: dict[Arm, Forecast]) -> dict[Arm, float]:
        """Returns the rates of the measured arms at this load; with one request those of all arms for this text."""
        if self._active > 1:
            return _measured_rates(self._records)
        rates = {}
        for arm, (_, formula) in forecasts.items():
            record = self._records.setdefault(arm, ArmRecord(last_episode=self._episode))
            if record.source or self._beats_alternative(arm, forecasts):
                rates[arm] = record.corrected_rate(formula)
        return rates

    def _explain_trial(self, arm: Arm, rates: dict[Arm, float]) -> str:
        if self._records[arm].source:
            return f"not measured for {self._episodes_since(arm):.0f} episodes"
        return "another K may be better" if arm.kind in {rated.kind for rated in rates} else "not measured yet"

    def _find_due_trial(
        self, best: Arm, rates: dict[Arm, float], forecasts: dict[Arm, Forecast], guesses: dict[Arm, float]
    ) -> Arm | None:
        """Returns the arm whose trial is due: of several, the one with the best estimate; None if there is none.

        As long as no forward on all cores was measured, an arm that leaves the drafters idle is due.
        """
        lacks_all_cores = self.estimates.lacks_all_cores and not best.leaves_drafters_idle(self._active)
        for arm in sorted(guesses, key=lambda arm: -guesses[arm]):
            if arm == best or not self._beats_alternative(arm, forecasts):
                continue
            if lacks_all_cores and arm.leaves_drafters_idle(self._active):
                return arm
            self._records.setdefault(arm, ArmRecord(last_episode=self._episode))
            if self._episodes_since(arm) >= self._episodes_to_trial(arm, rates, rates[best], guesses[arm]):
                return arm
        self._records[best].wait_factor = 1
        return None

    def _episodes_to_trial(self, arm: Arm, rates: dict[Arm, float], best: float, guess: float) -> int:
        """Returns the number of episodes until an arm is tried; 0 for a promising one never measured at this load."""
        patience = self._records[arm].wait_factor * POLICY.patience
        if arm.mode == "ar" and self._active > 1:  # its record is from the first, unsteady rounds at the load
            return patience // 4
        if max(guess, rates.get(arm, 0.0)) <= POLICY.promising * best:
            return POLICY.unlikely * patience
        return patience if arm in rates else 0

    def _beats_alternative(self, arm: Arm, forecasts: dict[Arm, Forecast]) -> bool:
        """Whether the arm's forecast is better than its alternative's: another K's than the tuned one's of its kind,
        and that of SSD with an in-process drafter than that of SSD without."""
        if arm.mode == "ssd" and arm.drafter and forecasts[arm][1] < forecasts[Arm("ssd")][1]:
            return False
        tuned = self._tuned.get(arm.kind)
        if tuned is None or arm == tuned or tuned not in forecasts:
            return True
        (plan, rate), (tuned_plan, tuned_rate) = forecasts[arm], forecasts[tuned]
        return plan.depth != tuned_plan.depth and rate > tuned_rate

    def _adopt(self, arm: Arm, forecasts: dict[Arm, Forecast], why: str) -> Arm:
        plan, _ = forecasts[arm]
        settings = {"ar": "", "sd": f", K = {plan.depth}"}.get(plan.mode, f", K = {plan.depth}, B = {plan.branches}")
        by = f" by {plan.drafter}" if plan.drafter else ""
        # Draft workers that were idle first read the texts of all requests; until a hit, SSD counts an episode later.
        most = POLICY.episode_rounds if arm.mode == "ssd" and self._active > 1 else 1
        self._warm_up_rounds = most if arm != self._arm else 0
        self._arm, self.why = arm, f"{plan.mode}{by}{settings}: {why}"
        return plan

    def _episodes_since(self, arm: Arm) -> float:
        return self._episode - self._records[arm].last_episode

    def _forecast_error(self, arm: Arm, rate: float) -> float:
        """Returns the arm's measured rate over its forecast `rate`, at the nearest load; 1 if nothing was measured."""
        here = _load_class(self._active)
        rates = {load: _measured_rates(records).get(arm) for load, records in self._records_by_load.items()}
        measured = {load: value for load, value in rates.items() if value is not None}
        if not measured:
            return 1.0
        nearest = min(measured, key=lambda load: abs(load - here))
        forecast = rate if nearest == here else self._forecasts(1 << nearest)[arm][1]
        age = self._episode - self._records_by_load[nearest][arm].last_episode if self._active > 1 else 0
        return math.pow(
            measured[nearest] / forecast, 0.5 ** (abs(nearest - here) + age / POLICY.error_half_life_episodes)
        )

    def _forecasts(self, at_once: int) -> dict[Arm, Forecast]:
        """Returns the forecast of each arm. Tuned arms count for one request only, as tune measures them."""
        arms = [*(self._tuned.values() if at_once == 1 else ()), *self._base_arms]
        formula = self._formula(at_once)
        return {arm: formula.forecast(arm) for arm in arms}

    def _formula(self, at_once: int) -> Forecasts:
        texts = self.acceptance if self.acceptance is not None and at_once == 1 else self.estimates
        return Forecasts(self.estimates, texts, at_once, self.max_depth, self.branches, self.fixed)


def _measured_rates(records: dict[Arm, ArmRecord]) -> dict[Arm, float]:
    """Returns the rates of the arms that have one."""
    return {arm: rate for arm, record in records.items() if record.source and (rate := record.rate) is not None}


def _load_class(active: int) -> int:
    """Returns the class of load: 0 for one request, 1 for two, 2 up to four, 3 up to eight, ..."""
    return max(active - 1, 0).bit_length()
