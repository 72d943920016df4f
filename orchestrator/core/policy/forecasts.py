"""What an arm should bring, by the formula and the live estimates; its K and B are the best by that formula.

So many requests share each forward of the target, and the drafter; with them the best K and B become small.

`Costs`: the formula: tokens per second of AR, SD and SSD from times and probabilities measured one by one. It is
theorem 7 of the paper with the cost c(M) of verifying M tokens and the turnaround put in. Pure; milliseconds in, tokens
per millisecond out. The policy, `outrider tune` and `outrider bench` all predict with it. Requests that share their
forwards share their time: together they bring as many times more, for a forward over all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.text_profiles import TextAcceptance
from outrider.protocol.heads import NGRAM


@dataclass(frozen=True, slots=True)
class Costs:
    """Times measured alone. `verify_ms(M)` is c(M); `chain_ms(K)` a just-in-time chain, link included; `tree_ms(K)` the
    work ahead for full depth K; `turnaround_ms` the target's wait between two verifies on a hit.

    With `at_once` requests `step_ms` is of a token for each, `tree_ms` of a tree for each, `chain_ms` still of one
    chain and `verify_ms(M)` of M rows in all.
    """

    step_ms: float
    verify_ms: Callable[[int], float]
    chain_ms: Callable[[int], float]
    tree_ms: Callable[[int], float]
    turnaround_ms: float
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Odds:
    """How often things succeed: `tokens(K)` is E[tokens] of a round with a chain of K, bonus included; `hit` is p."""

    tokens: Callable[[int], float]
    hit: float


@dataclass(frozen=True, slots=True)
class RoundKind:
    """Rounds that are made alike, `share` of all: a verify of `rows` tokens, bringing `tokens`.

    `asked`: the length of the just-in-time chain that was waited for first, 0 for none. `ahead`: how deep the work
    ahead must have come before the next round can begin, 0 when nothing is waited for. `own_ms`: what the target takes
    to draft by itself first.
    """

    share: float
    rows: int
    tokens: float
    asked: int = 0
    ahead: int = 0
    own_ms: float = 0.0


def round_ms(costs: Costs, kind: RoundKind) -> float:
    """A round of this kind: the target's turn or the drafter's, whichever is longer, and what comes between."""
    work = max(costs.verify_ms(costs.at_once * kind.rows), costs.tree_ms(kind.ahead) if kind.ahead else 0.0)
    chain = costs.chain_ms(kind.asked) if kind.asked else 0.0
    # Of several requests one's chain is drafted while others' are verified, one after the other.
    return max(kind.own_ms + work + chain, costs.at_once * chain) + costs.turnaround_ms


def mixed_rate(costs: Costs, kinds: Sequence[RoundKind]) -> float:
    """Theorem 7 for any mix of rounds: the tokens they bring over the time they take."""
    return costs.at_once * sum(k.share * k.tokens for k in kinds) / sum(k.share * round_ms(costs, k) for k in kinds)


def ar_rate(costs: Costs) -> float:
    return costs.at_once / costs.step_ms


def sd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Draft, then verify, in turn: T_SD is `chain_ms(K)` in units of c(K+1)."""
    return mixed_rate(costs, [RoundKind(1.0, depth + 1, odds.tokens(depth), asked=depth)])


def own_rate(costs: Costs, odds: Odds, depth: int, draft_ms: float) -> float:
    """Draft, then verify, in the target's process: requests that share the verify share the drafting, too."""
    verify_ms = costs.verify_ms(costs.at_once * (depth + 1))
    return costs.at_once * odds.tokens(depth) / (draft_ms + verify_ms)


def ssd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Theorem 7. After a miss the better of an AR step and a just-in-time chain is taken."""
    hit = RoundKind(odds.hit, depth + 1, odds.tokens(depth), ahead=depth)
    asking = RoundKind(1.0 - odds.hit, depth + 1, odds.tokens(depth), asked=depth)
    stepping = RoundKind(1.0 - odds.hit, 1, 1.0, ahead=depth)
    worth = hit.tokens / round_ms(costs, hit)
    miss = max(asking, stepping, key=lambda kind: kind.tokens - worth * round_ms(costs, kind))
    return mixed_rate(costs, [hit, miss])


def joint_rate(costs: Costs, odds: Odds, depth: int, own: Odds, own_ms: float) -> float:
    """SSD where after a miss a drafter of the target's process drafts, in `own_ms`.

    No branch is prepared for what is accepted of that, so a hit can follow only where nothing is.
    """
    holds = own.tokens(1) - 1.0
    missed = (1.0 - odds.hit) / max(1.0 - odds.hit * holds, 1e-9)
    hit = RoundKind(1.0 - missed, depth + 1, odds.tokens(depth), ahead=depth)
    return mixed_rate(costs, [hit, RoundKind(missed, depth + 1, own.tokens(depth), own_ms=own_ms)])


def ceiling(costs: Costs, depth: int) -> float:
    """1 + T_SD: the most that SSD can gain over SD with the same drafter and K."""
    return 1.0 + costs.chain_ms(depth) / costs.verify_ms(depth + 1)


DEPTHS = (1, 2, 3, 4, 5, 6, 8)
BREADTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How rounds are made: `mode` is ar, sd or ssd; `depth` is K, `branches` B. `drafter`: the one of the target's
    process, or n-grams; empty: draft workers; in ssd those, and beside them this one."""

    mode: str
    depth: int
    branches: int = 0
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Arm:
    """What there is to choose from: a mode that keeps to a tuned K and B, or, without a depth, follows the formula."""

    mode: str
    depth: int = 0
    branches: int = 0
    drafter: str = ""

    @property
    def kind(self) -> Arm:
        """The same with whatever K and B."""
        return Arm(self.mode, drafter=self.drafter)


