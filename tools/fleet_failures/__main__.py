"""Kills each part of a fleet under its readers: is the text the same, how long do they wait? And what the gate costs.

    python -m tools.fleet_failures                            # all rows, twice each, and the costs: minutes
    python -m tools.fleet_failures --rows attached,head,costs --repeats 5 --json found.json

Five fake hosts on this machine (`ray.cluster_utils`), the embedded pair: two placed engines with drafters on other
hosts, one attached, two gates. Four readers (T = 0, 0.8) in the middle of a text of the engine that is struck with
SIGKILL. Next token: the longest wait of a reader after the blow. Errors: what readers saw, who then ask the other gate
with what they have. Each text is compared, token for token, with what the target says alone. *costs*: how much later
a chunk comes by the gate than by AsyncClient, from a server that says when it sent it; and whole requests by both, in
turns. The exit code is 1 where a text differs or what was asked is missed.
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
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tools.fleet_failures import costs
from tools.fleet_failures.fleet import running
from tools.fleet_failures.hosts import hosts
from tools.fleet_failures.reader import Wanted
from tools.fleet_failures.report import FailureRow, row, table
from tools.fleet_failures.rows import ExpectedText, Struck, strike
from tools.fleet_failures.victims import PROXY, VICTIMS, Victim

COSTS = "costs"
ROWS = (*(victim.name for victim in VICTIMS), PROXY, COSTS)
TEMPS = (0.0, 0.8)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help=f"of {', '.join(ROWS)}; default all")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="blows of each row, default 2")
    parser.add_argument("--readers", type=int, default=4, metavar="N", help="texts under way, default 4")
    parser.add_argument("--tokens", type=int, default=224, metavar="N", help="of each text, default 224")
    parser.add_argument("--pairs", type=int, default=16, metavar="N", help="of requests for the costs, default 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here, too")


def run(options: argparse.Namespace) -> int:
    rows, repeats = chosen(options.rows), values.whole("repeats", options.repeats, 1, 1000)
    readers, length = values.whole("readers", options.readers, 1, 16), values.whole("tokens", options.tokens, 64, 600)
    pairs = values.whole("pairs", options.pairs, 2, 1000)
    screen, found, told = Screen(), list[FailureRow](), list[costs.Cost]()
    texts = plain(readers, length, screen)
    with ExitStack() as stack:
        screen.show("hosts and fleet are starting")
        there = stack.enter_context(hosts())
        fleet = stack.enter_context(running())
        for victim in sorted((one for one in VICTIMS if one.name in rows), key=lambda one: rows.index(one.name)):
            found.append(struck(victim, repeats, partial(strike, there, fleet, victim, texts), screen))
            screen.clear()
            print(found[-1], flush=True)
        if COSTS in rows:
            told = costs.found(fleet, pairs, screen)
    screen.clear()
    print("\n".join([table(found, PROXY in rows), *(f"- {one}" for one in told)]))
    if options.json is not None:
        what = {"rows": [asdict(one) for one in found], "costs": [asdict(one) for one in told]}
        options.json.write_text(json.dumps(what, indent=1), encoding="utf-8")
    return int(any(one.missed for one in found) or any(one.missed for one in told))


def struck(victim: Victim, repeats: int, blow: Callable[[], Struck], screen: Screen) -> FailureRow:
    """So many blows; with the first that the fleet does not come back from the row ends, and the others go on."""
    blows: list[Struck] = []
    try:
        for number in range(repeats):
            screen.show(f"{victim.name}: {number + 1} of {repeats}")
            blows.append(blow())
    except OutriderError as error:
        return row(victim.name, blows, str(error))
    return row(victim.name, blows)


def chosen(names: str) -> list[str]:
    """
    Raises:
        InvalidRequest: there is no such row.
    """
    rows = [name.strip() for name in names.split(",")]
    for name in rows:
        if name not in ROWS:
            raise InvalidRequest(f"there is no row {name!r}; expected {', '.join(ROWS)}")
    return rows


def plain(many: int, length: int, screen: Screen) -> list[ExpectedText]:
    """So many texts as the target says them alone."""
    wanted = [Wanted(prompt, length, TEMPS[n % len(TEMPS)], n) for n, prompt in enumerate(mixed_tokens(many))]
    texts = []
    with LocalCluster(progress=screen.show, draft_backend="none", mode="ar", memory=False) as cluster:
        for number, one in enumerate(wanted):
            screen.show(f"alone: {number + 1} of {many}")
            sampling = SamplingParams(max_tokens=one.length, temp=one.temp, seed=one.seed, ignore_eos=True)
            texts.append(ExpectedText(one, cluster.client().generate(one.prompt, sampling, mode="ar").token_ids))
    return texts


if __name__ == "__main__":
    raise SystemExit(run_as_program())
