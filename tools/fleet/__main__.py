"""Simulates fleets for planning, like the throughput of 100 engines with 1,000 drafters, and the cost of losing a zone.

    python -m tools.fleet run --rate 12 --seconds 300 --lose zone --at 120 --back 60
    python -m tools.fleet run --rate 12 --seconds 75 --lose zone --at 35 --rounds   # minutes
    python -m tools.fleet load --rates 4,8,12,16 --picture load.png
    python -m tools.fleet need --rates 3,6,12,24
    python -m tools.fleet check --engines 4 --rates 0.25,0.5,0.7 --seconds 150   # flow against rounds

Time is virtual: nothing sleeps, and the same seed gives the same numbers. By default an engine is a flow with the rate
that was recorded for its number of concurrent requests, from the real rounds, planner, speculation cache and draft
workers. With `--rounds` each engine runs these itself. Machines are profiles (docs/simulation.md).
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_left
from dataclasses import asdict, replace
from pathlib import Path

from outrider.bench.commands.files import parse_numbers
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from tools.fleet import picture
from tools.fleet.plan import LOSSES, ROUTINGS, Fleet, Loss, Scaling, Sizes, Traffic
from tools.fleet.report import describe_difference, describe_loss, table
from tools.fleet.service_rates import measure_service_rates
from tools.fleet.simulation import FleetResult, Simulation
from tools.simulation.profile import PROFILES, Profile

PROFILE = PROFILES / "two-macs-ethernet.json"
WARM_UP_RATIO = 0.2  # share of the time that is not counted
PROGRESS_SECONDS = 10
MAX_QUEUED_SECONDS = 1.0  # of the p99 in `need`


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("run", "load", "need", "check"),
        help="one simulation; several rates; the fewest engines for each rate; flow against rounds",
    )
    parser.add_argument(
        "--profiles",
        nargs="+",
        type=Path,
        default=[PROFILE],
        metavar="FILE",
        help="latency profiles, assigned to engines in turn",
    )
    parser.add_argument("--engines", type=int, default=100, metavar="N", help="engines (default: 100)")
    parser.add_argument("--drafters", type=int, default=10, metavar="N", help="drafters per engine (default: 10)")
    parser.add_argument("--zones", type=int, default=3, metavar="N", help="zones (default: 3)")
    parser.add_argument("--spread", action="store_true", help="spread an engine's drafters over all zones")
    parser.add_argument(
        "--active", type=int, default=4, metavar="N", help="concurrent requests per engine (default: 4)"
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default=ROUTINGS[0],
        help="how an engine is chosen for a request (default: power-of-two)",
    )
    parser.add_argument(
        "--prompt-rate", type=float, default=120.0, metavar="N", help="prompt tokens per second (default: 120)"
    )
    parser.add_argument("--scale", metavar="LEAST:MOST:EACH", help="scale engines by requests, like Ray Serve")
    parser.add_argument("--rate", type=float, default=12.0, metavar="N", help="requests per second (default: 12)")
    parser.add_argument("--rates", default="2,6,10,12,14,16,18", metavar="N,N", help="rates of load, need and check")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="simulated time (default: 300)")
    parser.add_argument(
        "--prompt", type=int, default=150, metavar="N", help="median new prompt tokens per turn (default: 150)"
    )
    parser.add_argument(
        "--answer", type=int, default=120, metavar="N", help="median tokens of an answer (default: 120)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the traffic (default: 0)")
    parser.add_argument("--lose", choices=LOSSES, help="lose a zone, or only its drafters")
    parser.add_argument("--at", type=float, default=120.0, metavar="S", help="time of the loss (default: 120)")
    parser.add_argument("--back", type=float, metavar="S", help="seconds from the loss to the return (default: never)")
    parser.add_argument("--rounds", action="store_true", help="run the real rounds in each engine")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a picture here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")


def run(options: argparse.Namespace) -> int:
    programs = {
        "run": _run_once, "load": _run_loads, "need": _find_needed_engines, "check": _compare_flow_with_rounds
    }  # fmt: skip
    for path in filter(None, (options.picture, options.out)):
        ensure_writable(path.parent, "choose another file")
    programs[options.what](_fleet(options), _traffic(options), options)
    return 0


def _simulate(fleet: Fleet, traffic: Traffic, rounds: bool) -> FleetResult:
    return Simulation(fleet, traffic, rounds).run(WARM_UP_RATIO * traffic.seconds)


def _run_once(fleet: Fleet, traffic: Traffic, options: argparse.Namespace) -> None:
    loss, screen = _loss(options, traffic.seconds), Screen()

    def shown(second: float) -> None:
        if second % PROGRESS_SECONDS == 0:
            screen.show(f"second {second:.0f} of {traffic.seconds:.0f}")

    result = Simulation(fleet, traffic, options.rounds, loss).run(WARM_UP_RATIO * traffic.seconds, shown)
    screen.clear()
    print(table({f"{traffic.rate:g}": result}))
    without = None
    if loss is not None:
        without = None if options.rounds else _simulate(fleet, traffic, False)
        print(describe_loss(result, loss, without))
    if options.picture:
        picture.draw_over_time(result, loss, options.picture, without)
    _write(options.out, [result])


def _run_loads(fleet: Fleet, traffic: Traffic, options: argparse.Namespace) -> None:
    rates = _rates(options.rates)
    found = {f"{rate:g}": _simulate(fleet, replace(traffic, rate=rate), options.rounds) for rate in rates}
    print(table(found))
    if options.picture:
        picture.draw_over_load(found, options.picture)
    _write(options.out, list(found.values()))


def _find_needed_engines(fleet: Fleet, traffic: Traffic, options: argparse.Namespace) -> None:
    """Prints the fewest engines for each load with a p99 of at most `MAX_QUEUED_SECONDS` in the queue."""
    print("| requests/s | engines | tok/s | targets busy |\n|---|---|---|---|")
    for rate in _rates(options.rates):
        load = replace(traffic, rate=rate)

        def enough(engines: int, load: Traffic = load) -> bool:
            result = _simulate(replace(fleet, engines=engines), load, options.rounds)
            return result.summary.queued[1] <= MAX_QUEUED_SECONDS

        least = most = math.ceil(rate / _max_request_rate(fleet, traffic))
        while not enough(most):
            least, most = most + 1, 2 * most
        least = bisect_left(range(most + 1), True, least, most, key=enough)
        found = _simulate(replace(fleet, engines=least), load, options.rounds).summary
        print(f"| {rate:g} | {least} | {found.rate:.0f} | {found.busy:.2f} |", flush=True)


def _max_request_rate(fleet: Fleet, traffic: Traffic) -> float:
    """Returns the requests per second that an engine could answer if prompts took no time."""
    paces = [measure_service_rates(fleet, profile, fleet.drafters)[0] for profile in fleet.profiles]
    best = max(pace.rate * (n + 1) for service in paces for n, pace in enumerate(service))
    return best / (traffic.answer.median * math.exp(traffic.answer.sigma**2 / 2))


def _compare_flow_with_rounds(fleet: Fleet, traffic: Traffic, options: argparse.Namespace) -> None:
    """Compares flows with the real rounds on the same traffic."""
    for rate in _rates(options.rates):
        load = replace(traffic, rate=rate)
        flow, rounds = (_simulate(fleet, load, real) for real in (False, True))
        print(table({f"{rate:g}, rounds": rounds, f"{rate:g}, flow": flow}))
        print(describe_difference(flow, rounds), flush=True)


def _fleet(options: argparse.Namespace) -> Fleet:
    return Fleet(
        tuple(Profile.read(path) for path in options.profiles),
        engines=values.check_int("engines", options.engines, 1, 10_000),
        drafters=values.check_int("drafters", options.drafters, 1, 64),
        zones=values.check_int("zones", options.zones, 1, 1000),
        spread=options.spread,
        active=values.check_int("active", options.active, 1, 256),
        ongoing=options.active + 1,
        prompt_rate=values.check_float("prompt_rate", options.prompt_rate, 1.0, 1e9),
        routing=options.routing,
        scaling=_scaling(options.scale) if options.scale else None,
    )


def _scaling(text: str) -> Scaling:
    try:
        first, second, third = text.split(":")
        least, most, each = int(first), int(second), float(third)
    except ValueError as error:
        raise InvalidRequest(f"scale is {text}; expected LEAST:MOST:EACH, like 10:100:3") from error
    least = values.check_int("least", least, 1, 10_000)
    return Scaling(least, values.check_int("most", most, least, 10_000), values.check_float("each", each, 1e-3, 1e6))


def _loss(options: argparse.Namespace, seconds: float) -> Loss | None:
    if options.lose is None:
        return None
    back = None if options.back is None else values.check_float("back", options.back, 1e-3, 1e6)
    return Loss(options.lose, values.check_float("at", options.at, 0.0, seconds - 1), back)


def _traffic(options: argparse.Namespace) -> Traffic:
    return Traffic(
        values.check_float("rate", options.rate, 1e-6, 1e6),
        values.check_float("seconds", options.seconds, 1.0, 1e6),
        Sizes(values.check_int("prompt", options.prompt, 1, 1 << 16)),
        Sizes(values.check_int("answer", options.answer, 1, 1 << 16)),
        seed=options.seed,
    )


def _rates(text: str) -> list[float]:
    return [values.check_float("rate", rate, 1e-6, 1e6) for rate in parse_numbers("rates", text, float)]


def _write(path: Path | None, results: list[FleetResult]) -> None:
    if path is not None:
        records = [{"sums": asdict(r.summary), "tokens": sorted(r.metrics.tokens.items())} for r in results]
        path.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
