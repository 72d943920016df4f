"""Random stories of a cluster on a bad network, as a hypothesis state machine: a failure shrinks to the fewest steps.

In a step a request begins or is stopped, a link changes its faults, is cut or heals, a worker stalls or dies,
the orchestrator sleeps, or only time passes. After the last step the faults end, and every request must finish.
`TALLY` counts over all stories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.draft_worker.worker import DraftWorker
from outrider.orchestrator.events import Admit
from outrider.protocol.sampling import SamplingParams
from tests.network.transport import Weather
from tests.network.world import Setting, World
from tests.system.links import VirtualClock
from tests.system.markov import markov

V = 6
_rng = np.random.default_rng(3)
_TABLE = _rng.normal(size=(V, V)).astype(np.float32) * 1.5
TARGET = markov(_TABLE)
DRAFT = markov((0.7 * _TABLE + 0.6 * _rng.normal(size=(V, V))).astype(np.float32))
ANOTHER = markov(_rng.normal(size=(V, V)).astype(np.float32))

AT_ONCE = 4
WORKERS = st.integers(0, 3)  # the target, then the drafters; of those that there are
TIME = st.integers(0, 16)
SPELL = st.integers(1, 25)  # ticks for which a link is cut or a worker stalls
SHARES = st.sampled_from((0.0, 0.0, 0.03, 0.2))
# Every request ends within this many ticks without faults.
PATIENCE = 4000
LONG = 600  # seconds without messages about an ended request


@dataclass
class Tally:
    """Counts over all stories: steps, events, checks, ticks and tokens."""

    steps: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    ticks: int = 0
    tokens: int = 0

    def add(self, world: World) -> None:
        self.ticks += world.journal.tick
        self.events += world.journal.counts
        self.judged += world.watch.judged
        self.tokens += sum(len(watched.tokens) for watched in world.watch.requests.values())


TALLY = Tally()


def samplings() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        temp=st.sampled_from((0.0, 0.8, 0.8)),
        top_k=st.sampled_from((0, 0, 3)),
        repetition_penalty=st.sampled_from((1.0, 1.0, 1.0, 1.3)),
        seed=st.integers(0, 5),
    )


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Many prompts begin alike; some are read in pieces."""
    shared = st.sampled_from((0, 0, 3, 20, 40)).map(lambda count: [(5 * i) % V for i in range(count)])
    own = st.lists(st.integers(0, V - 1), min_size=1, max_size=4)
    return st.tuples(shared, own).map(lambda both: (*both[0], *both[1]))


