"""Simulates `auto` with several drafters on classes of text: the real planner, random rounds, no model.

Requests arrive with classes in random order; a drafter's acceptance depends on the class. Rates are relative to the
best single drafter of each class at its best K, which is chosen with knowledge of the class.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.acceptance import (
    CODE_TEXT,
    CONSTRAINED_TEXT,
    GENERAL_TEXT,
    REPEATING_TEXT,
    TextAcceptance,
)
from outrider.orchestrator.core.policy.forecasts import CANDIDATE_DEPTHS, Arm
from outrider.orchestrator.events import Admit
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Abilities, InProcessDrafter
from outrider.protocol.ngrams import Copy
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings

WORKER, FIRST_HEAD, SECOND_HEAD = "", "eagle3", "mtp"
# The probability that a token of each drafter is accepted, by class of text.
ACCEPTANCE = {
    "code": {WORKER: 0.6, FIRST_HEAD: 0.85, SECOND_HEAD: 0.45, NGRAM: 0.3},
    "prose": {WORKER: 0.55, FIRST_HEAD: 0.35, SECOND_HEAD: 0.8, NGRAM: 0.05},
    "repeated": {WORKER: 0.6, FIRST_HEAD: 0.5, SECOND_HEAD: 0.5, NGRAM: 0.85},
    "json": {WORKER: 0.85, FIRST_HEAD: 0.7, SECOND_HEAD: 0.5, NGRAM: 0.4},
}
DETECTED_CLASS = {"code": CODE_TEXT, "prose": GENERAL_TEXT, "repeated": REPEATING_TEXT, "json": CONSTRAINED_TEXT}
STEP_MS = {WORKER: 1.9, FIRST_HEAD: 1.0, SECOND_HEAD: 1.0, NGRAM: 0.0}
FORWARD_MS, ROW_MS, PLAIN_MS, LINK_MS, TURNAROUND_MS, HIT_RATE, COPY_TOKENS = 9.5, 0.7, 10.0, 0.3, 0.3, 0.8, 6


def verify_ms(rows: int) -> float:
    return FORWARD_MS + ROW_MS * rows


def _depth(plan: Arm) -> int:
    return COPY_TOKENS if plan.drafter == NGRAM else plan.depth


def _round_ms(drafter: str, depth: int, hit: bool) -> float:
    link_ms = 0.0 if drafter else LINK_MS
    return verify_ms(depth + 1) + (TURNAROUND_MS if hit else depth * STEP_MS[drafter] + link_ms)


@dataclass(slots=True)
class SimulatedMachine:
    """Simulates rounds, and reports their results to `planner`."""

    rng: random.Random
    planner: Planner | None = None

    def round(self, kind: str, plan: Arm, text: TextAcceptance | None = None) -> tuple[int, float]:
        """Simulates a round of this plan in a text of this class. Returns its tokens and duration."""
        if plan.mode == "ar":
            return 1, PLAIN_MS
        depth = _depth(plan)
        hit = plan.mode == "ssd" and self.rng.random() < HIT_RATE
        drafter = WORKER if hit else plan.drafter
        accepted = self._accepted_tokens(ACCEPTANCE[kind][drafter], depth)
        self._record_round(kind, replace(plan, drafter=drafter), depth, accepted, hit, verify_ms(depth + 1), text)
        return accepted + 1, _round_ms(drafter, depth, hit)

    def _accepted_tokens(self, chance: float, depth: int) -> int:
        return next((place for place in range(depth) if self.rng.random() >= chance), depth)

    def _record_round(
        self, kind: str, plan: Arm, depth: int, accepted: int, hit: bool, took_ms: float, text: TextAcceptance | None
    ) -> None:
        if self.planner is None or text is None:
            return
        estimates = self.planner.estimates
        estimates.observe_verify(depth + 1, took_ms)
        copied = self._accepted_tokens(ACCEPTANCE[kind][NGRAM], COPY_TOKENS)
        estimates.copied.add(Copy((1,) * COPY_TOKENS, 3), (1,) * copied + (0,))
        estimates.copies.add(COPY_TOKENS, copied)
        text.observe_copies(COPY_TOKENS, copied)
        if plan.drafter == NGRAM:
            return
        text.observe(plan.drafter, depth, accepted)
        if plan.mode == "ssd":
            estimates.observe_lookup(hit, plan.branches)
            estimates.observe_depth(plan.branches, STEP_MS[WORKER])
        if plan.drafter:
            estimates.in_process[plan.drafter].observe(depth, accepted, depth * STEP_MS[plan.drafter])
            return
        estimates.observe_chain(depth, accepted)
        estimates.observe_draft(depth, depth * STEP_MS[WORKER])
        estimates.observe_link(LINK_MS)


@cache
def best_rate(kind: str) -> float:
    """Returns the tokens per millisecond of a class's best drafter."""
    plans = [Arm("ar", 1), Arm("sd", COPY_TOKENS, 16, NGRAM)]
    plans += [Arm(mode, depth, 16, drafter) for mode, drafter in _speculative_arms() for depth in CANDIDATE_DEPTHS]
    return max(_rate(kind, plan) for plan in plans)


