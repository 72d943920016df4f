"""What keeps an attached engine up on a host without Ray: launchd's property list, or systemd's unit.

Both start `outrider serve` with the machine and again whenever it ends. Knows their forms; installs nothing.
"""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from dataclasses import dataclass

NAME = "dev.outrider.engine"
AGAIN_SECONDS = 5
END_SECONDS = 40
"""More than `outrider serve` drains for."""


@dataclass(frozen=True, slots=True)
class Unit:
    """`command` as `user`, whose keys and models are below `home`."""

    command: Sequence[str]
    user: str
    home: str

    def launchd(self) -> str:
        """A daemon, since the local network is closed to agents until a person allows it (macOS 15)."""
        return plistlib.dumps(
            {
                "Label": NAME,
                "ProgramArguments": list(self.command),
                "UserName": self.user,
                "EnvironmentVariables": {"HOME": self.home},
                "WorkingDirectory": self.home,
                "RunAtLoad": True,
                "KeepAlive": True,
                "ThrottleInterval": AGAIN_SECONDS,
                "ExitTimeOut": END_SECONDS,
                "ProcessType": "Interactive",
                "StandardErrorPath": f"{self.home}/Library/Logs/outrider.log",
                "StandardOutPath": f"{self.home}/Library/Logs/outrider.log",
            },
            sort_keys=False,
        ).decode()

    def systemd(self) -> str:
        """A system unit."""
        return "\n".join(
            [
                "[Unit]",
                "Description=An engine of an Outrider fleet",
                "Wants=network-online.target",
                "After=network-online.target",
                "",
                "[Service]",
                f"ExecStart={' '.join(map(_quoted, self.command))}",
                f"User={self.user}",
                f"Environment={_quoted(f'HOME={self.home}')}",
                f"WorkingDirectory={self.home}",
                "Restart=always",
                f"RestartSec={AGAIN_SECONDS}",
                f"TimeoutStopSec={END_SECONDS}",
                "",
                "[Install]",
                "WantedBy=multi-user.target",
                "",
            ]
        )


def _quoted(word: str) -> str:
    """As systemd reads words: it expands %, $ and takes quotes and spaces for its own."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(sign.isspace() for sign in word) or "'" in word else word
