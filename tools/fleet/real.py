"""Compares virtual time with real processes: one engine on simulated devices, with the same traffic in both.

    python -m tools.fleet.real --slower 3

Both start without learned estimates. Requests come one after another, then four at once, then at random times. The real
engine is a server, a target and a drafter whose forwards sleep; prompts have 16 tokens and take almost no time. If
other work keeps this machine's cores busy (last column), the processes are late; virtual time never is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.protocol import values
from tests.harness.virtual.drafter import VOCAB
from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.engine import Engine
from tools.fleet.job import Job
from tools.fleet.plan import Fleet, Sizes
from tools.fleet.processes import (
    CompletedRequest,
    Engines,
    PlannedRequest,
    measure_cpu_share,
    send,
    slow_down,
    total_rate,
)
from tools.fleet.rounds import RealRounds
from tools.fleet.traffic import SPARE_TOKENS, draw_size
from tools.simulation.profile import PROFILES, Profile
from tools.simulation.script import PROMPT_TOKENS

PROFILE = PROFILES / "two-macs-ethernet.json"
SLOTS = 4
SIZES = Sizes(64, 0.5, 160)
COLUMNS = (
    "", "tok/s real", "virtual", "error", "first token ms, real", "virtual", "request s, real", "virtual", "error",
    "cores in use",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests to send in order, `at_once` at a time, or each at its time if `at_once` is 0."""

    name: str
    requests: tuple[PlannedRequest, ...]
    at_once: int


def make_phases(prompts: Sequence[tuple[int, ...]], each: int, gap: float, seed: int) -> list[Phase]:
    rng = random.Random(f"real {seed}")

    def draw_requests(at_random: bool) -> tuple[PlannedRequest, ...]:
        at, requests = 0.0, []
        for number in range(each):
            at += rng.expovariate(1 / gap) if at_random and number else 0.0
            requests.append(PlannedRequest(prompts[number % len(prompts)], draw_size(SIZES, rng), at))
        return tuple(requests)

    return [
        Phase("one at a time", draw_requests(False), 1),
        Phase(f"{SLOTS} at once", draw_requests(False), SLOTS),
        Phase("at random times", draw_requests(True), 0),
    ]


async def run_real(client: AsyncClient, phase: Phase) -> list[CompletedRequest]:
    waiting = list(phase.requests)

    async def one_by_one() -> list[CompletedRequest]:
        return [await send(client, waiting.pop(0)) for _ in iter(lambda: bool(waiting), False)]

    async def later(request: PlannedRequest) -> CompletedRequest:
        await asyncio.sleep(request.after)
        return await send(client, request)

    if phase.at_once:
        groups = await asyncio.gather(*(one_by_one() for _ in range(phase.at_once)))
        return [answer for group in groups for answer in group]
    return list(await asyncio.gather(*(later(request) for request in phase.requests)))


class VirtualEngineRun:
    """Runs the same engine in virtual time."""

    def __init__(self, profile: Profile, hop_ms: float) -> None:
        fleet = Fleet((profile,), engines=1, drafters=1, active=SLOTS, prompt_rate=1e6, remembers=0, hop_ms=hop_ms)
        self._loop, self._rng, self._jobs = EventLoop(), random.Random("texts"), list[Job]()
        self._engine = Engine(0, 0, SLOTS, self._loop, self._ended)
        self._engine.source = RealRounds(self._loop, fleet, profile, self._on_tokens, self._engine.on_complete)
        self._next: list[PlannedRequest] = []

    def play(self, phase: Phase) -> list[CompletedRequest]:
        self._jobs, self._next = [], list(phase.requests) if phase.at_once else []
        with self._loop.as_process_clock():
            if phase.at_once:
                for _ in range(phase.at_once):
                    self._take(self._next.pop(0))
            for request in () if phase.at_once else phase.requests:
                self._loop.call_later(request.after, lambda request=request: self._take(request))  # type: ignore[misc]
            while not self._loop.idle:
                self._loop.run_next()
        return [CompletedRequest(job.sent, job.first or 0.0, job.last, job.answer) for job in self._jobs]

    def _take(self, request: PlannedRequest) -> None:
        text = tuple(self._rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS + request.tokens + SPARE_TOKENS))
        job = Job(f"v{self._loop.now}-{len(self._jobs)}", "one", self._loop.now, text, PROMPT_TOKENS, request.tokens)
        self._jobs.append(job)
        self._engine.take(job)

    def _on_tokens(self, job: Job, tokens: float, flows: float = 0.0) -> None:
        job.receive(tokens, self._loop.now, flows)

    def _ended(self, job: Job) -> None:
        if self._next:
            request = self._next.pop(0)
            self._loop.call_later(0.0, lambda: self._take(request))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, default=PROFILE, metavar="FILE", help="latency profile")
    parser.add_argument("--slower", type=float, default=1.0, metavar="TIMES", help="multiplies the profile's times")
    parser.add_argument("--requests", type=int, default=12, metavar="N", help="requests per phase")
    parser.add_argument("--gap", type=float, default=1.5, metavar="S", help="mean gap between random requests")
    parser.add_argument("--hop-ms", type=float, default=0.3, metavar="MS", help="virtual time of a message, one way")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the requests (default: 0)")


def run(options: argparse.Namespace) -> int:
    slower = values.check_float("slower", options.slower, 1.0, 100.0)
    profile = slow_down(Profile.read(options.profile), slower)
    requests = values.check_int("requests", options.requests, 1, 1000)
    engines = Engines(profile, 1, SIZES.most, requests, SLOTS)
    try:
        phases = make_phases(engines.prompts, requests, options.gap * slower, options.seed)
        virtual = VirtualEngineRun(profile, options.hop_ms)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        for phase in phases:
            with measure_cpu_share() as busy:
                real = asyncio.run(run_real(engines.clients[0], phase))
            print(_line(phase.name, real, virtual.play(phase), busy[0]), flush=True)
    finally:
        engines.close()
    return 0


def _line(name: str, real: Sequence[CompletedRequest], virtual: Sequence[CompletedRequest], busy: float) -> str:
    rates = total_rate(real), total_rate(virtual)
    firsts = [1000 * statistics.median(a.first - a.sent for a in answers) for answers in (real, virtual)]
    whole = [statistics.mean(a.ended - a.sent for a in answers) for answers in (real, virtual)]
    cells = [
        name, f"{rates[0]:.2f}", f"{rates[1]:.2f}", f"{rates[1] / rates[0] - 1:+.1%}", f"{firsts[0]:.0f}",
        f"{firsts[1]:.0f}", f"{whole[0]:.2f}", f"{whole[1]:.2f}", f"{whole[1] / whole[0] - 1:+.1%}", f"{busy:.0%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(run_as_program())
