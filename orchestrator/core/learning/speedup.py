"""The formula: tokens per second of AR, SD and SSD from times and probabilities measured one by one.

The paper's theorem 7 with the cost c(M) of verifying M tokens and the turnaround put in. Pure; milliseconds in, tokens
per millisecond out. The controller, `outrider tune` and `outrider bench` all predict with this one. Requests that share
their forwards share their time: what all bring is that much more, for a forward over all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
class Kind:
    """Rounds that are made alike, `share` of all: a verify of `rows` tokens, bringing `tokens`.

    `asked`: the length of the just-in-time chain that was waited for first, 0 for none. `ahead`: how deep the work
    ahead must have come before the next round can begin, 0 when nothing is waited for. `own_ms`: what the target
    drafts by itself first.
    """

    share: float
    rows: int
    tokens: float
    asked: int = 0
    ahead: int = 0
    own_ms: float = 0.0


def round_ms(costs: Costs, kind: Kind) -> float:
    """A round of this kind: the target's turn or the drafter's, whichever is longer, and what comes between."""
    work = max(costs.verify_ms(costs.at_once * kind.rows), costs.tree_ms(kind.ahead) if kind.ahead else 0.0)
    chain = costs.chain_ms(kind.asked) if kind.asked else 0.0
    # Of several requests one's chain is drafted while others' are verified, one after the other.
    return max(kind.own_ms + work + chain, costs.at_once * chain) + costs.turnaround_ms


def mixed_rate(costs: Costs, kinds: Sequence[Kind]) -> float:
    """Theorem 7 for any mix of rounds: the tokens they bring over the time they take."""
    return costs.at_once * sum(k.share * k.tokens for k in kinds) / sum(k.share * round_ms(costs, k) for k in kinds)


def ar_rate(costs: Costs) -> float:
    return costs.at_once / costs.step_ms


def sd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Draft, then verify, in turn: T_SD is `chain_ms(K)` in units of c(K+1)."""
    return mixed_rate(costs, [Kind(1.0, depth + 1, odds.tokens(depth), asked=depth)])


def own_rate(costs: Costs, odds: Odds, depth: int, draft_ms: float) -> float:
    """Draft, then verify, in the target's process: those who share the verify share the drafting, too."""
    verify_ms = costs.verify_ms(costs.at_once * (depth + 1))
    return costs.at_once * odds.tokens(depth) / (draft_ms + verify_ms)


def ssd_rate(costs: Costs, odds: Odds, depth: int) -> float:
    """Theorem 7. After a miss the better of an AR step and a just-in-time chain is taken."""
    hit = Kind(odds.hit, depth + 1, odds.tokens(depth), ahead=depth)
    asking = Kind(1.0 - odds.hit, depth + 1, odds.tokens(depth), asked=depth)
    stepping = Kind(1.0 - odds.hit, 1, 1.0, ahead=depth)
    worth = hit.tokens / round_ms(costs, hit)
    miss = max(asking, stepping, key=lambda kind: kind.tokens - worth * round_ms(costs, kind))
    return mixed_rate(costs, [hit, miss])


def joint_rate(costs: Costs, odds: Odds, depth: int, own: Odds, own_ms: float) -> float:
    """SSD where after a miss a drafter of the target's process drafts, in `own_ms`. Nobody prepares for what holds of
    that, so a hit can follow only where nothing does."""
    holds = own.tokens(1) - 1.0
    missed = (1.0 - odds.hit) / max(1.0 - odds.hit * holds, 1e-9)
    hit = Kind(1.0 - missed, depth + 1, odds.tokens(depth), ahead=depth)
    return mixed_rate(costs, [hit, Kind(missed, depth + 1, own.tokens(depth), own_ms=own_ms)])


def ceiling(costs: Costs, depth: int) -> float:
    """1 + T_SD: the most that SSD can gain over SD with the same drafter and K."""
    return 1.0 + costs.chain_ms(depth) / costs.verify_ms(depth + 1)
