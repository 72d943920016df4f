"""Shows the state of the fleet's hosts, engines and ingresses; run it on the head.

For each engine it shows running and waiting requests, and its drafters with their state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from outrider.fleet.commands import add_folder_flag, fleet_host, require_head
from outrider.fleet.host import format_resources
from outrider.orchestrator.cli.terminal import say


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_folder_flag(parser)


def run(options: argparse.Namespace) -> int:
    address = require_head(fleet_host(options))
    from outrider.fleet.deployment import get_overview

    found = get_overview(address)
    if options.json:
        print(json.dumps(asdict(found)))
        return 0
    hosts = [(h.name, "alive" if h.alive else "gone", h.release, format_resources(h.offers)) for h in found.hosts]
    print(format_table(("HOST", "STATE", "OUTRIDER", "OFFERS"), hosts))
    if not found.state:
        say("No fleet runs on these hosts; `outrider fleet run fleet.yaml` starts one.")
        return 0
    engines = [
        (e.kind, e.endpoint, str(e.running), str(e.waiting), str(e.finished), str(e.tokens), e.drafters)
        for e in found.engines
    ]
    parts = [(p.name, p.state, f"{p.running} of {p.wanted}", p.message) for p in found.parts]
    if engines:
        print(f"\n{format_table(('ENGINE', 'AT', 'RUN', 'WAIT', 'DONE', 'TOKENS', 'DRAFTERS'), engines)}")
    print(f"\n{format_table(('PART', 'STATE', 'RUNNING', ''), parts)}")
    for url in found.ingresses:
        print(f"\nHTTP: {url}")
    return 0


def format_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Formats aligned columns."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(map(str.rstrip, lines))
