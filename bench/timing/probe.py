"""Measures in about a minute what each step costs and how often speculation succeeds.

The probe drives real workers over text that the target generated. Times are in isolation unless a name says otherwise.
A rehearsal runs rounds of SSD with one (K, B): target and drafter work in parallel, and an outcome is a hit if its
branch was finished when the verify ended. `outrider.bench.timing.forecast` makes predictions from the results.
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
    """A round that verified `rows` and accepted `accepted` chain tokens; with a chain of K it would have accepted
    `in_full`. `hit`: the outcome's branch was ready. `verify_ms`: the verify while the drafter worked."""

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
        """E[tokens] of a round of SSD with the bonus token; branches are used as deep as they are."""
        return 1.0 + statistics.fmean(tried.accepted for tried in self.rounds)

    @property
    def tokens_in_full(self) -> float:
        """E[tokens] of a round of SD, where chains always have K tokens."""
        return 1.0 + statistics.fmean(tried.in_full for tried in self.rounds)

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(tried.hit for tried in self.rounds)

    @property
    def rows(self) -> float:
        return statistics.fmean(tried.rows for tried in self.rounds)

    def acceptance(self, position: int) -> float:
        """Returns how often the chain token at `position` was accepted if all before it were."""
        reached = sum(tried.in_full >= position for tried in self.rounds)
        return sum(tried.in_full > position for tried in self.rounds) / reached if reached else 0.0


def rehearse(
    bench: Workbench, texts: Sequence[Text], sampling: SamplingParams, depth: int, branches: int, tokens: int
) -> Rehearsal:
    """Runs rounds over the first `tokens` after each prompt. After a hit the branch is verified as deep as it is, after
    a miss a chain on request."""
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
    return next((i for i, (drafted, true) in enumerate(zip(chain, text, strict=False)) if drafted != true), len(chain))


def _prepared(pieces: Sequence[Branches], committed: tuple[int, ...], until_ns: int | None = None) -> Branch | None:
    """Returns the deepest branch of this outcome that was finished by `until_ns` (None: at all), or None."""
    found = None
    for piece in pieces:
        if until_ns is None or piece.work.ended_ns <= until_ns:
            found = next((b for b in piece.entries if b.committed == committed), found)
    return found


class TimeBudget:
    """A time limit for loops: a slow machine is measured less often, not longer. A share is a part of the whole time,
    counted from the beginning."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started_ns = clock.now()

    def left(self, share: float = 1.0) -> float:
        """Returns the seconds until this share of the time has passed; negative afterwards."""
        return share * self._seconds - (clock.now() - self._started_ns) / 1e9

    def turns(self, most: int, least: int, share: float) -> Iterator[int]:
        """Yields 0 to `most` - 1; from `least` on only until this share of the time has passed."""
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
# The fewest tokens of each text in a rehearsal; the most in the pilot, which shows how many fit into the time.
FEWEST_TRIED = 16
PILOT_TOKENS = 48
TREE_DEPTH = 4
# The least speedup that pays for another process.
WORTH_IT = 1.03


@dataclass(frozen=True, slots=True)
class Probe:
    """Times of one pair on one machine in milliseconds.

    `step_ms`: a token of autonomous plain decoding, at most a verify of one token. `plain_ms`: the same as measured.
    `chain_ms`: a chain drafted right after another. `tree_ms`: one more token of all branches, by their number.
    `link_ms`: a drafter's answer beyond its work. `turn_ms(K)`: a whole round of SD, in which a drafter that waited is
    slower. `between_ms`: the target's wait in such a round beyond the chain's time.
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
    """Measures over the texts that the target generates after `prompts`; less often on a slow machine.

    If no K would pay even with free drafting, only the pilot rehearsal runs, which shows that.

    Raises:
        WorkerError: there is no drafter, or a worker was lost.
    """
    bench.need_drafter()
    budget = TimeBudget(SECONDS)
    texts, steps = _texts(bench, prompts, sampling, budget, tell)
    tell("probe: cost of verifying")
    verify_ms = _verify_curve(bench, texts[0], sampling, budget)
    plain_ms = statistics.median(steps)
    step_ms = min(plain_ms, verify_ms(1))  # unless other work interfered
    tell("probe: cost of drafting")
    chain_ms, link_ms = _chain_curve(bench, texts[0], sampling, max(depths), budget)
    tree_ms = _tree_curve(bench, texts[0], sampling, branches, budget)
    tell("probe: verify and draft in turn")
    turn_ms, between_ms = _turn_curve(bench, texts[0], sampling, depths, budget)
    tell("probe: acceptance")
    pilot, tokens_a_second = _pilot(bench, texts, sampling, max(depths), max(branches), turn_ms, budget)
    rehearsals = [pilot]
    if may_pay(pilot, step_ms, verify_ms):
        settings = [(depth, count) for count in reversed(branches) for depth in depths]
        tokens = min(int(tokens_a_second * budget.left() / len(settings) / len(texts)), TEXT_TOKENS)
        rehearsals.clear()
        for number in budget.turns(len(settings), len(depths), 1.2):
            depth, count = settings[number]
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
    budget: TimeBudget,
    tell: Callable[[str], None],
) -> tuple[list[Text], list[float]]:
    """Returns a text of the target for each prompt, shorter on a slow machine, and its milliseconds per token."""
    texts: list[Text] = []
    taken: list[float] = []
    length = FEWEST_TOKENS
    for index in budget.turns(len(prompts), FEWEST_TEXTS, TEXTS_BY):
        tell(f"probe: text {index + 1} of {len(prompts)}")
        if taken:
            affordable = 1000 * budget.left(TEXTS_BY) / (len(prompts) - index) / statistics.median(taken)
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
    budget: TimeBudget,
) -> tuple[Rehearsal, float]:
    """Returns a rehearsal that is short enough for one token per round, and the tokens per second that it processed."""
    before_s = budget.left()
    affordable = 1000 * budget.left(PILOT_BY) / (turn_ms(depth) * len(texts))
    found = rehearse(bench, texts, sampling, depth, branches, min(max(int(affordable), FEWEST_TRIED), PILOT_TOKENS))
    tokens = sum(1 + tried.accepted for tried in found.rounds)
    return found, tokens / max(before_s - budget.left(), 1e-3)


