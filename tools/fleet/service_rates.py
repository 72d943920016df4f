"""Records an engine's rate by its number of concurrent requests: real rounds, closed loop, prompts take no time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.target_worker.model_runner import READING_SHARE, READING_SHARE_WITH_CHAINS
from tests.harness.virtual.drafter import VOCAB
from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.job import Job
from tools.fleet.plan import ROUTINGS, Fleet
from tools.fleet.rounds import RealRounds
from tools.fleet.traffic import SPARE_TOKENS
from tools.simulation.profile import Profile

# Seconds of each load that are not counted, and that are counted.
LEARNING_SECONDS, MEASURED_SECONDS = 10.0, 20.0
ANSWER_TOKENS, PROMPT_TOKENS = 200, 32


@dataclass(frozen=True, slots=True)
class ServiceRate:
    """At one number of concurrent requests: tokens per second of each, milliseconds of a forward, and the share by
    which a waiting prompt may lengthen it."""

    rate: float
    forward_ms: float
    share: float


ServiceRates = tuple[ServiceRate, ...]


def measure_service_rates(fleet: Fleet, profile: Profile, drafters: int) -> tuple[ServiceRates, tuple[Tuning, ...]]:
    """Returns the paces of 1, 2, ... concurrent requests with `drafters` left, and what the planner has learned."""
    alone = replace(fleet, profiles=(), engines=1, zones=1, spread=False, prompt_rate=0.0, routing=ROUTINGS[0])
    return _measure_service_rates(replace(alone, scaling=None), profile, drafters)


@cache
def _measure_service_rates(fleet: Fleet, profile: Profile, drafters: int) -> tuple[ServiceRates, tuple[Tuning, ...]]:
    memory: tuple[Tuning, ...] = ()
    service = []
    for at_once in range(1, fleet.active + 1):
        pace, memory = _measure_pace(fleet, profile, drafters, at_once, memory)
        service.append(pace)
    return tuple(service), memory


def _measure_pace(
    fleet: Fleet, profile: Profile, drafters: int, at_once: int, memory: Sequence[Tuning]
) -> tuple[ServiceRate, tuple[Tuning, ...]]:
    loop, rng, received = EventLoop(), random.Random(f"service {at_once}"), [0.0]

    def on_tokens(job: Job, tokens: float, flows: float = 0.0) -> None:
        job.received += tokens
        received[0] += tokens

    def another(number: int) -> None:
        text = tuple(rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS + ANSWER_TOKENS + SPARE_TOKENS))
        rounds.begin(Job(f"r{number}", "", loop.now, text, PROMPT_TOKENS, ANSWER_TOKENS))

    def on_complete(job: Job) -> None:
        loop.call_later(0.0, lambda: another(int(job.name[1:]) + at_once))

    rounds = RealRounds(loop, fleet, profile, on_tokens, on_complete, memory)
    if drafters < fleet.drafters:
        rounds.lose_drafters(fleet.drafters - drafters, 0.0)
    with loop.as_process_clock():
        for number in range(at_once):
            loop.call_later(0.001 * number, lambda number=number: another(number))  # type: ignore[misc]
        while loop.now < LEARNING_SECONDS:
            loop.run_next()
        before, rows, forwards, began = received[0], rounds.rows, rounds.forwards, loop.now
        while loop.now < LEARNING_SECONDS + MEASURED_SECONDS:
            loop.run_next()
    tokens, seconds, forwards = received[0] - before, loop.now - began, rounds.forwards - forwards
    chains = rounds.rows - rows > 1.5 * forwards * at_once
    share = READING_SHARE_WITH_CHAINS if chains else READING_SHARE
    return ServiceRate(tokens / seconds / at_once, 1000 * seconds / forwards, share), rounds.learned()
