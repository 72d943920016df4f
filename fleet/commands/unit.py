"""Prints what keeps an engine up that a fleet attaches: a property list for launchd, or a unit for systemd.

Takes what `outrider serve` takes; ENDPOINT is where the fleet's gate will find it. The host needs no Ray. Nothing is
installed: where to put it is said beside it.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from dataclasses import replace
from pathlib import Path

from outrider.fleet.units import NAME, Unit
from outrider.orchestrator import settings
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.screen import say
from outrider.protocol.endpoints import Tcp, is_local, reachable
from outrider.protocol.errors import InvalidRequest

KINDS = ("launchd", "systemd")
SYSTEM = KINDS[0] if sys.platform == "darwin" else KINDS[1]


COMMON = (
    "--for", "--user", "--home", "--model", "--draft-model", "--mode", "--max-active", "--kv-memory", "--log-level",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT, an address of this host")
    keeper = f"what is to keep it up (default: {SYSTEM})"
    parser.add_argument("--for", dest="kind", choices=KINDS, default=SYSTEM, help=keeper)
    parser.add_argument("--user", default=getpass.getuser(), help="whose keys and models it uses (default: yours)")
    home = "that user's home (default: yours)"
    parser.add_argument("--home", type=Path, default=Path.home(), metavar="FOLDER", help=home)
    flags.add_request_flags(parser, ("drafter",))
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    where = reachable(options.endpoint)
    if not isinstance(where, Tcp):
        raise InvalidRequest(f"{options.endpoint} is reachable only from this host; expected tcp://HOST:PORT")
    chosen = settings.ServeSettings(**{**flags.settings_of(options), "endpoint": str(where)})
    unit = Unit(
        (sys.executable, "-m", "outrider", "serve", "--no-http", *settings.flags(_absolute(chosen))),
        options.user,
        str(options.home),
    )
    if options.kind == "launchd":
        print(unit.launchd(), end="")
        file = f"/Library/LaunchDaemons/{NAME}.plist"
        say(f"Put it at {file}, as root's own, then: sudo launchctl bootstrap system {file}")
    else:
        print(unit.systemd(), end="")
        say("Put it at /etc/systemd/system/outrider-engine.service, then: sudo systemctl enable --now outrider-engine")
    if not is_local(where):
        say("It asks for keys: here `outrider keys make`, and `outrider keys allow KEY head` with the key of the head;")
        say(f"there `outrider keys trust {where.host}:{where.port} KEY` with what `outrider keys show` says here.")
    return 0


def _absolute(chosen: settings.ServeSettings) -> settings.ServeSettings:
    """A model's folder as it is found from anywhere."""
    return replace(chosen, model=_found(chosen.model), draft_model=_found(chosen.draft_model))


def _found(name: str | None) -> str | None:
    folder = Path(name or "").expanduser()
    return str(folder.absolute()) if name and folder.exists() else name
