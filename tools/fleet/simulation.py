"""Simulates a fleet in virtual time: traffic, ingress, engines, losses of zones, and scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.engine import Engine, TokenSource
from tools.fleet.ingress import IngressQueue, LeastLoaded, PowerOfTwo, Router, Sessions
from tools.fleet.job import Job
from tools.fleet.metrics import Metrics, Sample, Summary, summarize
from tools.fleet.plan import Fleet, Loss, Traffic
from tools.fleet.recorded import RecordedFlow
from tools.fleet.rounds import RealRounds
from tools.fleet.scaler import Scaler
from tools.fleet.service_rates import ServiceRates, measure_service_rates
from tools.fleet.traffic import Users

LOST_ZONE = 0


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The metrics of the whole run, and a summary without the warm-up."""

    metrics: Metrics
    summary: Summary


class Simulation:
    """A fleet with traffic and an optional loss. `real`: engines run the real rounds, with learned estimates; else they
    are flows with recorded rates."""

    def __init__(self, fleet: Fleet, traffic: Traffic, real: bool, loss: Loss | None = None) -> None:
        self._fleet, self._traffic, self._real = fleet, traffic, real
        self._loop, self._metrics = EventLoop(), Metrics()
        routers: dict[str, Router] = {
            "power-of-two": PowerOfTwo(traffic.seed), "least": LeastLoaded(), "sessions": Sessions()
        }  # fmt: skip
        self._ingress = IngressQueue(self._loop, routers[fleet.routing], fleet.ongoing)
        self._ended_engines: list[Engine] = []
        self._numbers = 0
        for number in range(fleet.engines):
            self._add_engine(fleet.zone(number))
        self._users = Users(traffic, self._loop, self._on_request)
        if fleet.scaling is not None:
            Scaler(fleet.scaling, self._loop, self._counts, self._grow, self._shrink)
        if loss is not None:
            self._loop.call_at(loss.at, lambda: self._lose(loss))

    def run(self, begin: float = 0.0, shown: Callable[[float], None] = lambda _: None) -> FleetResult:
        """Runs until the traffic ends, and counts from second `begin` on. Calls `shown` with each second."""
        busy_at_begin, alive_at_begin = 0.0, 0.0
        with self._loop.as_process_clock():
            for second in range(int(self._traffic.seconds) + 1):
                self._run_until(second)
                self._sample()
                shown(second)
                if second == int(begin):
                    busy_at_begin, alive_at_begin = self._busy()
        busy, alive = self._busy()
        share = (busy - busy_at_begin) / max(alive - alive_at_begin, 1e-9)
        return FleetResult(self._metrics, summarize(self._metrics, begin, self._traffic.seconds, share))

    def _run_until(self, second: float) -> None:
        reached: list[bool] = []
        self._loop.call_at(second, lambda: reached.append(True))
        while not reached:
            self._loop.run_next()

    def _busy(self) -> tuple[float, float]:
        """Returns the seconds in which targets worked, and in which they existed."""
        there = [(engine, self._loop.now) for engine in self._ingress.engines if not engine.is_stopped]
        all_ = [*there, *((engine, engine.until) for engine in self._ended_engines)]
        return sum(one.source.busy for one, _ in all_), sum(until - one.since for one, until in all_)

    # --- requests -------------------------------------------------------------------------------------------------

    def _on_request(self, job: Job) -> None:
        self._metrics.jobs.append(job)
        self._ingress.take(job)

    def _on_answer(self, job: Job) -> None:
        self._users.on_answer(job)

    def _on_tokens(self, job: Job, tokens: float, flows: float = 0.0) -> None:
        self._metrics.record(job, tokens, self._loop.now, flows)

    def _sample(self) -> None:
        engines = [engine for engine in self._ingress.engines if not engine.is_stopped]
        running = sum(engine.running for engine in engines)
        waiting = sum(engine.load for engine in self._ingress.engines) - running + self._ingress.waiting
        self._metrics.samples.append(Sample(len(engines), running, waiting))

    # --- engines --------------------------------------------------------------------------------------------------

    def _add_engine(self, zone: int) -> None:
        engine = Engine(self._numbers, zone, self._fleet.active, self._loop, self._on_answer)
        engine.source = self._token_source(engine)
        self._numbers += 1
        self._ingress.engines.append(engine)

    def _token_source(self, engine: Engine) -> TokenSource:
        fleet, profile = self._fleet, self._fleet.profile(engine.number)
        _, memory = measure_service_rates(fleet, profile, fleet.drafters)
        if self._real:
            return RealRounds(self._loop, fleet, profile, self._on_tokens, engine.on_complete, memory)

        def of(drafters: int) -> ServiceRates:
            return measure_service_rates(fleet, profile, drafters)[0]

        return RecordedFlow(
            self._loop, of, fleet.drafters, fleet.prompt_rate, fleet.remembers, self._on_tokens, engine.on_complete
        )

    # --- losses ---------------------------------------------------------------------------------------------------

    def _lose(self, loss: Loss) -> None:
        self._lose_drafters(loss)
        if loss.what == "zone":
            lost = [engine for engine in self._ingress.engines if engine.zone == LOST_ZONE and not engine.is_stopped]
            for engine in lost:
                engine.end()
            self._loop.call_later(loss.engine, lambda: self._move_requests(lost))
            if loss.back is not None:
                self._loop.call_later(loss.back, lambda: self._restore_engines(len(lost)))

    def _restore_engines(self, count: int) -> None:
        for _ in range(count):
            self._add_engine(LOST_ZONE)

    def _lose_drafters(self, loss: Loss) -> None:
        for engine in [engine for engine in self._ingress.engines if not engine.is_stopped]:
            count = self._fleet.drafters_in(LOST_ZONE, engine.number)
            if count:
                engine.source.lose_drafters(count, loss.drafter)
                if loss.back is not None:
                    self._loop.call_later(loss.back, engine.source.regain_drafters)

    def _move_requests(self, lost: Sequence[Engine]) -> None:
        """Handles a loss once it is noticed: other engines take the requests and read prompts and answers again."""
        for engine in lost:
            self._ingress.engines.remove(engine)
            self._ended_engines.append(engine)
        for job in [job for engine in reversed(lost) for job in reversed(engine.remove_all())]:
            job.interruptions += 1
            self._ingress.take(job)

    # --- scaling --------------------------------------------------------------------------------------------------

    def _counts(self) -> tuple[int, int]:
        """Returns the numbers of engines that the ingress may choose, and of running or waiting requests."""
        known = [engine for engine in self._ingress.engines if engine.is_routable]
        return len(known), sum(engine.load for engine in known) + self._ingress.waiting

    def _grow(self) -> None:
        self._add_engine(self._fleet.zone(self._numbers))

    def _shrink(self) -> None:
        """Removes the least loaded engine from the ingress's choice; it ends when its requests are complete."""
        engine = min((one for one in self._ingress.engines if one.is_routable), key=lambda one: (one.load, -one.number))
        engine.is_routable = False
        self._remove_when_idle(engine)

    def _remove_when_idle(self, engine: Engine) -> None:
        if engine.load:
            self._loop.call_later(1.0, lambda: self._remove_when_idle(engine))
        elif engine in self._ingress.engines:
            engine.end()
            self._ingress.engines.remove(engine)
            self._ended_engines.append(engine)