# The widest B that the formula puts so near to its best: drafters take no more than they can do in time.
NEAR = 0.93

Forecast = tuple[RoundPlan, float]
"""A plan, and the tokens per millisecond that all requests bring under it."""


@dataclass
class Forecasts:
    """In texts of these `odds`, `at_once` requests, K up to `max_depth`, B up to `branches`, or, `fixed`, just that."""

    estimates: Estimates
    odds: Estimates | TextAcceptance
    at_once: int
    max_depth: int
    branches: int
    fixed: bool
    _tokens: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._verify_ms = cache(self.estimates.forward_ms)

    def of(self, arm: Arm) -> Forecast:
        """The best plan of this way."""
        if arm.mode == "ar":
            return RoundPlan("ar", 1, self.branches), ar_rate(self._costs(1))
        if arm.drafter == NGRAM:
            return RoundPlan("sd", self.max_depth, self.branches, NGRAM), self._copying()
        depths = (
            [arm.depth] if arm.depth else [depth for depth in DEPTHS if depth <= self.max_depth] or [self.max_depth]
        )
        if arm.drafter and arm.mode == "ssd":
            return max((self._joint(arm, depth) for depth in depths), key=lambda forecast: forecast[1])
        if arm.drafter:
            return max((self._in_process(arm.drafter, depth) for depth in depths), key=lambda forecast: forecast[1])
        if arm.mode == "sd":
            return self._best("sd", depths, [self.branches])
        return self._best("ssd", depths, [arm.branches] if arm.branches else self._breadths())

    def _breadths(self) -> list[int]:
        narrower = [] if self.fixed else [breadth for breadth in BREADTHS if breadth < self.branches]
        return [self.branches, *reversed(narrower)]

    def _best(self, mode: str, depths: Iterable[int], breadths: Iterable[int]) -> Forecast:
        found = []
        for breadth in breadths:
            costs, odds = self._costs(breadth), Odds(self._brings, self.estimates.covered(breadth))
            rate = sd_rate if mode == "sd" else ssd_rate
            found += [(RoundPlan(mode, depth, breadth), rate(costs, odds, depth)) for depth in depths]
        best = max(rate for _, rate in found)
        widest = max(plan.branches for plan, rate in found if rate >= min(NEAR * best, best))
        return max((one for one in found if one[0].branches == widest), key=lambda forecast: forecast[1])

    def _in_process(self, drafter: str, depth: int) -> Forecast:
        """A chain of so many tokens by one in the target's process."""
        odds, draft_ms = Odds(partial(self._brings, drafter=drafter), 0.0), self.estimates.in_process_ms(depth, drafter)
        return RoundPlan("sd", depth, self.branches, drafter), own_rate(self._costs(1), odds, depth, draft_ms)

    def _joint(self, arm: Arm, depth: int) -> Forecast:
        """Branches by draft workers, and after a miss a chain by one in the target's process."""
        breadth, e = arm.branches or self.branches, self.estimates
        odds = Odds(self._brings, e.covered(breadth))
        own = Odds(partial(self._brings, drafter=arm.drafter), 0.0)
        rate = joint_rate(self._costs(breadth), odds, depth, own, e.in_process_ms(depth, arm.drafter))
        return RoundPlan("ssd", depth, breadth, arm.drafter), rate

    def _copying(self) -> float:
        """Rounds that verify what the text says comes next, and nothing where it says nothing."""
        tokens, rows = self.odds.copied_a_round()
        return self.at_once * (1.0 + tokens) / self._verify_ms(self.at_once * (1 + round(rows)))

    def _brings(self, depth: int, drafter: str = "") -> float:
        """E[tokens] of a round with a chain of K; a tuned K may be deeper than is counted."""
        known = self._tokens.get(drafter)
        if known is None:
            known, reach = [1.0], 1.0
            for position in range(max(self.max_depth, DEPTHS[-1])):
                reach *= self.odds.holding(drafter).rate(position)
                known.append(known[-1] + reach)
            self._tokens[drafter] = known
        return known[min(depth, len(known) - 1)]

    def _costs(self, breadth: int) -> Costs:
        e, n = self.estimates, self.at_once
        depth_ms = e.trees_ms(n * max(breadth, 1))
        return Costs(
            e.plain_ms(n),
            self._verify_ms,
            e.chain_ms,
            lambda depth: (depth + 1) * depth_ms,
            e.turnaround_ms(),
            n,
        )
