"""Stops what `outrider fleet` started on this host: on the head the whole fleet, elsewhere this host's part.

Attached engines keep running, as do other Ray processes on this host.
"""

from __future__ import annotations

import argparse

from outrider.fleet.commands import add_folder_flag, fleet_host, require_head
from outrider.fleet.host import FleetHost, end_process
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.protocol.errors import OutriderError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_folder_flag(parser)


def run(options: argparse.Namespace) -> int:
    host, screen = fleet_host(options), Screen()
    here = host.running()
    if here is not None:
        if here.head:
            screen.show("shutting down the engines and the ingress")
            _end_engines(host)
        end_process(here, screen.show)
        screen.clear()
    host.forget()
    if here is None:
        say("No fleet runs on this host.")
    else:
        say("The fleet has ended." if here.head else "This host has left the fleet.")
    return 0


def _end_engines(host: FleetHost) -> None:
    """Shuts the engines down first if the head answers; otherwise they end with it."""
    try:
        address = require_head(host)
        from outrider.fleet.deployment import shut_down

        shut_down(address)
    except OutriderError as error:
        say(f"Note: the engines could not be shut down before the head ({error}); they end with it")
