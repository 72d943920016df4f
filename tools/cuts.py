"""Cuts and heals the link to a drafter on another host during requests, and checks that no text changes.

    python -m tools.cuts                      # 30 cuts of half a second to 15 s; round trip 2 ms, 1 % loss
    python -m tools.cuts --cuts 6 --seconds 1,3

Every other cut is in the middle of the link, where neither host notices it; the others unplug the cable of the
drafter's host. Four requests are always in flight, as in `tests.harness.chaos`; the only drafter is on the other host.
Needs root, for the network namespaces. Prints how soon the drafter returned after the link was healed, and the longest
wait for a chunk. The exit code is 1 if a text differs, a request fails, or the drafter does not return.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from outrider.bench.commands.files import parse_numbers
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.protocol import values
from outrider.protocol.errors import WorkerError
from tests.harness.chaos import AT_ONCE, MOST_CHUNKS, ChaosRun, ChunkCounter, FaultEffect, run_and_report
from tests.harness.random_identity import count_verdicts
from tests.harness.two_hosts import namespace
from tests.harness.two_hosts.drafter import NAME, remote_cluster, wait_for_state
from tests.harness.two_hosts.hosts import TwoHosts


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of the link between `hosts` for `seconds`, `after` this many chunks; `pulled` as in `TwoHosts.cut`."""

    hosts: TwoHosts
    seconds: float
    pulled: bool
    after: int

    def __str__(self) -> str:
        return f"{'unplugged' if self.pulled else 'cut'} for {self.seconds:g} s"

    def inject(self, client: Client, chunks: ChunkCounter) -> FaultEffect:
        chunks.wait(self.after)
        began = time.monotonic()
        self.hosts.cut(self.pulled)
        chunks.wait(1)
        pause_s = time.monotonic() - began
        time.sleep(max(self.seconds - pause_s, 0.0))
        self.hosts.heal()
        return FaultEffect(self, pause_s, wait_for_state(client, NAME, "ready"))


def report(chaos_run: ChaosRun) -> str:
    """Returns a summary with a line per kind and length of cut."""
    lines = [
        f"{len(chaos_run.effects)} cuts, {len(chaos_run.comparisons)} texts: {count_verdicts(chaos_run.comparisons)}"
    ]
    for name in sorted({str(effect.fault) for effect in chaos_run.effects}):
        times = [effect.resumed_s for effect in chaos_run.effects if str(effect.fault) == name]
        median_s = statistics.median(times)
        lines.append(f"{name}, {len(times)} times: drafter back after {median_s:.1f} s (at most {max(times):.1f} s)")
    lines.append(f"longest wait for a chunk: {max(chaos_run.waits_ms, default=0.0):.0f} ms")
    return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cuts", type=int, default=30, metavar="N", help="number of cuts (default: 30)")
    parser.add_argument("--seconds", default="0.5,1,3,7,15", metavar="S,S,...", help="lengths of cuts (0.5,1,3,7,15)")
    parser.add_argument("--rtt-ms", type=float, default=2.0, metavar="MS", help="round-trip time (default: 2)")
    parser.add_argument("--loss", type=float, default=0.01, metavar="SHARE", help="lost packets, each way (0.01)")
    parser.add_argument("--texts", type=int, default=24, metavar="N", help="different requests (default: 24)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of requests and cuts (default: 0)")


def run(options: argparse.Namespace) -> int:
    if (why := namespace.unsupported_reason()) is not None:
        raise WorkerError(f"two hosts can't be made here: {why}")
    lengths = parse_numbers("seconds", options.seconds, float)
    count = values.check_int("cuts", options.cuts, 1, 100_000)
    texts = values.check_int("texts", options.texts, AT_ONCE, 10_000)
    screen, rng = Screen(), random.Random(options.seed)
    with TwoHosts(options.seed) as hosts:
        hosts.shape(options.rtt_ms, options.loss)
        with remote_cluster(hosts, max_active=AT_ONCE) as client:
            screen.show("undisturbed texts")
            chaos_run = ChaosRun(client, texts, options.seed)
            kinds = [(length, pulled) for length in lengths for pulled in (False, True)]
            cuts = [Cut(hosts, *kinds[n % len(kinds)], rng.randint(1, MOST_CHUNKS)) for n in range(count)]
            return run_and_report(chaos_run, cuts, screen, report)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
