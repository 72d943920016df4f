"""Measures arms for `tune`: interleaved real rounds of one cluster, and what their records say about costs.

In AR and SD the drafter waits during a verify, so these show a verify alone; SSD shows one while the drafter works.
Heads draft in the target's process, in turn with it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.bench.comparison.runs import Summary, hit_turnarounds, median_by_number, summarize
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.tuning import TunedArm, TunedDrafter, Tuning
from outrider.protocol import clock
from outrider.protocol.messages import RoundRecord, Timings
from outrider.protocol.sampling import SamplingParams

PLAIN_ARM = Arm("ar")
DEPTHS, BRANCHES = (1, 2, 4, 6), (4, 8, 16)
WIDE_DEPTH = 15
"""The K of a further arm of SD, which shows the cost of a verify of many tokens."""
# Approximate duration once the workers run, and the tokens of a run.
BUDGET_SECONDS = 50.0
MIN_TOKENS, MAX_TOKENS = 16, 160
# The turnaround if no hit was measured: one message in each direction.
DEFAULT_TURNAROUND_MS = 0.3

_Run = tuple[Timings, Sequence[RoundRecord]]
"""One text with one arm."""


def list_arms(has_worker: bool, heads: Sequence[str]) -> list[Arm]:
    """Returns the arms to measure, plain decoding first: SD and SSD of the draft worker, and SD with each head."""
    worker = [Arm("sd", depth) for depth in (*DEPTHS, WIDE_DEPTH)]
    worker += [Arm("ssd", depth, branches) for branches in BRANCHES for depth in DEPTHS]
    return [PLAIN_ARM, *(worker if has_worker else ()), *(Arm("sd", k, drafter=name) for name in heads for k in DEPTHS)]


@dataclass(frozen=True, slots=True)
class MeasuredArm:
    """The runs of an arm. `rounds`: without the first of each text, which reads the prompt."""

    arm: Arm
    summary: Summary
    rounds: tuple[RoundRecord, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1000 * self.summary.tokens / self.summary.sums.predicted_ms

    @property
    def verify_ms(self) -> float:
        """The mean forward of the target."""
        return statistics.fmean(record.verify.milliseconds for record in self.rounds)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position, how often a chain token was accepted if all tokens before it were."""
        accepted = self.summary.sums.accepted_by_position
        reached = [*self.summary.sums.drafted_by_position[:1], *accepted[:-1]]
        return tuple(held / all_ for held, all_ in zip(accepted, reached, strict=True) if all_)

    @property
    def step_ms(self) -> float:
        """The drafter's time for a token of a chain; 0 if it drafted none."""
        chains = [work for record in self.rounds for work in record.drafting if not work.branches]
        return sum(work.work.milliseconds for work in chains) / max(sum(work.depth for work in chains), 1)

    @property
    def tuned(self) -> TunedArm:
        """What a server needs to know about the arm."""
        arm = self.arm
        return TunedArm(arm.mode, arm.depth, arm.branches, self.rate, measured=True, drafter=arm.drafter)


