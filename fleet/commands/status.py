"""Shows the state of the fleet's hosts, engines and ingresses; run it on the head.

For each engine it shows running and waiting requests, and its drafters with their state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

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
    for rows in (found.hosts, found.engines, found.parts):
        if rows:
            print(f"{format_table(rows)}\n")
    if not found.state:
        say("No fleet runs on these hosts; `outrider fleet run fleet.yaml` starts one.")
    for url in found.ingresses:
        print(f"HTTP: {url}")
    return 0


def format_table(rows: Sequence[Any]) -> str:
    """Formats records of one class in aligned columns, whose titles are the names of its fields."""
    titles = [field.name.upper() for field in fields(rows[0])]
    table = [titles, *([_format_cell(value) for value in asdict(row).values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)
    return "\n".join(lines)


def _format_cell(value: object) -> str:
    return format_resources(value) if isinstance(value, Mapping) else str(value)
