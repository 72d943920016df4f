"""Live estimates of what things cost and how often they succeed; milliseconds and probabilities.

`Estimates` is fed with measured spans and outcomes and read by the fallback and the policy. It takes no clock of its
own. A forward's time follows its rows, whichever requests they belong to; the worth of a millisecond follows what all
requests bring in it.

`Average` and `Slope` follow what is seen and forget slowly. `Acceptance`: how often the tokens of a chain are
accepted. `InProcessDrafts`: one drafter in the target's process: how well its chains hold, and what drafting them
takes; until it has drafted, by its trial at load. `RowCosts`: what a forward takes by its rows: more rows never take
less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile

from outrider.orchestrator.core.ngram import Copy
from outrider.orchestrator.core.policy.tuning import InProcessKnown, TunedArm, Tuning
from outrider.protocol.messages import InProcessDrafter

SMOOTHING = 0.1
FADE = 0.99
# A prior slope counts like points that are spread by so much (the sum of squares).
PRIOR_SPREAD = 32.0


class Average:
    """An exponential moving average that starts with its first value."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self.value: float | None = None
        self._smoothing = smoothing

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._smoothing * (value - self.value)


class Slope:
    """How much y grows with x, by least squares; old points fade. Noise that moves all points alike averages out."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n, self._x, self._y = FADE * self._n + 1, FADE * self._x + x, FADE * self._y + y
        self._xx, self._xy = FADE * self._xx + x * x, FADE * self._xy + x * y

    def value(self, prior: float) -> float:
        """Near `prior` until points that differ in x say otherwise."""
        count = max(self._n, 1.0)
        spread = self._xx - self._x**2 / count
        together = self._xy - self._x * self._y / count
        return (together + PRIOR_SPREAD * prior) / (spread + PRIOR_SPREAD)


PRIOR_WEIGHT = 8.0
PRIOR_ACCEPTANCE = 0.7
# In one text what is believed of its kind counts like so many chains that broke.
PRIOR_BREAKS = 3.0
MAX_POSITIONS = 64
# Nothing holds more seldom than this, whatever was seen, nor breaks more seldom.
SELDOM = 0.02


class Acceptance:
    """How often chain token i held, given that those before it did.

    The first `positions` have counts of their own; the last of them stands for all that follow.
    """

    def __init__(
        self,
        prior: float | Acceptance = PRIOR_ACCEPTANCE,
        weight: float = PRIOR_WEIGHT,
        positions: int = MAX_POSITIONS,
        fade: float = FADE,
    ) -> None:
        self.prior, self._weight, self._fade = prior, weight, fade
        self._tried = [0.0] * positions
        self._held = [0.0] * positions

    def add(self, chain_length: int, accepted: int) -> None:
        for index in range(min(accepted + 1, chain_length)):
            position = min(index, len(self._tried) - 1)
            self._tried[position] = self._fade * self._tried[position] + 1.0
            self._held[position] = self._fade * self._held[position] + float(index < accepted)

    def start_from(self, rates: Sequence[float]) -> None:
        """Takes these for what `PRIOR_WEIGHT` rounds showed."""
        for position, rate in enumerate(rates[: len(self._tried)]):
            self._tried[position], self._held[position] = PRIOR_WEIGHT, PRIOR_WEIGHT * rate

    def known(self) -> tuple[float, ...]:
        """The rates of the positions that were seen."""
        seen = next((i for i, tried in enumerate(self._tried) if not tried), len(self._tried))
        return tuple(self.rate(position) for position in range(seen))

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        """The probability at this position; `without` leaves out the chains that this part of them has counted."""
        index = min(position, len(self._tried) - 1)
        tried, held = self._tried[index], self._held[index]
        if without is not None:
            tried = max(tried - without._tried[index], 0.0)
            held = min(max(held - without._held[index], 0.0), tried)
        return (held + self._weight * self._believed(position)) / (tried + self._weight)

    def _believed(self, position: int) -> float:
        """What all other chains say: these must not count at each level."""
        return self.prior.rate(position, without=self) if isinstance(self.prior, Acceptance) else self.prior

    def likelihood(self, chain_length: int, accepted: int) -> float:
        """The logarithm of the chance that so many tokens of a chain hold, and no more."""
        rates = [min(max(self.rate(place), SELDOM), 1.0 - SELDOM) for place in range(min(accepted + 1, chain_length))]
        broke = math.log(1.0 - rates[accepted]) if accepted < chain_length else 0.0
        return broke + sum(map(math.log, rates[:accepted]))

    def reach(self, position: int) -> float:
        """Probability that chain token `position` and all before it hold."""
        return math.prod(self.rate(i) for i in range(position + 1))

    def expected_tokens(self, chain_length: int) -> float:
        """E[tokens] of a round with a chain of this length, the bonus token included."""
        reach = total = 1.0
        for position in range(chain_length):
            reach *= self.rate(position)
            total += reach
        return total


class Shifted(Acceptance):
    """How often tokens hold in one text: as `prior` says, but that all places break so many times as often as there.

    A text is hard or easy as a whole, so a few chains show it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._broke = self._expected = PRIOR_BREAKS

    def add(self, chain_length: int, accepted: int) -> None:
        super().add(chain_length, accepted)
        self._expected += sum(1.0 - self._believed(place) for place in range(min(accepted + 1, chain_length)))
        self._broke += float(accepted < chain_length)

    def rate(self, position: int, without: Acceptance | None = None) -> float:
        return max(1.0 - (1.0 - self._believed(position)) * self._broke / self._expected, 0.0)


