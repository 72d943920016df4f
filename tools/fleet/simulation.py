"""A fleet in virtual time, from its traffic to its readers: engines, the gate, zones that go, engines that come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.harness.virtual.world import World
from tools.fleet.engine import Engine, Machinery
from tools.fleet.gate import Gate, Least, PowerOfTwo, Router, Sessions
from tools.fleet.job import Job
from tools.fleet.plan import Fleet, Loss, Traffic
from tools.fleet.recorded import Recorded
from tools.fleet.rounds import RealRounds
from tools.fleet.scaler import Scaler
from tools.fleet.service import Service, recorded
from tools.fleet.tally import Look, Sums, Tally, sums
from tools.fleet.traffic import Crowd

LOST_ZONE = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`tally` of all, `sums` from the second on that was asked for."""

    tally: Tally
    sums: Sums


class Simulation:
    """`real`: each engine makes the real rounds, from what one like it has learned; else it brings what one did."""

    def __init__(self, fleet: Fleet, traffic: Traffic, real: bool, loss: Loss | None = None) -> None:
        self._fleet, self._traffic, self._real = fleet, traffic, real
        self._world, self._tally = World(), Tally()
        routers: dict[str, Router] = {
            "power-of-two": PowerOfTwo(traffic.seed), "least": Least(), "sessions": Sessions()
        }  # fmt: skip
        self._gate = Gate(self._world, routers[fleet.routing], fleet.ongoing)
        self._gone: list[Engine] = []
        self._numbers = 0
        for number in range(fleet.engines):
            self._add(fleet.zone(number))
        self._crowd = Crowd(traffic, self._world, self._asked)
        if fleet.scaling is not None:
            Scaler(fleet.scaling, self._world, self._counts, self._grow, self._shrink)
        if loss is not None:
            self._world.at(loss.at, lambda: self._lose(loss))

    def run(self, begin: float = 0.0, shown: Callable[[float], None] = lambda _: None) -> Outcome:
        """Until traffic ends; `shown` is told of each second."""
        busy_at_begin, alive_at_begin = 0.0, 0.0
        with self._world.running():
            for second in range(int(self._traffic.seconds) + 1):
                self._until(second)
                self._look()
                shown(second)
                if second == int(begin):
                    busy_at_begin, alive_at_begin = self._busy()
        busy, alive = self._busy()
        share = (busy - busy_at_begin) / max(alive - alive_at_begin, 1e-9)
        return Outcome(self._tally, sums(self._tally, begin, self._traffic.seconds, share))

    def _until(self, second: float) -> None:
        reached: list[bool] = []
        self._world.at(second, lambda: reached.append(True))
        while not reached:
            self._world.step()

    def _busy(self) -> tuple[float, float]:
        """Seconds in which targets worked, and in which they could."""
        there = [(engine, self._world.now) for engine in self._gate.engines if not engine.gone]
        all_ = [*there, *((engine, engine.until) for engine in self._gone)]
        return sum(one.machinery.busy for one, _ in all_), sum(until - one.since for one, until in all_)

    # --- requests -------------------------------------------------------------------------------------------------

    def _asked(self, job: Job) -> None:
        self._tally.jobs.append(job)
        self._gate.take(job)

    def _answered(self, job: Job) -> None:
        self._crowd.answered(job)

    def _hear(self, job: Job, tokens: float, flows: float = 0.0) -> None:
        self._tally.hears(job, tokens, self._world.now, flows)

    def _look(self) -> None:
        engines = [engine for engine in self._gate.engines if not engine.gone]
        running = sum(engine.running for engine in engines)
        waiting = sum(engine.load for engine in self._gate.engines) - running + self._gate.waiting
        self._tally.looks.append(Look(len(engines), running, waiting))

    # --- engines --------------------------------------------------------------------------------------------------

    def _add(self, zone: int) -> None:
        engine = Engine(self._numbers, zone, self._fleet.active, self._world, self._answered)
        engine.machinery = self._machinery(engine)
        self._numbers += 1
        self._gate.engines.append(engine)

    def _machinery(self, engine: Engine) -> Machinery:
        fleet, profile = self._fleet, self._fleet.profile(engine.number)
        _, memory = recorded(fleet, profile, fleet.drafters)
        if self._real:
            return RealRounds(self._world, fleet, profile, self._hear, engine.is_over, memory)

        def of(drafters: int) -> Service:
            return recorded(fleet, profile, drafters)[0]

        return Recorded(self._world, of, fleet.drafters, fleet.prompt_rate, fleet.remembers, self._hear, engine.is_over)

    # --- losses ---------------------------------------------------------------------------------------------------

    def _lose(self, loss: Loss) -> None:
        self._lose_drafters(loss)
        if loss.what == "zone":
            lost = [engine for engine in self._gate.engines if engine.zone == LOST_ZONE and not engine.gone]
            for engine in lost:
                engine.end()
            self._world.after(loss.engine, lambda: self._go_on_elsewhere(lost))
            if loss.back is not None:
                self._world.after(loss.back, lambda: self._come_back(len(lost)))

    def _come_back(self, count: int) -> None:
        for _ in range(count):
            self._add(LOST_ZONE)

    def _lose_drafters(self, loss: Loss) -> None:
        for engine in [engine for engine in self._gate.engines if not engine.gone]:
            count = self._fleet.drafters_in(LOST_ZONE, engine.number)
            if count:
                engine.machinery.lose_drafters(count, loss.drafter)
                if loss.back is not None:
                    self._world.after(loss.back, engine.machinery.regain_drafters)

    def _go_on_elsewhere(self, lost: Sequence[Engine]) -> None:
        """It was noticed: what ran and waited there is asked of others, prompts and what was said are read again."""
        for engine in lost:
            self._gate.engines.remove(engine)
            self._gone.append(engine)
        for job in [job for engine in reversed(lost) for job in reversed(engine.left())]:
            job.broken += 1
            self._gate.take(job)

    # --- scaling --------------------------------------------------------------------------------------------------

    def _counts(self) -> tuple[int, int]:
        """Engines that the gate may choose, and requests that run or wait."""
        known = [engine for engine in self._gate.engines if engine.known]
        return len(known), sum(engine.load for engine in known) + self._gate.waiting

    def _grow(self) -> None:
        self._add(self._fleet.zone(self._numbers))

    def _shrink(self) -> None:
        """The least busy one gets nothing more; it ends when it has said all."""
        engine = min((one for one in self._gate.engines if one.known), key=lambda one: (one.load, -one.number))
        engine.known = False
        self._leave(engine)

    def _leave(self, engine: Engine) -> None:
        if engine.load:
            self._world.after(1.0, lambda: self._leave(engine))
        elif engine in self._gate.engines:
            engine.end()
            self._gate.engines.remove(engine)
            self._gone.append(engine)
