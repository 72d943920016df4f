"""Starts the engines and the ingress that a fleet.yaml describes, on the head. Returns when all of them run.

Run it again with another file to change the fleet: what stays the same keeps running.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.fleet.commands import add_folder_flag, fleet_host, require_head
from outrider.fleet.plan import FleetPlan, read_plan
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.protocol import values

WAIT_SECONDS = 600


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a fleet.yaml (see docs/fleet.md)")
    parser.add_argument("--check", action="store_true", help="check the file and describe it, but start nothing")
    late = f"seconds to wait until all engines run; slower ones still start (default: {WAIT_SECONDS})"
    parser.add_argument("--wait", type=int, default=WAIT_SECONDS, metavar="SECONDS", help=late)
    add_folder_flag(parser)


def run(options: argparse.Namespace) -> int:
    plan = read_plan(options.file)
    wait = values.check_int("wait", options.wait, 0, 86_400)
    if options.check:
        print(describe(plan))
        return 0
    address = require_head(fleet_host(options))
    from outrider.fleet import deployment

    screen = Screen()
    urls = deployment.launch(plan, address, screen.show, wait)
    screen.clear()
    for url in urls:
        print(f"HTTP: {url}", flush=True)
    say("The fleet runs: `outrider fleet status` shows it, `outrider fleet down` ends it.")
    return 0


def describe(plan: FleetPlan) -> str:
    """Describes a plan."""
    lines = []
    if plan.placed is not None:
        many = f"{plan.placed.replicas}" if plan.scale is None else f"{plan.scale.min} to {plan.scale.max}"
        drafter = plan.placed.drafter
        lines.append(f"placed:   {many} of {plan.engine.model or 'the default model'}, each needs {plan.placed.needs}")
        lines.append(f"drafters: {drafter.on}, each needs {drafter.needs}")
    lines += [f"attached: {endpoint}" for endpoint in plan.attached]
    ingress = plan.ingress
    keys = f"API keys: {len(ingress.api_keys)}" if ingress.api_keys else "no API key"
    lines.append(f"ingress:  {ingress.count} at {ingress.host}:{ingress.port}, {keys}, {ingress.tries} tries per text")
    return "\n".join(lines)
