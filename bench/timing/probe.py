"""A probe of about a minute: what each step costs, and how often speculation succeeds.

It drives real workers over the target's own text. Times are isolated unless a name says otherwise. A rehearsal plays
rounds of SSD with one (K, B): target and drafter work at once, and an outcome hits if the drafter had finished its
branch when the verify ended. `outrider.bench.timing.forecast` makes predictions from the results.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.timing.loops import (
    WARM_UP,
    Curve,
    Text,
    aheads,
    chains,
    medians,
    milliseconds,
    steps,
    turns,
    verifies,
)
from outrider.bench.timing.workbench import Workbench
from outrider.protocol import clock
from outrider.protocol.messages import Branch, Branches
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RehearsalRound:
    """A round: `rows` were verified, `accepted` chain tokens held, `in_full` would have held with a full chain. `hit`:
    the outcome's branch was ready. `verify_ms` is beside the working drafter."""

    rows: int
    accepted: int
    in_full: int
    hit: bool
    verify_ms: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """All rounds of one (K, B)."""

    depth: int
    branches: int
    rounds: tuple[RehearsalRound, ...]

    @property
    def tokens(self) -> float:
        """E[tokens] of a round of SSD, bonus included; branches are used as deep as they are."""
        return 1.0 + statistics.fmean(tried.accepted for tried in self.rounds)

    @property
    def tokens_in_full(self) -> float:
        """E[tokens] of a round of SD, whose chains are always K long."""
        return 1.0 + statistics.fmean(tried.in_full for tried in self.rounds)

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(tried.hit for tried in self.rounds)

    @property
    def rows(self) -> float:
        return statistics.fmean(tried.rows for tried in self.rounds)

    def acceptance(self, position: int) -> float:
        """How often chain token `position` held, given that those before it did."""
        reached = sum(tried.in_full >= position for tried in self.rounds)
        return sum(tried.in_full > position for tried in self.rounds) / reached if reached else 0.0


def rehearse(
    bench: Workbench, texts: Sequence[Text], sampling: SamplingParams, depth: int, branches: int, tokens: int
) -> Rehearsal:
    """Plays rounds over the first `tokens` after each prompt. A hit verifies the branch as it is, a miss a chain on
    request."""
    rounds: list[RehearsalRound] = []
    for start, text in texts:
        bench.open(text[:start], sampling, target=True, drafter=True)
        rounds += _over(bench, start, text[: start + tokens + depth + 2], depth, branches)
        bench.close()
    return Rehearsal(depth, branches, tuple(rounds))


def _over(bench: Workbench, start: int, text: Sequence[int], depth: int, branches: int) -> Iterator[RehearsalRound]:
    sent, at, number = start, start + 1, 1
    full = served = bench.chain(number, at, text[sent:at], depth)[0].chain
    sent = at
    while at + depth + 1 < len(text):
        done = bench.both(number, at, text[sent:at], served, depth, branches)
        sent, held = at, done.outcome.accepted
        outcome = (*served[:held], done.outcome.bonus)
        in_time = _prepared(done.pieces, outcome, done.outcome.work.ended_ns)
        verify_ms = milliseconds(done.outcome.work)
        yield RehearsalRound(1 + len(served), held, agreeing(full, text[at:]), in_time is not None, verify_ms)
        at, number = at + held + 1, number + 1
        if at + depth + 1 >= len(text):
            return
        if in_time is None:
            full = served = bench.chain(number, at, text[sent:at], depth)[0].chain
            sent = at
        else:
            complete = _prepared(done.pieces, outcome)
            full, served = (complete or in_time).chain, in_time.chain


def agreeing(chain: Sequence[int], text: Sequence[int]) -> int:
    """Returns how many tokens of the chain equal the text's."""
    return next((i for i, (own, true) in enumerate(zip(chain, text, strict=False)) if own != true), len(chain))


def _prepared(pieces: Sequence[Branches], committed: tuple[int, ...], until_ns: int | None = None) -> Branch | None:
    """Returns the branch of this outcome in its last form, of those finished by `until_ns`."""
    found = None
    for piece in pieces:
        if until_ns is None or piece.work.ended_ns <= until_ns:
            found = next((b for b in piece.entries if b.committed == committed), found)
    return found


