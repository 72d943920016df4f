"""Live estimates of costs in milliseconds and of probabilities.

`Estimates` receives measured spans and outcomes; the fallback and the policy read it. It reads no clock. The time of a
forward depends on its rows, whichever requests they belong to; a millisecond is worth the tokens that all requests
gain in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from outrider.orchestrator.core.policy.acceptance import Acceptance, Average, CopyStats, InProcessStats
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.tuning import TunedArm, TunedDrafter, Tuning
from outrider.orchestrator.settings import DEFAULT_BRANCHES, DEFAULT_DRAFT_TOKENS
from outrider.protocol.messages import InProcessDrafter
from outrider.protocol.ngrams import MAX_COPY_TOKENS, CopyAcceptance

# Up to `MAX_EXACT_ROWS` each number of rows has its own average; beyond, each doubling has `BUCKETS_PER_DOUBLING`.
MAX_EXACT_ROWS = 16
BUCKETS_PER_DOUBLING = 8
MIN_WEIGHT = 1e-9  # of rows that were not measured for long; 0 could not be averaged


class DrafterLatency:
    """How soon the work of one drafter arrives: `lag_ms` from a message to the first tokens, `step_ms` from one push to
    the next, in milliseconds of the orchestrator's clock (0: not known). Both include its speed, its link and its work
    for other requests. `left_out`: rounds since its last task.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.lag_ms = Average(smoothing=POLICY.latency_smoothing)
        self.step_ms = Average(smoothing=POLICY.latency_smoothing)

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried, because its latency is unknown or old."""
        return not self.lag_ms.is_known or self.left_out >= POLICY.drafter_trial_rounds

    def observe_chain(self, tokens: int, milliseconds: float) -> None:
        """Records the time of a whole chain."""
        step = self.step_ms() or milliseconds / max(tokens, 1)
        self.step_ms.add(step)
        self.lag_ms.add(max(milliseconds - (tokens - 1) * step, step))

    def observe_overdue(self, milliseconds: float) -> None:
        """Records that nothing arrived for this long; a latency of twice that is then expected."""
        if milliseconds > self.lag_ms():
            self.lag_ms.add(2 * milliseconds)

    def reset(self) -> None:
        """Drops the old measurements of a drafter that was left out."""
        self.left_out = 0
        self.lag_ms = Average(smoothing=POLICY.latency_smoothing)

    def ready_ms(self, depth: int) -> float:
        """Returns the time from a message until its branches are `depth` tokens deep."""
        return self.lag_ms() + (depth - 1) * self.step_ms()

    def share(self, depth: int, within_ms: float) -> float:
        """Returns the share of the depth that arrives in time, from 0 to 1."""
        left_ms = within_ms - self.lag_ms()
        if left_ms < 0 or not self.lag_ms.is_known:
            return 0.0
        if left_ms >= (depth - 1) * self.step_ms():
            return 1.0
        return (1.0 + left_ms / self.step_ms()) / depth


class RowCosts:
    """Milliseconds by rows: averages, made monotone where they contradict each other, and interpolated linearly."""

    def __init__(self) -> None:
        self._averages: dict[int, tuple[float, float, int]] = {}  # by `_bucket`: milliseconds, weight, time of update
        self._count = 0
        self._curve: list[tuple[int, float]] | None = None
        self._weighed: list[tuple[int, float, float]] = []  # (rows, milliseconds, weight) behind the curve

    def add(self, rows: int, milliseconds: float) -> None:
        """Records a time, of which a stall counts only in part (`max_stall_factor`)."""
        bucket = _bucket(rows)
        average, weight, updated = self._averages.get(bucket, (milliseconds, 0.0, self._count))
        milliseconds = min(milliseconds, POLICY.max_stall_factor * average)
        weight *= POLICY.fade ** (self._count - updated)
        average += max(1.0 / (weight + 1.0), POLICY.smoothing) * (milliseconds - average)
        self._averages[bucket] = average, min(weight + 1.0, 1.0 / POLICY.smoothing), self._count
        self._count += 1
        self._curve = None

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(rows, milliseconds), both rising."""
        if self._curve is None:
            self._weighed = [
                (rows, ms, max(weight * POLICY.fade ** (self._count - updated), MIN_WEIGHT))
                for rows, (ms, weight, updated) in sorted(self._averages.items())
            ]
            self._curve = _fit_monotone(self._weighed)
        return tuple(self._curve)

    def weight(self, rows: int) -> float:
        """Returns the weight of what was measured for `rows` and more; it fades while others are measured."""
        return sum(weight for measured, _, weight in self._weighed if measured >= rows) if self.points else 0.0

    def __call__(self, rows: float) -> float | None:
        """Returns the milliseconds for `rows`, an expected number; None until something was measured."""
        points = self.points
        if not points:
            return None
        at = bisect_left(points, (rows,))
        if at == len(points):
            return points[-1][1] * prior_cost(rows) / prior_cost(points[-1][0])
        above, ms = points[at]
        if above == rows:
            return ms
        if at == 0:
            return self._extrapolate_below(rows)
        below, less = points[at - 1]
        return less + (ms - less) * (rows - below) / (above - below)

    def _extrapolate_below(self, rows: float) -> float:
        """Extrapolates to fewer rows than the first point: linearly, but never below its proportional share."""
        (first, ms), *others = self.points
        if not others:
            return ms * prior_cost(rows) / prior_cost(first)
        second, more = others[0]
        return max(ms - (more - ms) * (first - rows) / (second - first), ms * rows / first)


