"""`outrider fleet COMMAND`: joins hosts into a Ray cluster and runs a fleet on it (docs/fleet.md). One file per
command.

Commands import Ray only when they run, so that --help works without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from outrider.fleet.host import FleetHost, default_folder, read_token, set_ray_environment
from outrider.orchestrator import cli
from outrider.orchestrator.cli import Parser
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.version import require_extra

COMMANDS = {
    "head": "start a new fleet with this host as its head",
    "join": "join a fleet",
    "run": "start the engines and the ingress of a fleet.yaml, or change them",
    "status": "show the fleet's hosts and engines",
    "unit": "print a launchd or systemd unit for an attached engine",
    "down": "stop the fleet's processes on this host",
}
STEPS = """
Linux hosts, with Ray (pip install '.[fleet]' in a checkout):
  outrider fleet head --ip IP      on the first host, which becomes the head
  outrider fleet join IP:6379      on every other host
  outrider fleet run fleet.yaml    on the head

Macs, whose engines need no Ray:
  outrider fleet unit ENDPOINT     on every Mac; list these endpoints under
                                   `attached` in the fleet.yaml of the head
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all commands, as subcommands."""
    chosen = parser.add_subparsers(metavar="COMMAND")
    for name, what in COMMANDS.items():
        _module(name).add_flags(chosen.add_parser(name, help=what))


def main(arguments: Sequence[str]) -> int:
    """Runs a command, and returns its exit code."""
    parser = Parser(
        prog="outrider fleet",
        description="Runs engines on several hosts behind one address.",
        epilog=cli.format_commands(COMMANDS) + "\n" + STEPS,
    )
    return cli.run_group(parser, COMMANDS, _module, arguments)


def _module(command: str) -> ModuleType:
    return import_module(f"{__name__}.{command}")


def add_folder_flag(parser: argparse.ArgumentParser) -> None:
    note = "folder for the fleet's token and this host's state (default: ~/.config/outrider/fleet)"
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=note)


def fleet_host(options: argparse.Namespace) -> FleetHost:
    """Returns this host, with the state in --folder."""
    return FleetHost((options.folder or default_folder()).expanduser().absolute())


def require_head(host: FleetHost) -> str:
    """Returns the head's address, and configures Ray to connect to it.

    Raises:
        InvalidRequest: Ray is not installed, or this host is not the head.
    """
    require_extra("fleet", "a fleet")
    here = host.running()
    if here is None or not here.head:
        raise InvalidRequest("this host is not the head of a fleet; run this command on the head, or start one here")
    set_ray_environment(host.environment(here.address, read_token(host.folder)))
    return here.address
