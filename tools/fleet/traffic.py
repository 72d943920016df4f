"""Generates the traffic of a fleet: random sessions with their own seeds, so that none depends on another's answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.harness.virtual.drafter import VOCAB
from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.job import Job
from tools.fleet.plan import Sizes, Traffic

# Tokens of the text after the answer, as many as a chain may reach.
SPARE_TOKENS = 40


def draw_size(sizes: Sizes, rng: random.Random) -> int:
    return max(1, min(sizes.most, round(sizes.median * math.exp(rng.gauss(0.0, sizes.sigma)))))


@dataclass
class Session:
    """A conversation of one user."""

    name: str
    rng: random.Random
    tokens: tuple[int, ...] = ()
    turns: int = 0

    def next_request(self, traffic: Traffic, now: float) -> Job:
        """Returns the next request: the whole conversation with more prompt tokens."""
        prompt = self.tokens + self._words(draw_size(traffic.prompt, self.rng))
        answer = draw_size(traffic.answer, self.rng)
        text = prompt + self._words(answer + SPARE_TOKENS)
        self.turns += 1
        self.tokens = text[: len(prompt) + answer]
        return Job(f"{self.name}-{self.turns}", self.name, now, text, len(prompt), answer)

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB) for _ in range(count))


class Users:
    """Begins sessions on `loop`, and passes each request to `ask`."""

    def __init__(self, traffic: Traffic, loop: EventLoop, ask: Callable[[Job], None]) -> None:
        self._traffic, self._loop, self._ask = traffic, loop, ask
        self._rng = random.Random(f"sessions {traffic.seed}")
        self._sessions: dict[str, Session] = {}
        self._begun = 0
        self._next()

    def on_answer(self, job: Job) -> None:
        """Ends the session of this request, or schedules its next request."""
        session = self._sessions[job.session]
        if session.rng.random() < 1 / self._traffic.turns:
            del self._sessions[job.session]
            return
        wait = session.rng.expovariate(1 / self._traffic.think)
        if self._loop.now + wait < self._traffic.seconds:
            self._loop.call_later(wait, lambda: self._ask(session.next_request(self._traffic, self._loop.now)))

    def _next(self) -> None:
        wait = self._rng.expovariate(self._traffic.rate / self._traffic.turns)
        if self._loop.now + wait < self._traffic.seconds:
            self._loop.call_later(wait, self._begin)

    def _begin(self) -> None:
        name = f"s{self._begun}"
        self._begun += 1
        self._sessions[name] = session = Session(name, random.Random(f"{name} {self._traffic.seed}"))
        self._ask(session.next_request(self._traffic, self._loop.now))
        self._next()
