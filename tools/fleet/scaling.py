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
from tools.fleet.processes import Ask, Engines, measure_busy, send, slow_down, total_rate
from tools.simulation.profile import PROFILES, Profile

PROFILE = PROFILES / "two-macs-ethernet.json"
TEXTS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens per second, cores that the engines used, and the share of all cores in use by any process."""

    rate: float
    cores: float
    busy: float


async def _send_together(clients: Sequence[AsyncClient], asks: Sequence[Ask], mode: str) -> float:
    answers = await asyncio.gather(*(send(client, ask, mode) for client in clients for ask in asks))
    return total_rate(answers)


def measure_turn(engines: Engines, count: int, tokens: int, at_once: int, mode: str) -> Turn:
    """Measures `count` engines, each with the same texts."""
    asks = [Ask(start, tokens) for start in engines.starts[:at_once]]
    used = engines.cpu_seconds()
    with measure_busy() as busy:
        tokens_per_second = asyncio.run(_send_together(engines.clients[:count], asks, mode))
    seconds = count * at_once * tokens / tokens_per_second
    return Turn(tokens_per_second, (engines.cpu_seconds() - used) / seconds, busy[0])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", default="1,2,4,8", metavar="N,N")
    parser.add_argument("--profile", type=Path, default=PROFILE, metavar="FILE")
    parser.add_argument("--slower", type=float, default=5.0, metavar="TIMES")
    parser.add_argument("--mode", default="ssd", choices=("ar", "sd", "ssd", "auto"))
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="concurrent requests per engine")
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")


def run(options: argparse.Namespace) -> int:
    counts = [values.check_int("engines", count, 1, 64) for count in parse_numbers("engines", options.engines, int)]
    profile = slow_down(Profile.read(options.profile), values.check_float("slower", options.slower, 1.0, 100.0))
    at_once = values.check_int("at_once", options.at_once, 1, TEXTS)
    screen, found = Screen(), defaultdict[int, list[Turn]](list)
    engines = Engines(profile, max(counts), options.tokens, TEXTS, at_once)
    try:
        measure_turn(engines, max(counts), options.tokens, at_once, options.mode)  # lets the planner learn
        for number in range(values.check_int("rounds", options.rounds, 1, 100)):
            for count in counts:
                screen.show(f"{count} engines, {number + 1} of {options.rounds}")
                found[count].append(measure_turn(engines, count, options.tokens, at_once, options.mode))
    finally:
        screen.clear()
        engines.close()
    one = statistics.median(turn.rate for turn in found[counts[0]]) / counts[0]
    print(
        "| engines | tok/s | of linear, median [each round] | cores used by engines | cores in use |\n"
        + "|---" * 5
        + "|"
    )
    for count, turns in found.items():
        shares = [turn.rate / (count * one) for turn in turns]
        rates, cores, busy = (
            statistics.median(getattr(turn, name) for turn in turns) for name in ("rate", "cores", "busy")
        )
        each = ", ".join(f"{share:.2f}" for share in shares)
        print(f"| {count} | {rates:.1f} | {statistics.median(shares):.2f} [{each}] | {cores:.2f} | {busy:.0%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