def measure_arms(
    client: Client,
    arms: Sequence[Arm],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    progress: Callable[[str], None],
) -> ArmCosts:
    """Runs the `arms`, plain decoding first, in turn, a text at a time, for about `BUDGET_SECONDS`.

    A slow machine generates shorter texts; if even those take too long, only the faster half of the arms continues,
    while there is time.
    """
    begun_ns, runs, left = clock.now(), defaultdict[Arm, list[_Run]](list), list(arms)
    for arm in (arms[-1], PLAIN_ARM):  # warms up
        plain, _ = _run_arm(client, arm, texts[0], replace(sampling, max_tokens=MIN_TOKENS))
    affordable = int(plain.predicted_per_second * BUDGET_SECONDS / (len(arms) * len(texts)))
    sampling = replace(sampling, max_tokens=min(max(affordable, MIN_TOKENS), MAX_TOKENS))
    for number, text in enumerate(texts, 1):
        for arm in left:
            name = "plain decoding" if arm == PLAIN_ARM else arm.drafter or f"{arm.mode}, B = {arm.branches}"
            progress(f"{name}, K = {arm.depth}, text {number} of {len(texts)}")
            runs[arm].append(_run_arm(client, arm, text, sampling))
        spent_s = (clock.now() - begun_ns) / 1e9
        if spent_s > BUDGET_SECONDS:
            break
        if spent_s * len(texts) > BUDGET_SECONDS * number:
            rates = {arm: _summarize_arm(arm, runs[arm]).rate for arm in left[1:]}
            left = [PLAIN_ARM, *sorted(rates, key=lambda arm: -rates[arm])[: -(-len(rates) // 2)]]
    return ArmCosts({arm: _summarize_arm(arm, found) for arm, found in runs.items()})


def _run_arm(client: Client, arm: Arm, text: Sequence[int], sampling: SamplingParams) -> _Run:
    stream = client.stream(
        text, sampling, rounds=True, mode=arm.mode, num_draft_tokens=arm.depth or None,
        branches=arm.branches or None, drafter=arm.drafter, chat_template=False,
    )  # fmt: skip
    rounds = [record for chunk in stream for record in chunk.rounds or ()]
    return stream.result.timings, rounds[1:]


def _summarize_arm(arm: Arm, runs: Sequence[_Run]) -> MeasuredArm:
    rounds = tuple(record for _, of_run in runs for record in of_run)
    return MeasuredArm(arm, summarize([timings for timings, _ in runs]), rounds)


@dataclass(frozen=True, slots=True)
class ArmCosts:
    """The measured arms, of which plain decoding is one, and the median costs of their rounds in milliseconds."""

    arms: Mapping[Arm, MeasuredArm]

    @property
    def step_ms(self) -> float:
        """A token of plain decoding."""
        return 1000 / self.arms[PLAIN_ARM].rate

    @property
    def verify_ms(self) -> dict[int, float]:
        """A verify alone, by its rows. The few chains that the text's end cut short are left out."""
        return median_by_number(
            (record.drafted + 1, record.verify.milliseconds)
            for found in self.arms.values()
            if found.arm.mode != "ssd"
            for record in found.rounds
            if record.drafted >= found.arm.depth
        )

    @property
    def chain_ms(self) -> dict[int, float]:
        """A chain on request by its length, from the outcome to the next verify."""
        return median_by_number((len_, wait_ms) for len_, wait_ms, _ in self._chain_requests())

    @property
    def link_ms(self) -> float:
        """The part of `chain_ms` in which the drafter does not work; 0 without a draft worker."""
        return statistics.median([wait_ms - work_ms for _, wait_ms, work_ms in self._chain_requests()] or [0.0])

    def _chain_requests(self) -> Iterator[tuple[int, float, float]]:
        """Yields the length of each chain on request in SD, and its milliseconds in all and of drafting."""
        for found in self.of("sd"):
            for record in found.rounds:
                for work in record.drafting:
                    if record.decided is not None and work.round == record.round and work.depth == found.arm.depth:
                        yield work.depth, record.decided.milliseconds, work.work.milliseconds

    @property
    def tree_ms(self) -> dict[int, float]:
        """One more token for all branches, by their number."""
        return median_by_number(
            (found.arm.branches, work.work.milliseconds)
            for found in self.of("ssd")
            for record in found.rounds
            for work in record.drafting
            if work.branches and work.depth > 1  # the first forward also reads the chain
        )

    @property
    def turnaround_ms(self) -> float:
        """The target's wait between two verifies on a hit; 0 without a draft worker."""
        arms = self.of("ssd")
        found = [ms for arm in arms for ms in hit_turnarounds(arm.rounds)]
        return statistics.median(found or [DEFAULT_TURNAROUND_MS]) if arms else 0.0

    def of(self, mode: str, drafter: str = "") -> list[MeasuredArm]:
        """Returns the arms of a mode, those of most texts first, the fastest of these first; none if nothing was
        drafted for them."""
        found = [one for arm, one in self.arms.items() if (arm.mode, arm.drafter) == (mode, drafter)]
        drafts = mode == PLAIN_ARM.mode or any(sum(one.summary.sums.drafted_by_position) for one in found)
        return sorted(found, key=lambda one: (-one.summary.runs, -one.rate)) if drafts else []

    def best_arms(self) -> list[MeasuredArm]:
        """Returns each mode and head that drafts at its best K and B, the fastest first."""
        kinds = dict.fromkeys((arm.mode, arm.drafter) for arm in self.arms)
        best_arms = [best for kind in kinds for best in self.of(*kind)[:1]]
        return sorted(best_arms, key=lambda best: -best.rate)

    def record(self, temp: float) -> Tuning:
        """Returns the record that a server starts from."""
        best_arms = self.best_arms()
        heads = [self.known(best.arm.drafter) for best in best_arms if best.arm.drafter]
        ssd, sd = self.of("ssd"), self._deepest_arm("" if self.of("sd") else heads[0].name)
        return Tuning(
            step_ms=self.step_ms,
            verify_ms=tuple(self.verify_ms.items()),
            depth_ms=self.tree_ms[ssd[0].arm.branches] if ssd else sd.step_ms,
            draft_ms=sd.step_ms,
            link_ms=self.link_ms,
            turnaround_ms=self.turnaround_ms,
            acceptance=sd.acceptance,
            hit_rate=(ssd[0].summary.hit_rate or 0.0) if ssd else 0.0,
            choices=tuple(best.tuned for best in best_arms),
            temp=temp,
            own=tuple(heads),
        )

    def known(self, head: str) -> TunedDrafter:
        """Returns what a server needs to know about a head."""
        return TunedDrafter(head, self.of("sd", head)[0].step_ms, self._deepest_arm(head).acceptance)

    def _deepest_arm(self, drafter: str) -> MeasuredArm:
        """Returns SD's arm with the longest chains, which show the acceptance by position."""
        return self.arms[Arm("sd", max(DEPTHS), drafter=drafter)]