# A drafter's token takes at least so much of a target's step, however small it is.
LEAST_WEIGHT = 0.05


class InProcessDrafts:
    """`drafted`: how well its tokens hold. `is_head`: it reads the target."""

    def __init__(self, told: InProcessDrafter) -> None:
        self.name, self.is_head = told.name, told.is_head
        self.drafted = Acceptance(told.agreement if told.agreement >= 0 else PRIOR_ACCEPTANCE)
        self._weight = max(told.weight, LEAST_WEIGHT)
        self._step_ms = Average()

    def observe(self, tokens: int, accepted: int, milliseconds: float) -> None:
        """A chain of so many tokens, drafted together with those of other requests."""
        self.drafted.add(tokens, accepted)
        self._step_ms.add(milliseconds / max(tokens, 1))

    def start_from(self, step_ms: float, acceptance: tuple[float, ...]) -> None:
        """Takes earlier measurements for first values."""
        self._step_ms.add(step_ms)
        self.drafted.start_from(acceptance)

    @property
    def is_known(self) -> bool:
        """Whether it has drafted."""
        return self._step_ms.value is not None

    def step_ms(self, forward_ms: float) -> float:
        """A token of a chain; by its trial, where it has not drafted yet and a step of the target takes so long."""
        return self._step_ms.value if self._step_ms.value is not None else self._weight * forward_ms


# Until measured: a row more costs a tenth of the first.
COST_PER_ROW = 0.1
# Up to here every number of rows is measured by itself, beyond with those an eighth more or less.
EXACT_ROWS = 16
PARTS = 8
# What was seen last counts most: the machine is not always as busy. The most that one place counts.
ROW_FADE = 0.995
HEAVIEST = 1.0 / SMOOTHING


class RowCosts:
    """Averages by rows, made monotone where they contradict each other; straight lines between them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float, int]] = {}  # by place: milliseconds, weight, when
        self._count = 0
        self._curve: list[tuple[int, float]] | None = None

    def add(self, rows: int, milliseconds: float) -> None:
        place = _place(rows)
        known, weight, when = self._seen.get(place, (milliseconds, 0.0, self._count))
        weight *= ROW_FADE ** (self._count - when)
        share = max(1.0 / (weight + 1.0), SMOOTHING)
        self._seen[place] = known + share * (milliseconds - known), min(weight + 1.0, HEAVIEST), self._count
        self._count += 1
        self._curve = None

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(rows, milliseconds), both rising."""
        if self._curve is None:
            weighed = [
                (rows, ms, weight * ROW_FADE ** (self._count - when))
                for rows, (ms, weight, when) in sorted(self._seen.items())
            ]
            self._curve = _monotone(weighed)
        return tuple(self._curve)

    def __call__(self, rows: int) -> float | None:
        """None until anything was measured."""
        points = self.points
        if not points:
            return None
        at = bisect_left(points, (rows,))
        if at == len(points):
            return points[-1][1] * usual(rows) / usual(points[-1][0])
        above, ms = points[at]
        if above == rows:
            return ms
        if at == 0:
            return self._below(rows)
        below, less = points[at - 1]
        return less + (ms - less) * (rows - below) / (above - below)

    def _below(self, rows: int) -> float:
        """Fewer rows than were ever seen: straight on from the first two, at least their share of the first."""
        (first, ms), *others = self.points
        if not others:
            return ms * usual(rows) / usual(first)
        second, more = others[0]
        return max(ms - (more - ms) * (first - rows) / (second - first), ms * rows / first)


