"""Starts a new fleet in the background with this host as its head, and prints what to do on the other hosts.

The head creates the token that other hosts need. Without --ip no other host can join. `outrider fleet down` stops it. A
head that crashed restores its fleet when it is started again.
"""

from __future__ import annotations

import argparse
import sys

from outrider.fleet.commands import add_folder_flag, fleet_host
from outrider.fleet.host import (
    DEFAULT_PORT,
    check_port,
    create_token,
    host_resources,
    is_loopback,
    require_free,
)
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.protocol.version import require_extra

PLATFORM_NOTE = "Note: Ray supports several hosts on Linux only; attach Macs instead (`outrider fleet unit`)."

RESTART_NOTE = "The previous fleet restarts by itself: see `outrider fleet status` (`outrider fleet down` discards it)."


def add_flags(parser: argparse.ArgumentParser) -> None:
    where = "this host's address for other hosts, in a network that you trust (default: 127.0.0.1: none can join)"
    parser.add_argument("--ip", default="127.0.0.1", help=where)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"port (default: {DEFAULT_PORT})")
    add_folder_flag(parser)


def run(options: argparse.Namespace) -> int:
    require_extra("fleet", "a fleet")
    check_port(options.port)
    host, screen, offers = fleet_host(options), Screen(), host_resources()
    host.require_not_running()
    require_free(options.ip, options.port)
    token = create_token(host.folder)
    again = host.was_head_of(f"{options.ip}:{options.port}")
    screen.show("starting Ray")
    running = host.start_head(options.ip, options.port, offers, token)
    screen.clear()
    say(f"The head runs (process {running.pid}, log {host.log}) and offers {offers}.")
    if is_loopback(running.address):
        say("Other hosts can't join; for that, start the head with --ip and an address of this host.")
    else:
        say(f"Copy {token} to the same path on each other host, and run there:")
        print(f"outrider fleet join {running.address}", flush=True)
        if sys.platform == "darwin":
            say(PLATFORM_NOTE)
    say(RESTART_NOTE if again else "Then here: outrider fleet run fleet.yaml")
    return 0
