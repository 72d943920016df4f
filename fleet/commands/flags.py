"""What several of them are told."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.fleet.host import Host, enter
from outrider.fleet.token import checked_token, default_folder
from outrider.protocol.errors import InvalidRequest


def add_folder(parser: argparse.ArgumentParser) -> None:
    note = "where this host keeps the fleet's token and what it runs; default: ~/.config/outrider/fleet"
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help=note)


def host_of(options: argparse.Namespace) -> Host:
    """This host, as that folder knows it."""
    return Host((options.folder or default_folder()).expanduser().absolute())


def at_head(host: Host) -> str:
    """The head's address; this process may speak with it from now on.

    Raises:
        InvalidRequest: this host is none.
    """
    here = host.running()
    if here is None or not here.head:
        raise InvalidRequest(
            "this host is not the head of a fleet; expected `outrider fleet head` first, and this command there"
        )
    enter(host.environment(here.address, checked_token(host.folder)))
    return here.address
