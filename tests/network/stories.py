"""Random scenarios of a cluster on a bad network, as a Hypothesis state machine, which shrinks a failure to few steps.

In a step a request begins or is stopped, the faults of a link change, a link is cut, a worker stalls, sleeps or dies,
the orchestrator is suspended, or only time passes. After the last step the faults end, and every request must finish.
`TALLY` counts over all runs.
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
from tests.network.simulated_cluster import ClusterSettings, SimulatedCluster
from tests.network.transport import LinkFaults
from tests.system.links import VirtualClock
from tests.system.markov import markov

V = 6
_rng = np.random.default_rng(3)
_TABLE = _rng.normal(size=(V, V)).astype(np.float32) * 1.5
TARGET = markov(_TABLE)
DRAFT = markov((0.7 * _TABLE + 0.6 * _rng.normal(size=(V, V))).astype(np.float32))
ANOTHER = markov(_rng.normal(size=(V, V)).astype(np.float32))

AT_ONCE = 4
WORKERS = st.integers(0, 3)  # the target is 0, then come the drafters; taken modulo the number of workers
TICKS_AFTER = st.integers(0, 16)
FAULT_TICKS = st.integers(1, 25)  # for how long a link is cut or a worker stalls
SHARES = st.sampled_from((0.0, 0.0, 0.03, 0.2))
# After the faults have ended, every request must end within this many ticks.
MAX_TICKS = 4000
LONG_PAUSE_S = 600  # longer than workers keep a request without messages about it


@dataclass
class Tally:
    """Counts over all runs: steps, events, checks, ticks and tokens."""

    steps: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    ticks: int = 0
    tokens: int = 0

    def add(self, cluster: SimulatedCluster) -> None:
        self.ticks += cluster.log.tick
        self.events += cluster.log.counts
        self.checked += cluster.checker.checked
        self.tokens += sum(len(state.tokens) for state in cluster.checker.requests.values())


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
    """Generates prompts, many of which share a prefix, and some of which are too long to be read at once."""
    shared = st.sampled_from((0, 0, 3, 20, 40)).map(lambda count: [(5 * i) % V for i in range(count)])
    own = st.lists(st.integers(0, V - 1), min_size=1, max_size=4)
    return st.tuples(shared, own).map(lambda both: (*both[0], *both[1]))


class ClusterStateMachine(RuleBasedStateMachine):
    """One cluster, from its start until all requests have ended after the last fault."""

    cluster: SimulatedCluster

    @initialize(
        seed=st.integers(0, 999),
        drafters=st.integers(0, 3),
        paces=st.tuples(*[st.sampled_from((1, 1, 2, 9))] * 3),
        other_model=st.booleans(),
        colocated=st.sampled_from((False, False, False, True)),
        depth=st.integers(1, 4),
        branches=st.sampled_from((1, 4, 12)),
        full_depth=st.sampled_from((False, False, False, True)),
        ngrams=st.booleans(),
    )
    def start(self, **settings: Any) -> None:
        self._patch = pytest.MonkeyPatch()
        clock = VirtualClock()
        self._patch.setattr("outrider.protocol.clock.now", clock)
        clock.skip(10**9)
        self.cluster = SimulatedCluster(TARGET, DRAFT, ClusterSettings(**settings), clock, ANOTHER)
        self._begun_count, self._step_completed = 0, True

    @contextmanager
    def _step(self, name: str, ticks_after: int) -> Iterator[None]:
        """Runs the block as a step, and then so many ticks."""
        TALLY.steps[name] += 1
        self._step_completed = False
        yield
        for _ in range(ticks_after):
            self.cluster.tick()
        self._step_completed = True

    def _worker(self, number: int) -> str:
        names = sorted(self.cluster.processes, reverse=True)
        return names[number % len(names)]

    @property
    def _running(self) -> list[str]:
        return [name for name, state in self.cluster.checker.requests.items() if state.ending is None]

    @precondition(lambda self: len(self._running) < AT_ONCE)
    @rule(
        mode=st.sampled_from(("ssd", "ssd", "auto", "sd", "ar")),
        prompt=prompts(),
        sampling=samplings(),
        eos=st.sampled_from((frozenset(), frozenset(), frozenset({0}))),
        ticks_after=TICKS_AFTER,
    )
    def begin(
        self, mode: str, prompt: tuple[int, ...], sampling: SamplingParams, eos: frozenset[int], ticks_after: int
    ) -> None:
        with self._step("begin", ticks_after):
            self._begun_count += 1
            self.cluster.begin(Admit(f"r{self._begun_count}", prompt, sampling, mode, eos))

    @precondition(lambda self: self._running)
    @rule(which=st.integers(0, AT_ONCE - 1), reason=st.sampled_from(("cancelled", "stop")), ticks_after=TICKS_AFTER)
    def stop(self, which: int, reason: str, ticks_after: int) -> None:
        with self._step("stop", ticks_after):
            self.cluster.stop(self._running[which % len(self._running)], reason)

    @rule(ticks_after=st.integers(1, 25))
    def go(self, ticks_after: int) -> None:
        with self._step("go", ticks_after):
            pass

    @rule(
        worker=WORKERS,
        faults=st.builds(
            LinkFaults,
            drop=SHARES,
            duplicate=SHARES,
            reorder=SHARES,
            corrupt=SHARES,
            delay=st.sampled_from((0, 0, 1, 5)),
        ),
        ticks_after=TICKS_AFTER,
    )
    def worsen_link(self, worker: int, faults: LinkFaults, ticks_after: int) -> None:
        with self._step("link faults", ticks_after):
            self.cluster.set_faults(self._worker(worker), faults)

    @rule(worker=WORKERS, ticks=FAULT_TICKS, lost=st.booleans(), ticks_after=TICKS_AFTER)
    def cut(self, worker: int, ticks: int, lost: bool, ticks_after: int) -> None:
        with self._step("cut", ticks_after):
            self.cluster.cut(self._worker(worker), ticks, lost)

    @rule(worker=WORKERS, ticks=FAULT_TICKS, ticks_after=TICKS_AFTER)
    def stall(self, worker: int, ticks: int, ticks_after: int) -> None:
        with self._step("stall", ticks_after):
            self.cluster.stall(self._worker(worker), ticks)

    @rule(worker=st.sampled_from((0, 1, 1, 2, 1, 2, 3)), other_model=st.booleans(), ticks_after=TICKS_AFTER)
    def kill(self, worker: int, other_model: bool, ticks_after: int) -> None:
        with self._step("kill", ticks_after):
            self.cluster.kill(self._worker(worker), other_model)

    @rule(worker=WORKERS, ticks=FAULT_TICKS, ticks_after=TICKS_AFTER)
    def sleep(self, worker: int, ticks: int, ticks_after: int) -> None:
        with self._step("sleep", ticks_after):
            self.cluster.sleep(self._worker(worker), ticks)

    @rule(seconds=st.sampled_from((1, 30, 600)), ticks_after=TICKS_AFTER)
    def pause(self, seconds: int, ticks_after: int) -> None:
        with self._step("pause", ticks_after):
            self.cluster.pause(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            if self._step_completed:
                self._check_recovery()
        finally:
            note(f"the latest events:\n{self.cluster.log}")
            TALLY.add(self.cluster)
            self._patch.undo()

    def _check_recovery(self) -> None:
        """Ends the faults, and checks that all requests end, and that workers release them when another one comes."""
        cluster, check = self.cluster, self.cluster.checker.check
        cluster.end_faults()
        self._tick_until_settled()
        check("termination", not self._running, f"{self._running} hang")
        self._tick_until(lambda: not self._drafters_busy)  # a drafter releases a text only after its work
        cluster.pause(LONG_PAUSE_S)
        cluster.begin(Admit("last", (1, 2, 3), SamplingParams(max_tokens=3), "ssd", frozenset()))
        self._tick_until_settled()
        for _ in range(20):
            cluster.tick()
        for process in cluster.processes.values():
            worker: Any = process.worker
            check("released", not worker._running, f"{process.name} still holds {list(worker._running)}")

    @property
    def _drafters_busy(self) -> bool:
        """Whether a drafter has a text to read or to draft for, or a message is in flight."""
        workers = [
            process.worker for process in self.cluster.processes.values() if isinstance(process.worker, DraftWorker)
        ]
        return self.cluster.has_messages_in_flight or any(
            text.work.has_work for own in workers for text in own._running.values()
        )

    def _tick_until_settled(self) -> None:
        self._tick_until(lambda: self.cluster.is_settled)

    def _tick_until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(MAX_TICKS):
            if is_over():
                return
            self.cluster.tick()
