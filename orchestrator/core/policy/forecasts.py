"""Forecasts the rate of an arm from the live estimates, and chooses the best K and B by that forecast.

All requests share the drafter and each forward of the target; with more requests the best K and B become smaller.

`Costs` and the functions below it are the formula: theorem 7 of the paper with the cost c(M) of verifying M tokens and
the turnaround added. It predicts the rates of AR, SD and SSD, in tokens per millisecond, from times in milliseconds and
probabilities that are measured separately. The functions are pure; the policy and `tools.formula` use them. n requests
in one forward gain n times the tokens, for a forward over the rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter

from outrider.orchestrator.core.policy.acceptance import TextAcceptance
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.protocol.heads import NGRAM

CANDIDATE_DEPTHS = (1, 2, 3, 4, 5, 6, 8)
CANDIDATE_BREADTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times, each measured alone: `verify_ms(M)` is c(M), `chain_ms(K)` a chain on request including the link,
    `tree_ms(K)` drafting ahead to full depth K, `turnaround_ms` the target's idle time between two verifies on a hit.

    With `at_once` requests, `step_ms` is for one token of each, `tree_ms` for a tree of each, `verify_ms(M)` for M rows
    in all, and `chain_ms` for one chain.
    """

    step_ms: float
    verify_ms: Callable[[float], float]
    chain_ms: Callable[[int], float]
    tree_ms: Callable[[int], float]
    turnaround_ms: float
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Odds:
    """`tokens(K)` is E[tokens] of a round with a chain of K, the bonus token included; `hit` is the hit rate p.
    `rows(K)` is E[rows] of its verify, less than K + 1 if unlikely tokens are left out."""

    tokens: Callable[[int], float]
    hit: float
    rows: Callable[[int], float] = lambda depth: depth + 1.0


@dataclass(frozen=True, slots=True)
class RoundKind:
    """A kind of round that makes up `share` of all: a verify of `rows` that gains `tokens`.

    `requested` is the length of the chain on request that the round waits for first (0: none), `ahead` the depth of the
    work ahead that the next round waits for (0: none), `own_ms` the time of in-process drafting before the verify.
    """

    share: float
    rows: float
    tokens: float
    requested: int = 0
    ahead: int = 0
    own_ms: float = 0.0


def round_ms(costs: Costs, kind: RoundKind) -> float:
    """Returns the duration of a round: the target's work or the drafter's, whichever is longer, and the turnaround."""
    work = max(costs.verify_ms(costs.at_once * kind.rows), costs.tree_ms(kind.ahead) if kind.ahead else 0.0)
    chain = costs.chain_ms(kind.requested) if kind.requested else 0.0
    # With several requests, chains are drafted one after the other while other requests are verified.
    return max(kind.own_ms + work + chain, costs.at_once * chain) + costs.turnaround_ms


def mixed_rate(costs: Costs, kinds: Sequence[RoundKind]) -> float:
    """Returns the rate of any mix of rounds by theorem 7: their expected tokens over their expected time."""
    return costs.at_once * sum(k.share * k.tokens for k in kinds) / sum(k.share * round_ms(costs, k) for k in kinds)


def ar_rate(costs: Costs) -> float:
    return costs.at_once / costs.step_ms


def sd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Returns the rate of drafting and verifying in turn: T_SD is `chain_ms(K)` in units of c(K+1)."""
    return mixed_rate(costs, [RoundKind(1.0, odds.rows(depth), odds.tokens(depth), requested=depth)])


def ssd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Returns the rate by theorem 7. After a miss an AR step follows or, for one request, a chain if that is better."""
    hit = RoundKind(odds.hit, odds.rows(depth), odds.tokens(depth), ahead=depth)
    request_miss = RoundKind(1.0 - odds.hit, odds.rows(depth), odds.tokens(depth), requested=depth)
    plain_miss = RoundKind(1.0 - odds.hit, 1, 1.0, ahead=depth)
    worth = hit.tokens / round_ms(costs, hit)
    options = [plain_miss] if costs.at_once > 1 else [request_miss, plain_miss]
    miss = max(options, key=lambda kind: kind.tokens - worth * round_ms(costs, kind))
    return mixed_rate(costs, [hit, miss])


def joint_rate(costs: Costs, odds: Odds, depth: int, own: Odds, own_ms: float) -> float:
    """Returns the rate of SSD in which an in-process drafter drafts after a miss, which takes `own_ms`.

    No branch is prepared for an accepted token of that chain, so a hit can follow only if its first token is rejected.
    """
    first_accepted = own.tokens(1) - 1.0
    missed = (1.0 - odds.hit) / max(1.0 - odds.hit * first_accepted, 1e-9)
    hit = RoundKind(1.0 - missed, odds.rows(depth), odds.tokens(depth), ahead=depth)
    return mixed_rate(costs, [hit, RoundKind(missed, depth + 1, own.tokens(depth), own_ms=own_ms)])


@dataclass(frozen=True, slots=True)
class Arm:
    """How rounds are made: `mode` is ar, sd or ssd, `depth` is K, `branches` is B (0: they follow the formula).

    `drafter` is an in-process drafter (in ssd one that drafts after a miss) or n-grams; empty: draft workers only. A
    plan is an arm with its K and B.
    """

    mode: str
    depth: int = 0
    branches: int = 0
    drafter: str = ""

    @property
    def kind(self) -> Arm:
        """The arm without K and B."""
        return Arm(self.mode, drafter=self.drafter)

    def leaves_drafters_idle(self, at_once: int) -> bool:
        """Whether no draft worker computes during its verifies, so that in `auto` the target has all cores. In SD with
        a draft worker, it drafts for other requests meanwhile, if there are any."""
        return self.mode == "ar" or (self.mode == "sd" and (bool(self.drafter) or at_once == 1))


