"""Prints a launchd property list or a systemd unit that keeps an attached engine running.

It takes the flags of `outrider serve`. ENDPOINT is the address at which the ingress reaches the engine. The host needs
no Ray. Nothing is installed; the command prints where to put the file.
"""

from __future__ import annotations

import argparse
import getpass
import plistlib
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.fleet.plan import make_paths_absolute
from outrider.orchestrator import settings
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import say
from outrider.orchestrator.machine.spawn import python
from outrider.protocol.endpoints import Tcp, is_local, parse_reachable
from outrider.protocol.errors import InvalidRequest

SERVICE_NAME = "dev.outrider.engine"
RESTART_DELAY_SECONDS = 5
STOP_TIMEOUT_SECONDS = 40
"""Longer than `outrider serve` takes to drain."""

SERVICE_MANAGERS = ("launchd", "systemd")
DEFAULT_MANAGER = SERVICE_MANAGERS[0] if sys.platform == "darwin" else SERVICE_MANAGERS[1]
COMMON = (
    "--for", "--user", "--home", "--model", "--draft-model", "--mode", "--max-active", "--kv-memory", "--log-level",
)  # fmt: skip


def launchd_plist(command: Sequence[str], user: str, home: str) -> str:
    """Returns the property list of a daemon that runs `command` as `user`, whose keys and models are in `home`. From
    macOS 15 on, agents have no access to the local network until a person allows it."""
    return plistlib.dumps(
        {
            "Label": SERVICE_NAME,
            "ProgramArguments": list(command),
            "UserName": user,
            "EnvironmentVariables": {"HOME": home},
            "WorkingDirectory": home,
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": RESTART_DELAY_SECONDS,
            "ExitTimeOut": STOP_TIMEOUT_SECONDS,
            "ProcessType": "Interactive",
            "StandardErrorPath": f"{home}/Library/Logs/outrider.log",
            "StandardOutPath": f"{home}/Library/Logs/outrider.log",
        },
        sort_keys=False,
    ).decode()


def systemd_unit(command: Sequence[str], user: str, home: str) -> str:
    """Returns a systemd unit that does the same as the property list of `launchd_plist`. KillMode: SIGTERM ends the
    server only, because it needs its workers until it has drained."""
    return f"""[Unit]
Description=An engine of an Outrider fleet
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={" ".join(map(_quote, command))}
User={user}
Environment={_quote(f"HOME={home}")}
WorkingDirectory={home}
KillMode=mixed
Restart=always
RestartSec={RESTART_DELAY_SECONDS}
TimeoutStopSec={STOP_TIMEOUT_SECONDS}

[Install]
WantedBy=multi-user.target
"""


def _quote(word: str) -> str:
    """Quotes a word for systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(sign.isspace() for sign in word) or "'" in word else word


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT, an address of this host")
    keeper = f"service manager (default: {DEFAULT_MANAGER})"
    parser.add_argument("--for", dest="kind", choices=SERVICE_MANAGERS, default=DEFAULT_MANAGER, help=keeper)
    parser.add_argument("--user", help="user with the keys and models (default: you)")
    home = "home directory of that user (default: yours)"
    parser.add_argument("--home", type=Path, metavar="FOLDER", help=home)
    flags.add_request_flags(parser, ("drafter",))
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    where = parse_reachable(options.endpoint)
    if not isinstance(where, Tcp):
        raise InvalidRequest(f"{options.endpoint} is reachable only from this host; expected tcp://HOST:PORT")
    chosen = settings.ServeSettings(**{**flags.settings_of(options), "endpoint": str(where)})
    command = python("-m", "outrider", "serve", "--no-http", *settings.to_flags(make_paths_absolute(chosen)))
    try:
        unit = (command, options.user or getpass.getuser(), str(options.home or Path.home()))
    except (KeyError, OSError, RuntimeError):  # what `getpass` raises depends on Python's version
        raise InvalidRequest("the current user has no account here; expected --user and --home") from None
    if options.kind == "launchd":
        print(launchd_plist(*unit), end="")
        file = f"/Library/LaunchDaemons/{SERVICE_NAME}.plist"
        say(f"Save it as {file}, owned by root, then: sudo launchctl bootstrap system {file}")
    else:
        print(systemd_unit(*unit), end="")
        say("Save it as /etc/systemd/system/outrider-engine.service, then: sudo systemctl enable --now outrider-engine")
    if not is_local(where):
        say("Clients need keys: here run `outrider keys make` and `outrider keys allow KEY head` with the head's key;")
        say(f"on the head run `outrider keys trust {where.host}:{where.port} KEY` with this host's key.")
    return 0