def _verify_curve(bench: Workbench, known: Text, sampling: SamplingParams, budget: TimeBudget) -> Curve:
    """Returns c(M), the milliseconds of a verify by its rows. Samples of all row counts are interleaved."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    rows = (count for _ in budget.turns(REPEATS, FEWEST_REPEATS, VERIFY_BY) for count in VERIFY_ROWS)
    for count, verify_ms in verifies(bench, known, sampling, rows):
        times[count].append(verify_ms)
    return medians(times)


def _chain_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, deepest: int, budget: TimeBudget
) -> tuple[Curve, float]:
    """Returns the milliseconds of chains on request by length, and of the link."""
    works: dict[int, list[float]] = {}
    links: list[float] = []
    for depth in range(1, deepest + 1):
        found = list(chains(bench, known, sampling, depth, _numbers(budget, CHAINS_BY)))
        works[depth] = [work_ms for work_ms, _ in found]
        links += [link_ms for _, link_ms in found]
    return medians(works), statistics.median(links)


def _tree_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, branches: Sequence[int], budget: TimeBudget
) -> Curve:
    """Returns the milliseconds of a forward that grows all branches, by their number, without each round's first."""
    return medians({
        count: [
            milliseconds(span)
            for spans in aheads(bench, known, sampling, TREE_DEPTH, count, _numbers(budget, TREES_BY), chain=0)
            for span in spans[1:]
        ]
        for count in branches
    })  # fmt: skip


def _turn_curve(
    bench: Workbench, known: Text, sampling: SamplingParams, depths: Sequence[int], budget: TimeBudget
) -> tuple[Curve, float]:
    """Returns the milliseconds of rounds of SD by K, and of the target's wait in them beyond the chain."""
    wholes: dict[int, list[float]] = {}
    between: list[float] = []
    for depth in depths:
        found = list(turns(bench, known, sampling, depth, _numbers(budget, TURNS_BY)))
        wholes[depth] = [turn.whole_ms for turn in found]
        between += [turn.between_ms for turn in found]
    return medians(wholes), statistics.median(between)


def _numbers(budget: TimeBudget, share: float) -> Iterator[int]:
    """Yields round numbers from 1, including the warm-up, until this share of the time has passed."""
    return (turn + 1 for turn in budget.turns(REPEATS + WARM_UP, FEWEST_REPEATS + WARM_UP, share))
