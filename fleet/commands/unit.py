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
from dataclasses import replace
from pathlib import Path

from outrider.orchestrator import settings
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import say
from outrider.protocol.endpoints import Tcp, is_local, reachable
from outrider.protocol.errors import InvalidRequest

NAME = "dev.outrider.engine"
AGAIN_SECONDS = 5
END_SECONDS = 40
"""Longer than `outrider serve` drains."""


def launchd(command: Sequence[str], user: str, home: str) -> str:
    """Returns the property list of a daemon that runs `command` as `user`, whose keys and models are in `home`. From
    macOS 15 on, agents have no access to the local network until a person allows it."""
    return plistlib.dumps(
        {
            "Label": NAME,
            "ProgramArguments": list(command),
            "UserName": user,
            "EnvironmentVariables": {"HOME": home},
            "WorkingDirectory": home,
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": AGAIN_SECONDS,
            "ExitTimeOut": END_SECONDS,
            "ProcessType": "Interactive",
            "StandardErrorPath": f"{home}/Library/Logs/outrider.log",
            "StandardOutPath": f"{home}/Library/Logs/outrider.log",
        },
        sort_keys=False,
    ).decode()


def systemd(command: Sequence[str], user: str, home: str) -> str:
    """Returns the system unit of the same."""
    return f"""[Unit]
Description=An engine of an Outrider fleet
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={" ".join(map(_quoted, command))}
User={user}
Environment={_quoted(f"HOME={home}")}
WorkingDirectory={home}
Restart=always
RestartSec={AGAIN_SECONDS}
TimeoutStopSec={END_SECONDS}

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """Quotes a word for systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(sign.isspace() for sign in word) or "'" in word else word


KINDS = ("launchd", "systemd")
SYSTEM = KINDS[0] if sys.platform == "darwin" else KINDS[1]


COMMON = (
    "--for", "--user", "--home", "--model", "--draft-model", "--mode", "--max-active", "--kv-memory", "--log-level",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT, an address of this host")
    keeper = f"service manager (default: {SYSTEM})"
    parser.add_argument("--for", dest="kind", choices=KINDS, default=SYSTEM, help=keeper)
    parser.add_argument("--user", default=getpass.getuser(), help="user with the keys and models (default: you)")
    home = "home directory of that user (default: yours)"
    parser.add_argument("--home", type=Path, default=Path.home(), metavar="FOLDER", help=home)
    flags.add_request_flags(parser, ("drafter",))
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    where = reachable(options.endpoint)
    if not isinstance(where, Tcp):
        raise InvalidRequest(f"{options.endpoint} is reachable only from this host; expected tcp://HOST:PORT")
    chosen = settings.ServeSettings(**{**flags.settings_of(options), "endpoint": str(where)})
    chosen = replace(chosen, model=_absolute(chosen.model), draft_model=_absolute(chosen.draft_model))
    command = (sys.executable, "-m", "outrider", "serve", "--no-http", *settings.flags(chosen))
    unit = (command, options.user, str(options.home))
    if options.kind == "launchd":
        print(launchd(*unit), end="")
        file = f"/Library/LaunchDaemons/{NAME}.plist"
        say(f"Put it at {file}, owned by root, then: sudo launchctl bootstrap system {file}")
    else:
        print(systemd(*unit), end="")
        say("Put it at /etc/systemd/system/outrider-engine.service, then: sudo systemctl enable --now outrider-engine")
    if not is_local(where):
        say("It requires keys: here run `outrider keys make` and `outrider keys allow KEY head` with the head's key;")
        say(f"on the head `outrider keys trust {where.host}:{where.port} KEY` with the key of this host.")
    return 0


def _absolute(name: str | None) -> str | None:
    """Makes a model's path absolute; other names stay."""
    folder = Path(name or "").expanduser()
    return str(folder.absolute()) if name and folder.exists() else name