def _place(rows: int) -> int:
    """Where so many rows are counted: alone while they are few, else with their like."""
    if rows <= EXACT_ROWS:
        return rows
    step = max((1 << rows.bit_length() - 1) // PARTS, 1)
    return round(rows / step) * step


def usual(rows: int) -> float:
    """What so many rows cost, in times of one, where nothing was measured."""
    return 1.0 + COST_PER_ROW * (rows - 1)


def _monotone(weighed: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """The rising curve nearest to what was seen (pool adjacent violators)."""
    pools: list[tuple[float, float, list[int]]] = []
    for rows, ms, weight in weighed:
        pool = (ms, weight, [rows])
        while pools and pools[-1][0] > pool[0]:
            before, heavy, places = pools.pop()
            both = heavy + pool[1]
            pool = ((before * heavy + pool[0] * pool[1]) / both, both, places + pool[2])
        pools.append(pool)
    return [(rows, ms) for ms, _, places in pools for rows in places]


# Of tokens copied from the text, by how many before them matched.
PRIOR_COPIED = (0.3, 0.3, 0.45, 0.55, 0.65, 0.75)
# Of those that a drafter contradicts at the first token, that token and those after it.
PRIOR_BESIDE = (0.05, 0.05, 0.1, 0.15, 0.2, 0.25)
# How well copies hold changes from text to text, and with the temperature: few positions and a short memory follow.
COPY_WEIGHT = 2.0
COPY_FADE = 0.95
COPIED_SMOOTHING = 0.03
PRIOR_HIT_RATE, PRIOR_BRANCHES = 0.8, 16
# What B branches fewer miss: the misses of theorem 12 grow by this power of the budget.
MISS_POWER = 0.5
PRIOR_VERIFY_MS, PRIOR_DEPTH_MS, PRIOR_LINK_MS, PRIOR_TURNAROUND_MS = 10.0, 3.0, 0.5, 0.3


class Estimates:
    """What the orchestrator believes about its workers and the text. `active`: so many requests share the workers.

    Of several drafters what is said here is the quickest one's, which has this `part` of a round's branches. Where a
    `drafter` is named it is one of the target's process.
    """

    def __init__(self) -> None:
        self.active = 1
        self.part = 1.0
        self.drafted = Acceptance()
        self._copied = [Acceptance(prior, COPY_WEIGHT, positions=2, fade=COPY_FADE) for prior in PRIOR_COPIED]
        self._alternatives_of_drafts = [
            Acceptance(prior, COPY_WEIGHT, positions=2, fade=COPY_FADE) for prior in PRIOR_BESIDE
        ]
        self._verify_ms = RowCosts()
        self._plain_ms = RowCosts()
        self._trees_ms = RowCosts()
        self._row_ms = Slope()
        self._alternatives = Average()
        self._step_ms = Average()
        self._depth_ms = Average()
        self._link_ms = Average()
        self._link_alone_ms = Average()
        self._round_tokens = Average()
        self._round_ms = Average()
        self._hits = Average()
        self._covered = Average()
        self._branches = Average()
        self._turnaround_ms = Average()
        self._in_process: dict[str, InProcessDrafts] = {}
        self._in_process_known: dict[str, InProcessKnown] = {}
        self._copied_tokens = Average(COPIED_SMOOTHING)
        self._copied_rows = Average(COPIED_SMOOTHING)

    # --- what was seen --------------------------------------------------------------------------------------------

    def start_from(self, tuning: Tuning) -> None:
        """Takes earlier measurements for first values."""
        for rows, milliseconds in tuning.verify_ms:
            self.observe_verify(rows, milliseconds)
        for rows, milliseconds in tuning.plain_ms or ((1, tuning.step_ms),):
            self._plain_ms.add(rows, milliseconds)
        for rows, milliseconds in tuning.trees_ms:
            self._trees_ms.add(rows, milliseconds)
        self._step_ms.add(tuning.draft_ms)
        self._depth_ms.add(tuning.depth_ms)
        self._link_ms.add(tuning.link_ms)
        self._link_alone_ms.add(tuning.link_ms)
        self._turnaround_ms.add(tuning.turnaround_ms)
        self._hits.add(tuning.hit_rate)
        self._covered.add(tuning.hit_rate)
        self._branches.add(max((choice.branches for choice in tuning.choices), default=0) or PRIOR_BRANCHES)
        self.drafted.start_from(tuning.acceptance)
        self._in_process_known |= {own.name: own for own in tuning.own}

    def snapshot(self, choices: tuple[TunedArm, ...], temp: float) -> Tuning:
        """All this as a record that `start_from` takes."""
        return Tuning(
            step_ms=self.plain_ms(1),
            verify_ms=self._verify_ms.points,
            depth_ms=self.depth_ms(),
            draft_ms=self.step_ms(),
            link_ms=_or(self._link_alone_ms, PRIOR_LINK_MS),
            turnaround_ms=self.turnaround_ms(),
            acceptance=self.drafted.known(),
            hit_rate=self.covered(PRIOR_BRANCHES),
            choices=choices,
            temp=temp,
            plain_ms=self._plain_ms.points,
            trees_ms=self._trees_ms.points,
            own=tuple(
                InProcessKnown(own.name, own.step_ms(0.0), own.drafted.known())
                for own in self._in_process.values()
                if own.is_known
            ),
        )

    def add_drafters(self, own: Iterable[InProcessDrafter]) -> None:
        """These are in the target's process."""
        for told in own:
            if told.name not in self._in_process:
                drafts = self._in_process[told.name] = InProcessDrafts(told)
                known = self._in_process_known.get(told.name)
                if known is not None:
                    drafts.start_from(known.step_ms, known.acceptance)

    def is_head(self, drafter: str) -> bool:
        """Whether this drafter of the target's process reads what the target thinks."""
        return self._in_process[drafter].is_head

    def observe_in_process(self, drafter: str, tokens: int, accepted: int, milliseconds: float) -> None:
        """A chain of one in the target's process."""
        self._in_process[drafter].observe(tokens, accepted, milliseconds)

    def observe_verify(self, rows: int, milliseconds: float, own: int | None = None) -> None:
        """A forward of so many rows, `own` of them one request's; None: all."""
        self._verify_ms.add(rows, milliseconds)
        self._row_ms.add(rows, milliseconds)
        self._alternatives.add(rows - (rows if own is None else own))

    def observe_plain(self, texts: int, milliseconds: float) -> None:
        """From one token of plain decoding to the next, so many texts decoding together."""
        self._plain_ms.add(texts, milliseconds)

    def observe_draft(self, tokens: int, milliseconds: float) -> None:
        """A chain of `tokens` drafted in one go."""
        self._step_ms.add(milliseconds / max(tokens, 1))

    def observe_depth(self, branches: int, milliseconds: float) -> None:
        """One token more for all of a request's branches, which came so long after the one before."""
        self._depth_ms.add(milliseconds)
        self._trees_ms.add(branches * self.active, milliseconds)

    def observe_chain(self, drafted: int, accepted: int) -> None:
        """A verified chain that began with `drafted` tokens from a drafter."""
        self.drafted.add(drafted, min(accepted, drafted))

    def observe_copy(self, copy: Copy, committed: Sequence[int]) -> int:
        """What the text had said would come, verified or not, and what came; how many of its tokens held."""
        held = _held(copy, committed)
        self.copied(copy.matched).add(min(len(copy.chain), len(committed)), held)
        self._copied_tokens.add(held)
        self._copied_rows.add(len(copy.chain))
        return held

    def observe_alternatives(self, copy: Copy, committed: Sequence[int]) -> None:
        """The same of a copy whose first token a drafter contradicted."""
        self.alternatives(copy.matched).add(min(len(copy.chain), len(committed)), _held(copy, committed))

    def observe_link(self, milliseconds: float) -> None:
        """What asking the drafter cost beyond its own work; with other requests that includes its work for others."""
        self._link_ms.add(milliseconds)
        if self.active == 1:
            self._link_alone_ms.add(milliseconds)

    def observe_round(self, tokens: int, milliseconds: float) -> None:
        """What one request's round brought, and how long it took."""
        self._round_tokens.add(tokens)
        self._round_ms.add(milliseconds)

    def observe_lookup(self, hit: bool, branches: int = 0) -> None:
        """`branches`: how many there were to be, if all of them were there in time; 0: not all were."""
        self._hits.add(float(hit))
        if branches:
            self._covered.add(float(hit))
            self._branches.add(branches)

    def observe_turnaround(self, milliseconds: float) -> None:
        """The target's wait between an outcome and the verify of a hit."""
        self._turnaround_ms.add(milliseconds)

    # --- the target -----------------------------------------------------------------------------------------------

    def forward_ms(self, rows: int) -> float:
        """c(M): a forward of so many rows, whoever's they are."""
        known = self._verify_ms(rows)
        if known is None:
            known = self._plain_ms(rows)
        return known if known is not None else PRIOR_VERIFY_MS * usual(rows)

    def verify_ms(self, rows: int) -> float:
        """A forward with so many rows of one request, beside the others' as they were of late."""
        beside = self._alternatives.value if self.active > 1 else 0.0
        return self.forward_ms(rows + round(beside or 0.0))

    def row_ms(self) -> float:
        """What one row more adds to a forward."""
        first = self.forward_ms(1)
        return min(max(self._row_ms.value(COST_PER_ROW * first), 0.0), first)

    def plain_ms(self, texts: int) -> float:
        """A token each for so many texts that decode plainly, one step pipelined."""
        nearest = min((rows for rows, _ in self._plain_ms.points), key=lambda rows: abs(rows - texts), default=None)
        if nearest is None:
            return self.forward_ms(texts)
        pipelined = (self._plain_ms(nearest) or 0.0) / self.forward_ms(nearest)
        return pipelined * self.forward_ms(texts)

    def turnaround_ms(self) -> float:
        return _or(self._turnaround_ms, PRIOR_TURNAROUND_MS)

    # --- the drafter ----------------------------------------------------------------------------------------------

    @property
    def has_drafted(self) -> bool:
        """Whether a drafter has ever answered."""
        return self._step_ms.value is not None

    def holding(self, drafter: str = "") -> Acceptance:
        """How well its tokens hold."""
        return self._in_process[drafter].drafted if drafter else self.drafted

    def draft_ms(self, tokens: int, drafter: str = "") -> float:
        """Asking a drafter for a chain of `tokens` and having it."""
        return self.in_process_ms(tokens, drafter) if drafter else tokens * self.step_ms() + self.link_ms()

    def in_process_ms(self, tokens: int, drafter: str) -> float:
        """A chain of one in the target's process, or one for each request that shares its forwards."""
        return tokens * self._in_process[drafter].step_ms(self.forward_ms(1))

    def chain_ms(self, tokens: int) -> float:
        """The same from a drafter that has nothing else to do."""
        return tokens * self.step_ms() + _or(self._link_alone_ms, PRIOR_LINK_MS)

    def step_ms(self) -> float:
        """A token of a chain that is asked for."""
        return _or(self._step_ms, self.depth_ms())

    def link_ms(self) -> float:
        """There and back between here and a drafter."""
        return _or(self._link_ms, PRIOR_LINK_MS)

    def depth_ms(self) -> float:
        """One token more for all of a request's branches, as of late."""
        return _or(self._depth_ms, PRIOR_DEPTH_MS)

    def trees_ms(self, branches: int) -> float:
        """One token more for so many branches, all requests' together, and all drafters'."""
        branches = max(round(branches * self.part), 1)
        known = self._trees_ms(branches)
        return self.depth_ms() * usual(branches) / usual(PRIOR_BRANCHES) if known is None else known

    # --- odds and worth -------------------------------------------------------------------------------------------

    def copied(self, matched: int) -> Acceptance:
        """How well tokens hold that followed so many matching ones before."""
        return self._copied[min(matched, len(self._copied) - 1)]

    def copied_a_round(self) -> tuple[float, float]:
        """Of what the text says comes next: how many tokens held in a round, and how many there were."""
        return _or(self._copied_tokens, 0.0), _or(self._copied_rows, 0.0)

    def alternatives(self, matched: int) -> Acceptance:
        """The same of copies whose first token a drafter contradicts."""
        return self._alternatives_of_drafts[min(matched, len(self._alternatives_of_drafts) - 1)]

    def hit_rate(self) -> float:
        return _or(self._hits, PRIOR_HIT_RATE)

    def covered(self, branches: int) -> float:
        """How often a lookup finds its branch where all of `branches` are there in time."""
        missed = 1.0 - _or(self._covered, PRIOR_HIT_RATE)
        return max(1.0 - missed * math.pow(_or(self._branches, PRIOR_BRANCHES) / max(branches, 1), MISS_POWER), 0.0)

    def request_tokens_per_ms(self) -> float:
        """The rate at which one request's tokens have been coming; what a millisecond of its waiting costs."""
        tokens, milliseconds = self._round_tokens.value, self._round_ms.value
        return tokens / milliseconds if tokens and milliseconds else 1.0 / self.verify_ms(1)

    def tokens_per_ms(self) -> float:
        """What all requests bring together; what a millisecond of the target costs."""
        return self.active * self.request_tokens_per_ms()

    def wait_ms(self, milliseconds: float) -> float:
        """What a wait takes: with others it is a forward at least, since they begin theirs without this request."""
        return milliseconds if self.active == 1 else max(milliseconds, self.verify_ms(1))


def _held(copy: Copy, committed: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(copy.chain, committed, strict=False)))


def _or(average: Average, prior: float) -> float:
    return prior if average.value is None else average.value