Forecast = tuple[Arm, float]
"""A plan and the rate of all requests under it, in tokens per millisecond."""


@dataclass
class Forecasts:
    """Forecasts for `at_once` requests with such `texts`; K is at most `max_depth`, B at most `branches`, or
    exactly that if `fixed`."""

    estimates: Estimates
    texts: Estimates | TextAcceptance
    at_once: int
    max_depth: int
    branches: int
    fixed: bool

    def __post_init__(self) -> None:
        self._verify_ms = cache(self.estimates.forward_ms)
        self._all_cores_ms = cache(partial(self.estimates.forward_ms, all_cores=True))
        self._tokens = cache(self._expected_tokens)

    def forecast(self, arm: Arm) -> Forecast:
        """Returns the best plan of this arm, and its rate."""
        if arm.mode == "ar":
            return Arm("ar", 1, self.branches), ar_rate(self._costs(arm, 1))
        if arm.drafter == NGRAM:
            return Arm("sd", self.max_depth, self.branches, NGRAM), self._copying_rate(self._costs(arm, 1))
        allowed = [depth for depth in CANDIDATE_DEPTHS if depth <= self.max_depth] or [self.max_depth]
        depths = [arm.depth] if arm.depth else allowed
        if arm.drafter:
            of_depth = self._forecast_joint if arm.mode == "ssd" else self._forecast_in_process
            return max((of_depth(arm, depth) for depth in depths), key=itemgetter(1))
        if arm.mode == "sd":
            return self._forecast_drafted("sd", depths, [self.branches])
        narrower = [] if self.fixed else [breadth for breadth in CANDIDATE_BREADTHS if breadth < self.branches]
        breadths = [arm.branches] if arm.branches else [self.branches, *reversed(narrower)]
        return self._forecast_drafted("ssd", depths, breadths)

    def _forecast_drafted(self, mode: str, depths: Iterable[int], breadths: Iterable[int]) -> Forecast:
        forecasts: list[Forecast] = []
        for breadth in breadths:
            costs = self._costs(Arm(mode), breadth)
            odds = Odds(self._tokens, self.estimates.hit_rate_of(breadth), self.estimates.rows)
            rate = sd_rate if mode == "sd" else ssd_rate
            forecasts += [(Arm(mode, depth, breadth), rate(costs, odds, depth)) for depth in depths]
        best = max(rate for _, rate in forecasts)
        widest = max(plan.branches for plan, rate in forecasts if rate >= min(POLICY.near * best, best))
        return max((forecast for forecast in forecasts if forecast[0].branches == widest), key=itemgetter(1))

    def _forecast_in_process(self, arm: Arm, depth: int) -> Forecast:
        """Returns the forecast of chains by an in-process drafter; requests that share a verify share the drafting."""
        verify_ms = self._costs(arm, 1).verify_ms(self.at_once * (depth + 1))
        round_ms = self.estimates.in_process_ms(depth, arm.drafter) + verify_ms
        rate = self.at_once * self._tokens(depth, arm.drafter) / round_ms
        return replace(arm, depth=depth, branches=self.branches), rate

    def _forecast_joint(self, arm: Arm, depth: int) -> Forecast:
        """Returns the forecast of branches by draft workers with in-process chains after a miss."""
        breadth, e = arm.branches or self.branches, self.estimates
        odds = Odds(self._tokens, e.hit_rate_of(breadth), e.rows)
        own = Odds(partial(self._tokens, drafter=arm.drafter), 0.0)
        rate = joint_rate(self._costs(arm, breadth), odds, depth, own, e.in_process_ms(depth, arm.drafter))
        return Arm("ssd", depth, breadth, arm.drafter), rate

    def _copying_rate(self, costs: Costs) -> float:
        """Returns the rate of rounds that verify n-gram chains, and make a plain step where no request has one."""
        n, copies = self.at_once, self.texts.copies
        share = copies.share()
        some = 1.0 - math.pow(1.0 - share, n)
        verify_ms = costs.verify_ms(n + round(n * share * copies.rows() / some)) if some else 0.0
        return n * (1.0 + share * copies.right()) / (some * verify_ms + (1.0 - some) * costs.step_ms)

    def _expected_tokens(self, depth: int, drafter: str = "") -> float:
        """Returns E[tokens] of a round with a chain of K; a tuned K above the maximum counts as the maximum."""
        return self.texts.acceptance_of(drafter).expected_tokens(min(depth, max(self.max_depth, CANDIDATE_DEPTHS[-1])))

    def _costs(self, arm: Arm, breadth: int) -> Costs:
        e, n = self.estimates, self.at_once
        depth_ms = e.trees_ms(n * max(breadth, 1))
        return Costs(
            e.plain_ms(n),
            self._all_cores_ms if arm.leaves_drafters_idle(n) else self._verify_ms,
            e.chain_ms,
            lambda depth: (depth + 1) * depth_ms,
            e.turnaround_ms(),
            n,
        )