class Stories(RuleBasedStateMachine):
    """One cluster, from its start until the last request has ended after the faults."""

    world: World

    @initialize(
        seed=st.integers(0, 999),
        drafters=st.integers(0, 3),
        paces=st.tuples(*[st.sampled_from((1, 1, 2, 9))] * 3),
        another=st.booleans(),
        colocated=st.sampled_from((False, False, False, True)),
        depth=st.integers(1, 4),
        branches=st.sampled_from((1, 4, 12)),
        full_depth=st.sampled_from((False, False, False, True)),
        ngrams=st.booleans(),
    )
    def start(self, **setting: Any) -> None:
        self._patch = pytest.MonkeyPatch()
        clock = VirtualClock()
        self._patch.setattr("outrider.protocol.clock.now", clock)
        clock.skip(10**9)
        self.world = World(TARGET, DRAFT, Setting(**setting), clock, ANOTHER)
        self._begun, self._sound = 0, True

    @contextmanager
    def _step(self, name: str, then: int) -> Iterator[None]:
        """Runs a step, and `then` ticks after it."""
        TALLY.steps[name] += 1
        self._sound = False
        yield
        for _ in range(then):
            self.world.tick()
        self._sound = True

    def _worker(self, number: int) -> str:
        names = sorted(self.world.nodes, reverse=True)
        return names[number % len(names)]

    @property
    def _running(self) -> list[str]:
        return [name for name, watched in self.world.watch.requests.items() if watched.ending is None]

    @precondition(lambda self: len(self._running) < AT_ONCE)
    @rule(
        mode=st.sampled_from(("ssd", "ssd", "auto", "sd", "ar")),
        prompt=prompts(),
        sampling=samplings(),
        eos=st.sampled_from((frozenset(), frozenset(), frozenset({0}))),
        then=TIME,
    )
    def begin(
        self, mode: str, prompt: tuple[int, ...], sampling: SamplingParams, eos: frozenset[int], then: int
    ) -> None:
        with self._step("begin", then):
            self._begun += 1
            self.world.begin(Admit(f"r{self._begun}", prompt, sampling, mode, eos))

    @precondition(lambda self: self._running)
    @rule(which=st.integers(0, AT_ONCE - 1), reason=st.sampled_from(("cancelled", "stop")), then=TIME)
    def stop(self, which: int, reason: str, then: int) -> None:
        with self._step("stop", then):
            self.world.stop(self._running[which % len(self._running)], reason)

    @rule(then=st.integers(1, 25))
    def go(self, then: int) -> None:
        with self._step("go", then):
            pass

    @rule(
        worker=WORKERS,
        weather=st.builds(
            Weather, lose=SHARES, twice=SHARES, overtake=SHARES, alter=SHARES, delay=st.sampled_from((0, 0, 1, 5))
        ),
        then=TIME,
    )
    def weather(self, worker: int, weather: Weather, then: int) -> None:
        with self._step("weather", then):
            self.world.weather(self._worker(worker), weather)

    @rule(worker=WORKERS, ticks=SPELL, lost=st.booleans(), then=TIME)
    def cut(self, worker: int, ticks: int, lost: bool, then: int) -> None:
        with self._step("cut", then):
            self.world.cut(self._worker(worker), ticks, lost)

    @rule(worker=WORKERS, ticks=SPELL, then=TIME)
    def stall(self, worker: int, ticks: int, then: int) -> None:
        with self._step("stall", then):
            self.world.stall(self._worker(worker), ticks)

    @rule(worker=st.sampled_from((0, 1, 1, 2, 1, 2, 3)), then=TIME)
    def kill(self, worker: int, then: int) -> None:
        with self._step("kill", then):
            self.world.kill(self._worker(worker))

    @rule(seconds=st.sampled_from((1, 30, 600)), then=TIME)
    def pause(self, seconds: int, then: int) -> None:
        with self._step("pause", then):
            self.world.pause(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self._sound:
                self._calm()
        finally:
            note(f"the latest events:\n{self.world.journal}")
            TALLY.add(self.world)
            self._patch.undo()

    def _calm(self) -> None:
        """Ends the faults: all requests end, and what they held is freed when another request comes."""
        world, judge = self.world, self.world.watch.judge
        world.calm()
        self._until_settled()
        judge("over", not self._running, f"{self._running} hang")
        self._tick_until(lambda: not self._drafters_work)  # a text is freed only after its work
        world.pause(LONG)
        world.begin(Admit("last", (1, 2, 3), SamplingParams(max_tokens=3), "ssd", frozenset()))
        self._until_settled()
        for _ in range(20):
            world.tick()
        for node in world.nodes.values():
            worker: Any = node.worker
            judge("given back", not worker._running, f"{node.name} still holds {list(worker._running)}")

    @property
    def _drafters_work(self) -> bool:
        """Whether a drafter has texts to read or to draft ahead for, or a message is on its way."""
        workers = [node.worker for node in self.world.nodes.values() if isinstance(node.worker, DraftWorker)]
        return self.world.moves or any(text.work.has_work for own in workers for text in own._running.values())

    def _until_settled(self) -> None:
        self._tick_until(lambda: self.world.is_settled)

    def _tick_until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if is_over():
                return
            self.world.tick()