class TimeBudget:
    """A time limit for loops, so that a slow machine is measured less often, not longer. Shares are of the whole time,
    from the beginning."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started_ns = clock.now()

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over; negative afterwards."""
        return share * self._seconds - (clock.now() - self._started_ns) / 1e9

    def turns(self, most: int, least: int, share: float) -> Iterator[int]:
        """Yields 0, 1, ... up to `most` numbers; beyond `least` only while this share of the time lasts."""
        for number in range(most):
            if number >= least and self.left(share) <= 0:
                return
            yield number


# Approximate duration once the workers run.
SECONDS = 50.0
# Shares of the time by which each step ends.
TEXTS_BY, VERIFY_BY, CHAINS_BY, TREES_BY, TURNS_BY, PILOT_BY = 0.2, 0.3, 0.36, 0.42, 0.48, 0.8
VERIFY_ROWS = (*range(1, 17),)
REPEATS = 12
FEWEST_REPEATS = 3
FEWEST_TEXTS = 2
TEXT_TOKENS = 160
FEWEST_TOKENS = 64
# Tokens of each text in a rehearsal, at least; and at most in the first, which shows how many fit the time.
FEWEST_TRIED = 16
PILOT_TOKENS = 48
TREE_DEPTH = 4
# Less speedup than this is not worth another process.
WORTH_IT = 1.03


@dataclass(frozen=True, slots=True)
class Probe:
    """What one machine and pair achieve, in milliseconds.

    `step_ms`: a run-ahead token of the target. `chain_ms`: a chain drafted right after another. `tree_ms`: a depth by
    its branches. `link_ms`: a drafter's answer beyond its work. `turn_ms(K)`: a whole round of SD, in which the drafter
    is slower because it has waited. `between_ms`: the target's wait in it beyond the chain's time. `plain_ms`: a
    run-ahead token as measured.
    """

    step_ms: float
    verify_ms: Curve
    chain_ms: Curve
    tree_ms: Curve
    link_ms: float
    turn_ms: Curve
    between_ms: float
    rehearsals: tuple[Rehearsal, ...]
    plain_ms: float


def probe(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    depths: Sequence[int],
    branches: Sequence[int],
    tell: Callable[[str], None],
) -> Probe:
    """Measures on the text that the target generates after each of `prompts`, less often if time runs out.

    If no K could pay even with free drafting, there is only one rehearsal, which shows that.

    Raises:
        WorkerError: there is no drafter, or a worker was lost.
    """
    bench.need_drafter()
    glass = TimeBudget(SECONDS)
    texts, steps = _texts(bench, prompts, sampling, glass, tell)
    tell("probe: cost of verifying")
    verify_ms = _verify_curve(bench, texts[0], sampling, glass)
    plain_ms = statistics.median(steps)
    step_ms = min(plain_ms, verify_ms(1))  # unless other work interfered
    tell("probe: cost of drafting")
    chain_ms, link_ms = _chain_curve(bench, texts[0], sampling, max(depths), glass)
    tree_ms = _tree_curve(bench, texts[0], sampling, branches, glass)
    tell("probe: verify and draft in turn")
    turn_ms, between_ms = _turn_curve(bench, texts[0], sampling, depths, glass)
    tell("probe: acceptance")
    pilot, tokens_a_second = _pilot(bench, texts, sampling, max(depths), max(branches), turn_ms, glass)
    rehearsals = [pilot]
    if may_pay(pilot, step_ms, verify_ms):
        ways = [(depth, count) for count in reversed(branches) for depth in depths]
        tokens = min(int(tokens_a_second * glass.left() / len(ways) / len(texts)), TEXT_TOKENS)
        rehearsals.clear()
        for turn in glass.turns(len(ways), len(depths), 1.2):
            depth, count = ways[turn]
            tell(f"probe: acceptance and hits, K = {depth}, B = {count}")
            rehearsals.append(rehearse(bench, texts, sampling, depth, count, max(tokens, FEWEST_TRIED)))
    return Probe(step_ms, verify_ms, chain_ms, tree_ms, link_ms, turn_ms, between_ms, tuple(rehearsals), plain_ms)


