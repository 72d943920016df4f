"""Measures how the tokens per second of 1, 2, 4 and 8 engines on simulated devices scale.

    python -m tools.fleet.scaling --engines 1,2,4,8 --slower 5

Each engine consists of real processes (server, target, drafter) whose forwards sleep for the profile's time, so that a
machine with idle cores carries several; `--slower` multiplies the profile's times. All engines run throughout; in turn,
the given number of them receives requests, each from its own client. The table also has the cores that the engines used
and the share of this machine's cores in use.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.commands.files import parse_numbers
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.protocol import values
from tools.fleet.processes import Engines, PlannedRequest, measure_cpu_share, send, slow_down, total_rate
from tools.simulation.profile import PROFILES, Profile

PROFILE = PROFILES / "two-macs-ethernet.json"
TEXTS = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens per second, cores that the engines used, and the share of all cores in use by any process."""

    rate: float
    cores: float
    busy: float


async def _send_together(clients: Sequence[AsyncClient], requests: Sequence[PlannedRequest], mode: str) -> float:
    completed = await asyncio.gather(*(send(client, request, mode) for client in clients for request in requests))
    return total_rate(completed)


def measure_engines(engines: Engines, count: int, tokens: int, at_once: int, mode: str) -> Measurement:
    """Measures `count` engines, each with the same texts."""
    requests = [PlannedRequest(prompt, tokens) for prompt in engines.prompts[:at_once]]
    used = engines.cpu_seconds()
    with measure_cpu_share() as busy:
        tokens_per_second = asyncio.run(_send_together(engines.clients[:count], requests, mode))
    seconds = count * at_once * tokens / tokens_per_second
    return Measurement(tokens_per_second, (engines.cpu_seconds() - used) / seconds, busy[0])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", default="1,2,4,8", metavar="N,N", help="numbers of engines (default: 1,2,4,8)")
    parser.add_argument("--profile", type=Path, default=PROFILE, metavar="FILE", help="latency profile")
    parser.add_argument("--slower", type=float, default=5.0, metavar="TIMES", help="multiplies its times (default: 5)")
    parser.add_argument("--mode", default="ssd", choices=("ar", "sd", "ssd", "auto"), help="(default: ssd)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="concurrent requests per engine (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per text (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each number (default: 3)")


def run(options: argparse.Namespace) -> int:
    counts = [values.check_int("engines", count, 1, 64) for count in parse_numbers("engines", options.engines, int)]
    profile = slow_down(Profile.read(options.profile), values.check_float("slower", options.slower, 1.0, 100.0))
    at_once = values.check_int("at_once", options.at_once, 1, TEXTS)
    screen, found = Screen(), defaultdict[int, list[Measurement]](list)
    engines = Engines(profile, max(counts), options.tokens, TEXTS, at_once)
    try:
        measure_engines(engines, max(counts), options.tokens, at_once, options.mode)  # lets the planner learn
        for number in range(values.check_int("rounds", options.rounds, 1, 100)):
            for count in counts:
                screen.show(f"{count} engines, {number + 1} of {options.rounds}")
                found[count].append(measure_engines(engines, count, options.tokens, at_once, options.mode))
    finally:
        screen.clear()
        engines.close()
    rate_of_one = statistics.median(one.rate for one in found[counts[0]]) / counts[0]
    print(
        "| engines | tok/s | of linear, median [each round] | cores used by engines | cores in use |\n"
        + "|---" * 5
        + "|"
    )
    for count, measurements in found.items():
        shares = [one.rate / (count * rate_of_one) for one in measurements]
        rates, cores, busy = (
            statistics.median(getattr(one, name) for one in measurements) for name in ("rate", "cores", "busy")
        )
        each = ", ".join(f"{share:.2f}" for share in shares)
        print(f"| {count} | {rates:.1f} | {statistics.median(shares):.2f} [{each}] | {cores:.2f} | {busy:.0%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
