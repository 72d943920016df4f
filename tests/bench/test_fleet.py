"""The simulated fleet: a seed determines the results, losing a zone loses no request, flows agree with real rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from outrider.orchestrator import cli
from outrider.orchestrator.settings import MAX_DRAFTERS
from outrider.protocol.errors import InvalidRequest
from tests.harness.virtual.event_loop import EventLoop
from tests.harness.virtual.prompt_cache import VirtualPromptCache
from tools.fleet import __main__ as program
from tools.fleet import service_rates
from tools.fleet.engine import Engine
from tools.fleet.ingress import IngressQueue, LeastLoaded, PowerOfTwo, Router, Sessions
from tools.fleet.job import Job
from tools.fleet.metrics import Metrics
from tools.fleet.plan import Fleet, Loss, Scaling, Sizes, Traffic
from tools.fleet.report import describe_difference, describe_loss, table
from tools.fleet.simulation import FleetResult, Simulation
from tools.latency import Latency
from tools.simulation.profile import Profile

MACHINE = Profile(
    "a slow machine", ("none",), Latency(((1, 100.0), (8, 150.0))), Latency(((1, 8.0), (16, 12.0))), 0.5, (0.8,), (0.5,)
)  # fmt: skip
FLEET = Fleet((MACHINE,), engines=3, drafters=2, active=2, ongoing=3, prompt_rate=400.0)
TRAFFIC = Traffic(1.6, 20.0, Sizes(60), Sizes(40), think=2.0)
ZONE = Loss("zone", 8.0, 6.0)


@pytest.fixture(autouse=True, scope="module")
def short_recording() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_rates, "LEARNING_SECONDS", 3.0)
        patch.setattr(service_rates, "MEASURED_SECONDS", 6.0)
        yield


@cache
def result(real: bool, loss: Loss | None = None, fleet: Fleet = FLEET, traffic: Traffic = TRAFFIC) -> FleetResult:
    return Simulation(fleet, traffic, real, loss).run(4.0)


class SilentSource:
    """Accepts requests, and never generates a token."""

    busy = 0.0

    def begin(self, job: Job) -> None: ...

    def end(self) -> None: ...

    def lose_drafters(self, count: int, noticed: float) -> None: ...

    def regain_drafters(self) -> None: ...


def ingress(loop: EventLoop, router: Router, engines: int, ongoing: int = 2) -> IngressQueue:
    made = IngressQueue(loop, router, ongoing)
    for number in range(engines):
        engine = Engine(number, 0, 1, loop, lambda job: None)
        engine.source = SilentSource()
        made.engines.append(engine)
    return made


def job(name: str, session: str = "s", broken: int = 0) -> Job:
    return Job(name, session, 0.0, (1, 2, 3, 4), 2, 2, interruptions=broken)


@pytest.mark.parametrize("real", [False, True], ids=["flow", "rounds"])
def test_simulation_repeats_with_its_seed_and_differs_with_another(real: bool) -> None:
    traffic = [replace(TRAFFIC, seconds=3.0, seed=seed) for seed in (0, 0, 1)]
    one, again, other = (Simulation(FLEET, own, real).run(2.0).summary for own in traffic)
    assert one == again != other


def test_rounds_of_an_engine_run_with_more_drafters_than_a_server_starts() -> None:
    """A fleet's default is ten drafters for an engine. A server starts up to eight of them, and the others join."""
    fleet = replace(FLEET, drafters=Fleet((MACHINE,)).drafters, engines=1, active=1)
    assert fleet.drafters > MAX_DRAFTERS
    assert Simulation(fleet, replace(TRAFFIC, seconds=1.0), True).run(2.0).summary


def test_flow_simulation_agrees_with_the_real_rounds() -> None:
    flow, rounds = result(False).summary, result(True).summary
    assert flow.rate == pytest.approx(rounds.rate, rel=0.1)
    assert flow.busy == pytest.approx(rounds.busy, rel=0.1)
    assert flow.ended == pytest.approx(rounds.ended, abs=3)


@pytest.mark.parametrize("real", [False, True], ids=["flow", "rounds"])
def test_losing_a_zone_loses_no_request(real: bool) -> None:
    """The real rounds compare all tokens with their texts."""
    found = result(real, ZONE)
    broken = [one for one in found.metrics.jobs if one.interruptions]
    assert broken and all(one.is_complete for one in broken)
    assert min(sample.engines for sample in found.metrics.samples) == 2 and found.metrics.samples[-1].engines == 3
    assert all(one.received <= one.answer for one in found.metrics.jobs)
    assert "lost at 8 s" in describe_loss(found, ZONE, found) and "100% until the end" in describe_loss(
        found, ZONE, found
    )
    assert "+0.0 %" in describe_difference(found, found)
    assert len(table({"0.5": found}).splitlines()) == 3


def test_interrupted_request_waits_until_the_loss_is_noticed() -> None:
    late, until = replace(ZONE, engine=5.0), replace(TRAFFIC, seconds=15.0)
    jobs = [
        [job for job in found.metrics.jobs if job.interruptions]
        for found in (result(True, ZONE), result(True, late, traffic=until))
    ]
    soon, later = (max(job.gap for job in broken if job.first is not None and job.first < ZONE.at) for broken in jobs)
    assert later > soon > 0.5


