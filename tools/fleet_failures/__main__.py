"""Kills each part of a fleet while clients read texts, and compares the texts; measures the overhead of the ingress.

    python -m tools.fleet_failures                            # all rows, twice each, and the costs: minutes
    python -m tools.fleet_failures --rows attached,head,costs --repeats 5 --json found.json

The fleet has five simulated hosts on this machine (`ray.cluster_utils`) and serves the tiny pair: two placed engines
with drafters on other hosts, an attached one, two ingresses. Four readers (T = 0, 0.8) are in the middle of a text when
a part is killed with SIGKILL. Next token: a reader's longest wait after the kill. Errors: what readers saw before they
continued at the other ingress. Each text is compared token for token with the target's own. *costs*: the overhead of
the ingress compared with AsyncClient: how much later a chunk arrives (from a server that sends the time), and how much
longer a request takes. The exit code is 1 if a text differs or a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tools.fleet_failures import costs
from tools.fleet_failures.fleet import run_fleet
from tools.fleet_failures.hosts import run_hosts
from tools.fleet_failures.kills import ExpectedText, KillResult, kill_victim
from tools.fleet_failures.reader import WantedText
from tools.fleet_failures.report import FailureRow, make_row, table
from tools.fleet_failures.victims import VICTIMS, Victim

COSTS = "costs"
ROWS = (*(victim.name for victim in VICTIMS), COSTS)
TEMPS = (0.0, 0.8)


def add_flags(parser: argparse.ArgumentParser) -> None:
    names = f"comma-separated rows: {', '.join(ROWS)} (default: all)"
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help=names)
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="kills per row (default: 2)")
    parser.add_argument("--readers", type=int, default=4, metavar="N", help="concurrent texts (default: 4)")
    parser.add_argument("--tokens", type=int, default=224, metavar="N", help="tokens per text (default: 224)")
    parser.add_argument("--pairs", type=int, default=16, metavar="N", help="pairs of requests for costs (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")


def run(options: argparse.Namespace) -> int:
    if options.json is not None:
        ensure_writable(options.json.parent, "choose another --json")
    rows, repeats = parse_rows(options.rows), values.check_int("repeats", options.repeats, 1, 1000)
    readers, length = (
        values.check_int("readers", options.readers, 1, 16),
        values.check_int("tokens", options.tokens, 64, 600),
    )
    pairs = values.check_int("pairs", options.pairs, 2, 1000)
    screen, measured, ingress_costs = Screen(), list[FailureRow](), list[costs.Cost]()
    texts = generate_expected(readers, length, screen)
    with ExitStack() as stack:
        screen.show("starting hosts and fleet")
        five_hosts = stack.enter_context(run_hosts())
        fleet = stack.enter_context(run_fleet())
        for victim in sorted((v for v in VICTIMS if v.name in rows), key=lambda v: rows.index(v.name)):
            measured.append(
                kill_repeatedly(victim, repeats, partial(kill_victim, five_hosts, fleet, victim, texts), screen)
            )
            screen.clear()
            print(measured[-1], flush=True)
        if COSTS in rows:
            ingress_costs = costs.measure(fleet, pairs, screen)
    screen.clear()
    print("\n".join([table(measured), *(f"- {cost}" for cost in ingress_costs)]))
    if options.json is not None:
        results = {"rows": [asdict(row) for row in measured], "costs": [asdict(cost) for cost in ingress_costs]}
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any(row.missed for row in measured) or any(cost.missed for cost in ingress_costs))


def kill_repeatedly(victim: Victim, repeats: int, kill: Callable[[], KillResult], screen: Screen) -> FailureRow:
    """Kills a part `repeats` times. The row ends early if the fleet does not recover."""
    kills: list[KillResult] = []
    try:
        for number in range(repeats):
            screen.show(f"{victim.name}: {number + 1} of {repeats}")
            kills.append(kill())
    except OutriderError as error:
        return make_row(victim.name, kills, str(error))
    return make_row(victim.name, kills)


def parse_rows(names: str) -> list[str]:
    """Parses comma-separated names of rows.

    Raises:
        InvalidRequest: a row is unknown.
    """
    rows = [name.strip() for name in names.split(",")]
    for name in rows:
        if name not in ROWS:
            raise InvalidRequest(f"unknown row {name!r}; expected one of {', '.join(ROWS)}")
    return rows


def generate_expected(many: int, length: int, screen: Screen) -> list[ExpectedText]:
    """Returns `many` texts as the target generates them without a fleet."""
    wanted = [WantedText(prompt, length, TEMPS[n % len(TEMPS)], n) for n, prompt in enumerate(mixed_tokens(many))]
    texts = []
    with LocalCluster(progress=screen.show, draft_backend="none", mode="ar", memory=False) as cluster:
        for number, text in enumerate(wanted):
            screen.show(f"expected texts: {number + 1} of {many}")
            sampling = SamplingParams(max_tokens=text.length, temp=text.temp, seed=text.seed, ignore_eos=True)
            texts.append(ExpectedText(text, cluster.client().generate(text.prompt, sampling, mode="ar").token_ids))
    return texts


if __name__ == "__main__":
    raise SystemExit(run_as_program())