def _bucket(rows: int) -> int:
    """Returns the bucket of `rows`, named by a number of rows; all rows of a bucket share an average."""
    if rows <= MAX_EXACT_ROWS:
        return rows
    step = max((1 << rows.bit_length() - 1) // BUCKETS_PER_DOUBLING, 1)
    return round(rows / step) * step


def prior_cost(rows: float) -> float:
    """Returns the prior cost of `rows`, in units of one row."""
    return 1.0 + POLICY.cost_per_row * (rows - 1)


def _fit_monotone(weighed: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """Returns the rising curve nearest to (rows, milliseconds, weight) (pool adjacent violators)."""
    pools: list[tuple[float, float, list[int]]] = []
    for rows, ms, weight in weighed:
        pool = (ms, weight, [rows])
        while pools and pools[-1][0] > pool[0]:
            last_ms, last_weight, last_rows = pools.pop()
            total = last_weight + pool[1]
            pool = ((last_ms * last_weight + pool[0] * pool[1]) / total, total, last_rows + pool[2])
        pools.append(pool)
    return [(rows, ms) for ms, _, pooled in pools for rows in pooled]


class Estimates:
    """Costs and odds of the workers and the texts; `active` requests share the workers.

    With several draft workers the estimates are those of the fastest one, which has the share `part` of a round's
    branches: `depth_ms` is the recent time for one more token on each of a request's branches. `pipelined_ms` is the
    time from one token of plain decoding to the next, by the number of texts in a forward, `turnaround_ms` the target's
    idle time between an outcome and the verify of a hit. A `drafter` argument names one of those `in_process`.
    `may_use_all_cores`: in `auto` the target also computes on the drafters' core while they are idle.
    """

    def __init__(self) -> None:
        self.active = 1
        self.may_use_all_cores = False
        self.part = 1.0
        self.drafted = Acceptance()
        self.verified = Acceptance(1.0)
        weight, fade, alternative = POLICY.copy_prior_chains, POLICY.copy_fade, POLICY.prior_alternative
        self.copied = CopyAcceptance(POLICY.prior_copied, weight, fade)
        self.alternatives = CopyAcceptance(alternative, weight, fade, table_prior=alternative)
        self._verify_ms = RowCosts()
        self._all_cores_ms = RowCosts()
        self.pipelined_ms = RowCosts()
        self._trees_ms = RowCosts()
        self._other_rows = Average()
        self._known_row_costs: tuple[int, list[float]] = (0, [])  # those of this load, until something is measured
        self._step_ms = Average()
        self.depth_ms = Average(POLICY.prior_depth_ms)
        self._link_ms = Average()
        self._idle_link_ms = Average()
        self._round_tokens = Average()
        self._round_ms = Average()
        self.hit_rate = Average()
        self._complete_hit_rate = Average()
        for average in (self.hit_rate, self._complete_hit_rate):
            average.start_from(POLICY.prior_rate, POLICY.prior_chains)
        self._branches = Average(DEFAULT_BRANCHES)
        self.turnaround_ms = Average()
        self.in_process: dict[str, InProcessStats] = {}
        self._tuned_drafters: dict[str, TunedDrafter] = {}
        self.copies = CopyStats()

    # --- observations ---------------------------------------------------------------------------------------------

    def start_from(self, tuning: Tuning) -> None:
        """Begins from earlier measurements."""
        for rows, milliseconds in tuning.verify_ms:
            self._verify_ms.add(rows, milliseconds)
        for rows, milliseconds in tuning.all_cores_ms:
            self._all_cores_ms.add(rows, milliseconds)
        for rows, milliseconds in tuning.plain_ms or ((1, tuning.step_ms),):
            self.pipelined_ms.add(rows, milliseconds)
        for rows, milliseconds in tuning.trees_ms:
            self._trees_ms.add(rows, milliseconds)
        self._step_ms.start_from(tuning.draft_ms)
        self.depth_ms.start_from(tuning.depth_ms)
        self._link_ms.start_from(tuning.link_ms)
        self._idle_link_ms.start_from(tuning.link_ms)
        self.turnaround_ms.start_from(tuning.turnaround_ms)
        for average in (self.hit_rate, self._complete_hit_rate):
            average.start_from(min(tuning.hit_rate, 1.0))
        self._branches.start_from(max((choice.branches for choice in tuning.choices), default=0) or DEFAULT_BRANCHES)
        self.drafted.start_from(tuning.acceptance)
        self._tuned_drafters |= {known.name: known for known in tuning.own}

    def snapshot(self, choices: tuple[TunedArm, ...], temp: float) -> Tuning:
        """Returns the estimates as a record that `start_from` takes."""
        return Tuning(
            step_ms=self.plain_ms(1),
            verify_ms=self._verify_ms.points,
            depth_ms=self.depth_ms(),
            draft_ms=self.step_ms(),
            link_ms=self._idle_link_ms(),
            turnaround_ms=self.turnaround_ms(),
            acceptance=self.drafted.known(),
            hit_rate=self.hit_rate_of(DEFAULT_BRANCHES),
            choices=choices,
            temp=temp,
            plain_ms=self.pipelined_ms.points,
            all_cores_ms=self._all_cores_ms.points,
            trees_ms=self._trees_ms.points,
            own=tuple(
                TunedDrafter(drafts.name, drafts.step_ms(0.0), drafts.drafted.known())
                for drafts in self.in_process.values()
                if drafts.is_known
            ),
        )

    def add_drafters(self, drafters: Iterable[InProcessDrafter]) -> None:
        """Adds the in-process drafters that are new."""
        for drafter in drafters:
            if drafter.name not in self.in_process:
                drafts = self.in_process[drafter.name] = InProcessStats(drafter)
                known = self._tuned_drafters.get(drafter.name)
                if known is not None:
                    drafts.start_from(known.step_ms, known.acceptance)

    def observe_verify(self, rows: int, milliseconds: float, own: int | None = None, all_cores: bool = False) -> None:
        """Records a forward of `rows`, of which one request has `own` (None: all). `all_cores`: no draft worker
        computed meanwhile, so the forward had all cores."""
        (self._all_cores_ms if all_cores else self._verify_ms).add(rows, milliseconds)
        self._other_rows.add(rows - (rows if own is None else own))
        self._known_row_costs = (0, [])

    def observe_draft(self, tokens: int, milliseconds: float) -> None:
        """Records a chain of `tokens` drafted on request."""
        self._step_ms.add_time(milliseconds / max(tokens, 1))

    def observe_depth(self, branches: int, milliseconds: float) -> None:
        """Records the time for one more token on each of a request's branches."""
        self.depth_ms.add_time(milliseconds)
        self._trees_ms.add(branches * self.active, milliseconds)

    def observe_chain(self, drafted: int, accepted: int, verified: int | None = None) -> None:
        """Records a chain of `drafted` tokens from a draft worker, of which the first `verified` (None: all) were
        verified, because only they were likely enough."""
        self.drafted.add(drafted, min(accepted, drafted))
        self.verified.add(drafted, drafted if verified is None else verified)

    def observe_link(self, milliseconds: float) -> None:
        """Records the time of a chain on request beyond its drafting; with several requests that includes a queue."""
        self._link_ms.add_time(milliseconds, self.forward_ms(1))
        if self.active == 1:
            self._idle_link_ms.add_time(milliseconds, self.forward_ms(1))

    def observe_turnaround(self, milliseconds: float) -> None:
        """Records the target's idle time between an outcome and the verify of a hit."""
        self.turnaround_ms.add_time(milliseconds, self.forward_ms(1))

    def observe_round(self, tokens: int, milliseconds: float) -> None:
        """Records the tokens and the duration of one request's round."""
        self._round_tokens.add(tokens)
        self._round_ms.add_time(milliseconds, self.verify_ms(MAX_COPY_TOKENS + 1))
        self._known_row_costs = (0, [])

    def observe_lookup(self, hit: bool, branches: int = 0) -> None:
        """Records a hit or miss; `branches`: how many were requested, 0 unless all of them were there in time."""
        self.hit_rate.add(float(hit))
        if branches:
            self._complete_hit_rate.add(float(hit))
            self._branches.add(branches)

    # --- the target -----------------------------------------------------------------------------------------------

    def forward_ms(self, rows: float, all_cores: bool = False) -> float:
        """Returns c(M), the time of a forward of `rows` in all: while draft workers compute, or on `all_cores`. If
        there is no such measurement, the other kind is used."""
        shared, whole = self._verify_ms, self._all_cores_ms
        known = (whole, shared, self.pipelined_ms) if all_cores else (shared, whole, self.pipelined_ms)
        measured = (milliseconds for costs in known if (milliseconds := costs(rows)) is not None)
        return next(measured, POLICY.prior_verify_ms * prior_cost(rows))

    @property
    def lacks_all_cores(self) -> bool:
        """Whether the target may use all cores, and no forward on them was measured."""
        return self.may_use_all_cores and not (self._all_cores_ms.points or self.pipelined_ms.points)

    def verify_ms(self, rows: int) -> float:
        """Returns the time of a forward with `rows` of one request and the recent average of the others' rows."""
        return self.forward_ms(rows + self._rows_of_others())

    def _rows_of_others(self) -> int:
        return round(self._other_rows.value) if self.active > 1 else 0

    def rows(self, depth: int) -> float:
        """Returns E[rows] of the verify of a draft worker's chain of `depth` tokens, cut to those that pay."""
        return self.verified.expected_tokens(depth)

    def row_costs(self, count: int) -> list[float]:
        """Returns what the verify of 0, 1, ... `count` draft tokens costs, in tokens: those of the target's time.

        If rows seem to cost more than the prior says, measurements that are few or old count less: a disturbed one
        would otherwise keep this number of rows from ever being verified, and so measured, again.
        """
        load, costs = self._known_row_costs
        if load == self.active and len(costs) > count:
            return costs[: count + 1]
        worth, first, others = self.tokens_per_ms(), self.verify_ms(1), self._rows_of_others()
        costs = []
        for tokens in range(max(count, MAX_COPY_TOKENS) + 1):
            weight = sum(curve.weight(1 + tokens + others) for curve in (self._verify_ms, self._all_cores_ms))
            measured, prior = self.verify_ms(1 + tokens) - first, POLICY.cost_per_row * first * tokens
            costs.append(worth * min(measured, (weight * measured + prior) / (weight + 1.0)))
        self._known_row_costs = self.active, costs
        return costs[: count + 1]

    def row_cost(self) -> float:
        """Returns what one more draft token costs in a chain of the usual length, in tokens."""
        return self.row_costs(DEFAULT_DRAFT_TOKENS)[-1] / DEFAULT_DRAFT_TOKENS

    def plain_ms(self, texts: int) -> float:
        """Returns the time of a step of plain decoding, pipelined, with this many texts."""
        nearest = min((rows for rows, _ in self.pipelined_ms.points), key=lambda rows: abs(rows - texts), default=None)
        if nearest is None:
            return self.forward_ms(texts, all_cores=True)
        pipelined = (self.pipelined_ms(nearest) or 0.0) / self.forward_ms(nearest, all_cores=True)
        return pipelined * self.forward_ms(texts, all_cores=True)

    # --- the drafter ----------------------------------------------------------------------------------------------

    @property
    def has_drafted(self) -> bool:
        """Whether a draft worker has ever answered a request for a chain."""
        return self._step_ms.is_known

    def acceptance_of(self, drafter: str = "") -> Acceptance:
        """Returns the drafter's acceptance."""
        return self.in_process[drafter].drafted if drafter else self.drafted

    def link_ms(self) -> float:
        """Returns the round-trip time to the draft worker, which for several requests includes a queue."""
        return self._idle_link_ms() if self.active == 1 else self._link_ms()

    def draft_ms(self, tokens: int, drafter: str = "") -> float:
        """Returns the time from the request for a chain of `tokens` to its arrival."""
        return self.in_process_ms(tokens, drafter) if drafter else tokens * self.step_ms() + self.link_ms()

    def in_process_ms(self, tokens: int, drafter: str) -> float:
        """Returns the time of an in-process chain; requests that share forwards draft theirs in the same time."""
        return tokens * self.in_process[drafter].step_ms(self.forward_ms(1))

    def chain_ms(self, tokens: int) -> float:
        """Returns the time from the request for a chain of `tokens` to its arrival from an idle draft worker."""
        return tokens * self.step_ms() + self._idle_link_ms()

    def step_ms(self) -> float:
        """Returns the time for a token of a chain on request."""
        return self._step_ms.value_or(self.depth_ms())

    def trees_ms(self, branches: int) -> float:
        """Returns the time for one more token on each of `branches`, over all requests and draft workers."""
        branches = max(round(branches * self.part), 1)
        measured = self._trees_ms(branches)
        return self.depth_ms() * prior_cost(branches) / prior_cost(DEFAULT_BRANCHES) if measured is None else measured

    # --- odds and worth -------------------------------------------------------------------------------------------

    def hit_rate_of(self, branches: int) -> float:
        """Returns the hit rate when all of `branches` are there in time."""
        missed = 1.0 - self._complete_hit_rate()
        return max(1.0 - missed * math.sqrt(self._branches() / max(branches, 1)), 0.0)

    def request_tokens_per_ms(self) -> float:
        """Returns the recent rate of one request; the cost of a millisecond of its waiting."""
        tokens, milliseconds = self._round_tokens.value, self._round_ms.value
        return tokens / milliseconds if tokens and milliseconds else 1.0 / self.verify_ms(1)

    def tokens_per_ms(self) -> float:
        """Returns the recent rate of all requests; the cost of a millisecond of the target."""
        return self.active * self.request_tokens_per_ms()

    def wait_cost(self, milliseconds: float) -> float:
        """Returns what a request's wait costs, in its tokens; with others at least a forward, which they begin."""
        least_ms = self.verify_ms(1) if self.active > 1 else 0.0
        return self.request_tokens_per_ms() * max(milliseconds, least_ms)

    def verify_cost(self, drafted: int) -> float:
        """Returns what the verify of this many draft tokens costs, in tokens of all requests."""
        return self.tokens_per_ms() * self.verify_ms(drafted + 1)
