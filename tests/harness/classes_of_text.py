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
    TextProfile,
)
from outrider.orchestrator.core.policy.forecasts import CANDIDATE_DEPTHS, Arm
from outrider.orchestrator.events import Admit
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Abilities, InProcessDrafter
from outrider.protocol.ngrams import Copy
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings

WORKER, ONE, OTHER = "", "eagle3", "mtp"
# How often a token of each drafter's holds, by class; what a text says comes next is asked as well.
HOLDS = {
    "code": {WORKER: 0.6, ONE: 0.85, OTHER: 0.45, NGRAM: 0.3},
    "prose": {WORKER: 0.55, ONE: 0.35, OTHER: 0.8, NGRAM: 0.05},
    "repeated": {WORKER: 0.6, ONE: 0.5, OTHER: 0.5, NGRAM: 0.85},
    "json": {WORKER: 0.85, ONE: 0.7, OTHER: 0.5, NGRAM: 0.4},
}
KINDS = {"code": CODE_TEXT, "prose": GENERAL_TEXT, "repeated": REPEATING_TEXT, "json": CONSTRAINED_TEXT}
STEP_MS = {WORKER: 1.9, ONE: 1.0, OTHER: 1.0, NGRAM: 0.0}
FORWARD_MS, ROW_MS, PLAIN_MS, LINK_MS, TURNAROUND_MS, HITS, COPIED = 9.5, 0.7, 10.0, 0.3, 0.3, 0.8, 6


def verify_ms(rows: int) -> float:
    return FORWARD_MS + ROW_MS * rows


def _depth(plan: Arm) -> int:
    return COPIED if plan.drafter == NGRAM else plan.depth


def _round_ms(drafter: str, depth: int, hit: bool) -> float:
    link_ms = 0.0 if drafter else LINK_MS
    return verify_ms(depth + 1) + (TURNAROUND_MS if hit else depth * STEP_MS[drafter] + link_ms)


@dataclass(slots=True)
class Machine:
    """Simulates rounds, and feeds their results to `planner`."""

    rng: random.Random
    planner: Planner | None = None

    def round(self, kind: str, plan: Arm, text: TextProfile | None = None) -> tuple[int, float]:
        """Simulates a round of this plan in a text of this class. Returns its tokens and duration."""
        if plan.mode == "ar":
            return 1, PLAIN_MS
        depth = _depth(plan)
        hit = plan.mode == "ssd" and self.rng.random() < HITS
        who = WORKER if hit else plan.drafter
        held = self._held(HOLDS[kind][who], depth)
        self._teach(kind, replace(plan, drafter=who), depth, held, hit, verify_ms(depth + 1), text)
        return held + 1, _round_ms(who, depth, hit)

    def _held(self, chance: float, depth: int) -> int:
        return next((place for place in range(depth) if self.rng.random() >= chance), depth)

    def _teach(
        self, kind: str, plan: Arm, depth: int, held: int, hit: bool, took_ms: float, text: TextProfile | None
    ) -> None:
        if self.planner is None or text is None:
            return
        estimates = self.planner.estimates
        estimates.observe_verify(depth + 1, took_ms)
        copied = self._held(HOLDS[kind][NGRAM], COPIED)
        estimates.copied.add(Copy((1,) * COPIED, 3), (1,) * copied + (0,))
        estimates.copies.add(COPIED, copied)
        texts = self.planner.profiles
        texts.observe(text, NGRAM, COPIED, copied)
        texts.observe_copies(text, COPIED, copied)
        if plan.drafter == NGRAM:
            return
        texts.observe(text, plan.drafter, depth, held)
        if plan.mode == "ssd":
            estimates.observe_lookup(hit, plan.branches)
            estimates.observe_depth(plan.branches, STEP_MS[WORKER])
        if plan.drafter:
            estimates.in_process[plan.drafter].observe(depth, held, depth * STEP_MS[plan.drafter])
            return
        estimates.observe_chain(depth, held)
        estimates.observe_draft(depth, depth * STEP_MS[WORKER])
        estimates.observe_link(LINK_MS)