def may_pay(tried: Rehearsal, step_ms: float, verify_ms: Curve) -> bool:
    """Whether some K up to the rehearsal's would pay if drafting took no time."""

    def rate(depth: int) -> float:
        return (1.0 + statistics.fmean(min(t.in_full, depth) for t in tried.rounds)) / verify_ms(depth + 1)

    return max(rate(depth) for depth in range(1, tried.depth + 1)) > WORTH_IT / step_ms


def _texts(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    glass: TimeBudget,
    tell: Callable[[str], None],
) -> tuple[list[Text], list[float]]:
    """Returns the target's text after each prompt, shorter on a slow machine, and its times per token."""
    texts: list[Text] = []
    taken: list[float] = []
    length = FEWEST_TOKENS
    for index in glass.turns(len(prompts), FEWEST_TEXTS, TEXTS_BY):
        tell(f"probe: text {index + 1} of {len(prompts)}")
        if taken:
            affordable = 1000 * glass.left(TEXTS_BY) / (len(prompts) - index) / statistics.median(taken)
            length = min(max(int(affordable), FEWEST_TOKENS), TEXT_TOKENS)
        text, spans = bench.text(prompts[index], length, sampling)
        texts.append((len(prompts[index]), text))
        taken += steps(spans)
    return sorted(texts, key=lambda known: known[0] - len(known[1])), taken


def _pilot(
    bench: Workbench,
    texts: Sequence[Text],
    sampling: SamplingParams,
    depth: int,
    branches: int,
    turn_ms: Curve,
    glass: TimeBudget,
) -> tuple[Rehearsal, float]:
    """A short rehearsal, which fits the time even with one token per round, and the tokens per second it processes."""
    before_s = glass.left()
    affordable = 1000 * glass.left(PILOT_BY) / (turn_ms(depth) * len(texts))
    found = rehearse(bench, texts, sampling, depth, branches, min(max(int(affordable), FEWEST_TRIED), PILOT_TOKENS))
    tokens = sum(1 + tried.accepted for tried in found.rounds)
    return found, tokens / max(before_s - glass.left(), 1e-3)


def _verify_curve(bench: Workbench, known: Text, sampling: SamplingParams, glass: TimeBudget) -> Curve:
    """c(M), with the row counts interleaved."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    rows = (count for _ in glass.turns(REPEATS, FEWEST_REPEATS, VERIFY_BY) for count in VERIFY_ROWS)
    for count, verify_ms in verifies(bench, known, sampling, rows):
        times[count].append(verify_ms)
    return medians(times)


def _chain_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, deepest: int, glass: TimeBudget
) -> tuple[Curve, float]:
    """Chains on request by length, and the link."""
    works: dict[int, list[float]] = {}
    links: list[float] = []
    for depth in range(1, deepest + 1):
        found = list(chains(bench, known, sampling, depth, _numbers(glass, CHAINS_BY)))
        works[depth] = [work_ms for work_ms, _ in found]
        links += [link_ms for _, link_ms in found]
    return medians(works), statistics.median(links)


def _tree_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, branches: Sequence[int], glass: TimeBudget
) -> Curve:
    """A depth of the tree by branches: the middle forwards of a round, in which all of them grow."""
    return medians({
        count: [
            milliseconds(span)
            for spans in aheads(bench, known, sampling, TREE_DEPTH, count, _numbers(glass, TREES_BY), chain=0)
            for span in spans[1:]
        ]
        for count in branches
    })  # fmt: skip


def _turn_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, depths: Sequence[int], glass: TimeBudget
) -> tuple[Curve, float]:
    """Rounds of SD by K, and the wait in them beyond the chain."""
    wholes: dict[int, list[float]] = {}
    between: list[float] = []
    for depth in depths:
        found = list(turns(bench, known, sampling, depth, _numbers(glass, TURNS_BY)))
        wholes[depth] = [turn.whole_ms for turn in found]
        between += [turn.between_ms for turn in found]
    return medians(wholes), statistics.median(between)


def _numbers(glass: TimeBudget, share: float) -> Iterator[int]:
    """Round numbers from 1: warm-up first."""
    return (turn + 1 for turn in glass.turns(REPEATS + WARM_UP, FEWEST_REPEATS + WARM_UP, share))