def test_gaps_of_a_loss_are_of_texts_that_had_begun() -> None:
    """A request that was lost in the queue, or while its prompt was read, has no text with a gap."""
    found = result(False, ZONE)
    metrics = Metrics(
        found.metrics.tokens, found.metrics.samples, [replace(job("asked"), first=9.0, gap=0.0, interruptions=1)]
    )
    assert "longest gap" not in describe_loss(FleetResult(metrics, found.summary), ZONE)
    metrics.jobs.append(replace(job("read"), first=7.0, gap=3.0, interruptions=1))
    assert "longest gap in 1 text: p50 3.0 s, p99 3.0 s, longest 3.0 s" in describe_loss(
        FleetResult(metrics, found.summary), ZONE
    )


def test_a_loss_at_the_start_has_nothing_to_recover_to() -> None:
    loss = Loss("drafters", 0.0)
    assert "recovered" not in describe_loss(result(False, loss), loss)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--lose", "zone", "--seconds", "20", "--at", "25"], "at is 25.0; expected a number from 0 to 19"),
        (["--lose", "zone", "--at=-5"], "at is -5.0; expected a number from 0 to 299"),
        (["--lose", "zone", "--back", "0"], "back is 0.0; expected a number from"),
        (["--scale", "1:x:3"], "scale is 1:x:3; expected LEAST:MOST:EACH, like 10:100:3"),
        (["--scale", "5:2:3"], "most is 2; expected a whole number from 5"),
        (["--scale", "1:2:0"], "each is 0.0; expected a number from"),
        (["--picture", "file/x.png"], "nothing can be written to file"),
        (["--out", "file/x.json"], "nothing can be written to file"),
    ],
)
def test_invalid_flags_are_refused_before_a_simulation(
    given: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "Simulation", lambda *_: pytest.fail("a simulation began"))
    assert cli.run("tools.fleet", lambda: program, ["run", *given]) == InvalidRequest.exit_code
    assert words in capsys.readouterr().err


def test_nothing_generated_after_a_loss_has_no_share() -> None:
    quiet = result(False, ZONE, traffic=replace(TRAFFIC, rate=0.001))
    assert "Share of the tokens" not in describe_loss(quiet, ZONE, quiet)


def test_engines_without_drafters_are_slower_but_complete_their_texts() -> None:
    found, whole = result(True, Loss("drafters", 4.0, 10.0)), result(True)
    assert found.summary.interrupted == 0 and found.summary.ended > 0.8 * whole.summary.ended
    (alone, *_), _ = service_rates.measure_service_rates(FLEET, MACHINE, 0)
    (drafted_for, *_), _ = service_rates.measure_service_rates(FLEET, MACHINE, 2)
    assert alone.rate < 0.8 * drafted_for.rate


def test_spread_drafters_are_in_all_zones() -> None:
    spread = replace(FLEET, drafters=10, spread=True)
    assert [[spread.drafters_in(zone, engine) for zone in range(3)] for engine in range(2)] == [[4, 3, 3], [3, 4, 3]]
    assert [FLEET.drafters_in(zone, 1) for zone in range(3)] == [0, 2, 0]


@pytest.mark.parametrize("router", [PowerOfTwo(0), LeastLoaded()])
def test_router_chooses_the_less_loaded_engine(router: Router) -> None:
    loop = EventLoop()
    made = ingress(loop, router, 2)
    for number in range(4):
        made.take(job(f"j{number}"))
    assert [engine.load for engine in made.engines] == [2, 2]
    made.take(job("later"))
    made.take(job("broken", broken=1))
    assert made.waiting == 2
    ended = made.engines[0].remove_all()
    while made.waiting == 2:
        loop.run_next()
    assert len(ended) == 2 and "broken" in [one.name for engine in made.engines for one in engine.remove_all()]


def test_a_session_keeps_its_engine_until_it_is_full_or_gone() -> None:
    made = ingress(EventLoop(), Sessions(), 5, ongoing=3)
    for number in range(3):
        made.take(job(f"j{number}", session="mine"))
    full = next(engine for engine in made.engines if engine.load == 3)
    made.take(job("one more", session="mine"))
    assert sum(engine.load for engine in made.engines if engine is not full) == 1
    full.is_routable = False
    made.take(job("again", session="mine"))
    assert full.load == 3 and sum(engine.load for engine in made.engines) == 5


def test_engines_are_added_for_waiting_requests_and_removed_when_idle() -> None:
    scaling = Scaling(1, 4, 2.0, up=3.0, down=5.0, start=2.0)
    fleet = replace(FLEET, engines=1, scaling=scaling)
    engines = [sample.engines for sample in result(False, None, fleet, replace(TRAFFIC, rate=4.0)).metrics.samples]
    assert engines[0] == 1 and max(engines) == 4
    quiet = replace(FLEET, engines=4, scaling=scaling)
    assert result(False, None, quiet, replace(TRAFFIC, rate=0.02)).metrics.samples[-1].engines == 1


def test_remembered_texts_are_found_by_prefix_and_evicted_when_full() -> None:
    known = VirtualPromptCache(100)
    text = tuple(range(60))
    known.add(text[:40])
    assert known.lookup(text) == 40 and known.lookup(text[:30]) == 29 and known.lookup(text[1:]) == 0
    known.add(tuple(range(100, 180)))
    assert known.lookup(text) == 0