@cache
def best_of(kind: str) -> float:
    """Returns the tokens per millisecond of a class's best drafter."""
    plans = [Arm("ar", 1), Arm("sd", COPIED, 16, NGRAM)]
    plans += [Arm(mode, depth, 16, who) for mode, who in _ways() for depth in CANDIDATE_DEPTHS]
    return max(_rate(kind, plan) for plan in plans)


def _ways() -> Iterator[tuple[str, str]]:
    for who in (WORKER, ONE, OTHER):
        yield "ssd", who
        yield "sd", who


def _rate(kind: str, plan: Arm) -> float:
    """Returns the expected tokens per expected millisecond of a round."""
    if plan.mode == "ar":
        return 1 / PLAIN_MS
    depth, tokens, took_ms = _depth(plan), 0.0, 0.0
    for hit, share in ((True, HITS), (False, 1 - HITS)) if plan.mode == "ssd" else ((False, 1.0),):
        who = WORKER if hit else plan.drafter
        tokens += share * sum(HOLDS[kind][who] ** held for held in range(depth + 1))
        took_ms += share * _round_ms(who, depth, hit)
    return tokens / took_ms


def auto(seed: int, requests: int, tokens: int, wrong: float) -> dict[str, float]:
    """Returns the tokens per millisecond of each class, over the second half of the requests."""
    made: defaultdict[str, int] = defaultdict(int)
    spent: defaultdict[str, float] = defaultdict(float)
    for kind, said, took_ms in list(_served(seed, requests, tokens, KINDS, wrong))[requests // 2 :]:
        made[kind] += said
        spent[kind] += took_ms
    return {kind: made[kind] / spent[kind] for kind in made}


def cold(seed: int, best: Mapping[str, float]) -> tuple[float, float]:
    """Returns the rates of a new server's first ten requests, and of the last four of 24, relative to the best."""
    found = list(_served(seed, 24, 96, KINDS | {"json": CODE_TEXT}))
    first, last = (
        sum(said / best[kind] for kind, said, _ in part) / sum(took_ms for _, _, took_ms in part)
        for part in (found[:10], found[-4:])
    )
    return first, last


def _served(
    seed: int, requests: int, tokens: int, kinds: Mapping[str, str], wrong: float = 0.0
) -> Iterator[tuple[str, int, float]]:
    """Yields the class, tokens and duration of each request of a new server."""
    rng = random.Random(seed)
    own = (InProcessDrafter(ONE, is_head=True, agreement=0.6), InProcessDrafter(OTHER, is_head=True, agreement=0.6))
    planner = Planner(round_settings(8, 16), abilities=lambda: Abilities(drafters=own))
    machine = Machine(rng, planner)
    admit = Admit("r", (1, 2), SamplingParams(), "auto", frozenset())
    for _ in range(requests):
        kind = rng.choice(list(HOLDS))
        yield kind, *_text(planner, machine, admit, kind, tokens, _told(rng, kinds[kind], wrong))


def _told(rng: random.Random, looks: str, wrong: float) -> str:
    """Returns the class that the front assigns to a text of this kind; it is `wrong` with this probability."""
    if looks not in (CODE_TEXT, GENERAL_TEXT) or rng.random() >= wrong:
        return looks
    return GENERAL_TEXT if looks == CODE_TEXT else CODE_TEXT


def _text(planner: Planner, machine: Machine, admit: Admit, kind: str, tokens: int, told: str) -> tuple[int, float]:
    said, took_ms = 0, 0.0
    text = planner.profiles.open(told, greedy=True)
    while said < tokens:
        policy = planner._policy(admit, planner._sources(admit.drafter, 1), text.kind, text.odds)
        plan = policy.plan()
        brought, ms = machine.round(kind, plan, text)
        if plan.mode == "ar":
            planner.estimates.pipelined_ms.add(1, ms)
        planner.estimates.observe_round(brought, ms)
        policy.observe_round(plan, brought, ms)
        said, took_ms = said + brought, took_ms + ms
    return said, took_ms
