"""What `auto` costs while a fresh server learns: its first requests against each mode on a server that has learned.

    python -m outrider.bench.first_requests                    # ten requests to 3 fresh servers, T = 0 and 0.8: minutes
    python -m outrider.bench.first_requests --servers 8 --temps 0

Each request goes to the fresh server in auto and to the other one in AR, SD and SSD, in turns; the fresh one knows
nothing of servers before it. The exit code is 1 when auto brings less than --least of the best mode.
"""

from __future__ import annotations

import argparse

from outrider.bench.commands.lists import numbers
from outrider.bench.contest.contest import Contestant, Ours, compete
from outrider.bench.contest.statistics import Timed, ratio, total_rate
from outrider.bench.embedded import mixed_tokens
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.sampling import SamplingParams

FIXED = ("ar", "sd", "ssd")
WARM_UP = 4

Times = dict[str, list[Timed]]


def first_requests(learned: Client, prompts: list[tuple[int, ...]], sampling: SamplingParams, screen: Screen) -> Times:
    """The times of one fresh server's first requests, and of the same in each mode; by mode."""
    with LocalCluster(progress=screen.show, memory=False) as fresh:
        ways: list[Contestant] = [Ours(mode, learned, mode) for mode in FIXED]
        runs = compete([Ours("auto", fresh.client(), "auto"), *ways], prompts, sampling, screen.show)
    return {mode: [run.timed for run in found] for mode, found in runs.items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, default=3, help="fresh servers at each temperature, default 3")
    parser.add_argument("--requests", type=int, default=10, help="to each of them, all classes in turn; default 10")
    parser.add_argument("--tokens", type=int, default=96, help="of each text, default 96")
    parser.add_argument("--temps", default="0,0.8", help="with commas between")
    parser.add_argument("--least", type=float, default=0.95, help="what auto must bring of the best mode")


def run(options: argparse.Namespace) -> int:
    screen, missed = Screen(), False
    prompts = mixed_tokens(options.requests)
    with LocalCluster(progress=screen.show, memory=False) as cluster:
        learned = cluster.client()
        for temp in numbers("temps", options.temps, float):
            sampling = SamplingParams(max_tokens=options.tokens, temp=temp, ignore_eos=True)
            compete([Ours(mode, learned, mode) for mode in FIXED], prompts[:WARM_UP], sampling, screen.show)
            servers = [first_requests(learned, prompts, sampling, screen) for _ in range(options.servers)]
            times = {mode: [timed for found in servers for timed in found[mode]] for mode in servers[0]}
            best = max(FIXED, key=lambda mode: total_rate(times[mode]))
            found = ratio(times["auto"], times[best])
            each = ", ".join(f"{ratio(one['auto'], one[best]).value:.2f}" for one in servers)
            screen.clear()
            print(f"T = {temp:g}: auto / {best} {found}; server by server {each}", flush=True)
            missed |= found.value < options.least
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