def _speculative_arms() -> Iterator[tuple[str, str]]:
    for drafter in (WORKER, FIRST_HEAD, SECOND_HEAD):
        yield "ssd", drafter
        yield "sd", drafter


def _rate(kind: str, plan: Arm) -> float:
    """Returns the expected tokens per expected millisecond of a round."""
    if plan.mode == "ar":
        return 1 / PLAIN_MS
    depth, tokens, took_ms = _depth(plan), 0.0, 0.0
    for hit, share in ((True, HIT_RATE), (False, 1 - HIT_RATE)) if plan.mode == "ssd" else ((False, 1.0),):
        drafter = WORKER if hit else plan.drafter
        tokens += share * sum(ACCEPTANCE[kind][drafter] ** accepted for accepted in range(depth + 1))
        took_ms += share * _round_ms(drafter, depth, hit)
    return tokens / took_ms


def run_auto(seed: int, requests: int, tokens: int, error_rate: float) -> dict[str, float]:
    """Returns the tokens per millisecond of each class, over the second half of the requests."""
    tokens_of: defaultdict[str, int] = defaultdict(int)
    duration_of: defaultdict[str, float] = defaultdict(float)
    for kind, generated, took_ms in list(_simulate_requests(seed, requests, tokens, DETECTED_CLASS, error_rate))[
        requests // 2 :
    ]:
        tokens_of[kind] += generated
        duration_of[kind] += took_ms
    return {kind: tokens_of[kind] / duration_of[kind] for kind in tokens_of}


def cold_start_rates(seed: int, best: Mapping[str, float]) -> tuple[float, float]:
    """Returns the rates of a new server's first ten requests, and of the last four of 24, relative to the best."""
    results = list(_simulate_requests(seed, 24, 96, DETECTED_CLASS | {"json": CODE_TEXT}))
    first, last = (
        sum(generated / best[kind] for kind, generated, _ in some) / sum(took_ms for _, _, took_ms in some)
        for some in (results[:10], results[-4:])
    )
    return first, last


def _simulate_requests(
    seed: int, requests: int, tokens: int, kinds: Mapping[str, str], error_rate: float = 0.0
) -> Iterator[tuple[str, int, float]]:
    """Yields the class, tokens and duration of each request of a new server."""
    rng = random.Random(seed)
    heads = (
        InProcessDrafter(FIRST_HEAD, is_head=True, agreement=0.6),
        InProcessDrafter(SECOND_HEAD, is_head=True, agreement=0.6),
    )
    planner = Planner(round_settings(8, 16), abilities=lambda: Abilities(drafters=heads))
    machine = SimulatedMachine(rng, planner)
    admit = Admit("r", (1, 2), SamplingParams(), "auto", frozenset())
    for _ in range(requests):
        kind = rng.choice(list(ACCEPTANCE))
        yield kind, *_simulate_text(planner, machine, admit, kind, tokens, _detect_class(rng, kinds[kind], error_rate))


def _detect_class(rng: random.Random, detected: str, error_rate: float) -> str:
    """Returns the class that the server assigns to a text. With probability `error_rate` it takes code for prose, or
    prose for code."""
    if detected not in (CODE_TEXT, GENERAL_TEXT) or rng.random() >= error_rate:
        return detected
    return GENERAL_TEXT if detected == CODE_TEXT else CODE_TEXT


def _simulate_text(
    planner: Planner, machine: SimulatedMachine, admit: Admit, kind: str, tokens: int, detected: str
) -> tuple[int, float]:
    generated, took_ms = 0, 0.0
    text = planner.open_text(detected, greedy=True)
    while generated < tokens:
        policy = planner._policy(admit, planner._sources(admit.drafter, 1), text)
        plan = policy.plan()
        tokens_of_round, ms = machine.round(kind, plan, text)
        if plan.mode == "ar":
            planner.estimates.pipelined_ms.add(1, ms)
        planner.estimates.observe_round(tokens_of_round, ms)
        policy.observe_round(plan, tokens_of_round, ms)
        generated, took_ms = generated + tokens_of_round, took_ms + ms
    return generated, took_ms
