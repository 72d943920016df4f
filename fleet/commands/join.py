"""Joins the fleet whose head is at ADDRESS, in the background, with all of this host's resources.

The host needs the head's token and the same versions of Ray, Python and Outrider. `outrider fleet down` leaves the
fleet.
"""

from __future__ import annotations

import argparse
import sys

from outrider.fleet.commands import add_folder_flag, fleet_host
from outrider.fleet.commands.head import PLATFORM_NOTE
from outrider.fleet.host import host_resources, is_loopback, read_token, set_ray_environment
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.version import require_extra


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", help="IP:PORT, as `outrider fleet head` printed it")
    parser.add_argument("--ip", help="this host's address for other hosts (default: detected by Ray)")
    add_folder_flag(parser)


def run(options: argparse.Namespace) -> int:
    require_extra("fleet", "a fleet")
    host, screen, offers = fleet_host(options), Screen(), host_resources()
    if is_loopback(options.address):
        raise InvalidRequest(
            f"a head at {options.address} accepts no other host; expected one started by `outrider fleet head --ip`"
        )
    host.require_not_running()
    token = read_token(host.folder)
    set_ray_environment(host.environment(options.address, token))
    from outrider.fleet.membership import FleetHead, check_models

    screen.show(f"asking the head at {options.address}")
    head = FleetHead(options.address)
    head.check_versions()
    models = head.models()
    check_models(models)
    screen.show("starting Ray")
    running = host.start_member(options.address, options.ip, offers, token)
    screen.clear()
    say(f"This host has joined (process {running.pid}, log {host.log}) and offers {offers}.")
    say(f"Models: {', '.join(models)}." if models else "No model was checked, because the fleet has named none.")
    if sys.platform == "darwin":
        say(PLATFORM_NOTE)
    return 0
