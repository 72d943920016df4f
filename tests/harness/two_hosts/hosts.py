"""Two simulated hosts with a link: a process on one reaches the other by `ADDRESS` only.

Needs root and iproute2. The kernel's netem shapes the link if available, else a process that forwards packets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol, Self

from tests.harness.two_hosts.namespace import Namespace
from tests.harness.two_hosts.netem import Cable, has_netem
from tests.harness.two_hosts.packet_relay import PacketRelay

ADDRESS = "192.0.2.1"
_THERE = "192.0.2.2"
_NAMES = ("near0", "far0")


class Link(Protocol):
    """A link between two hosts."""

    def shape(self, delay_ms: float, loss: float) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic on the link, with IP and TCP headers, before losses."""

    bytes_there: int
    bytes_back: int
    packets: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.bytes_there - before.bytes_there,
            self.bytes_back - before.bytes_back,
            self.packets - before.packets,
        )


class TwoHosts:
    """Two hosts, `here` and `there`, as a context manager; `there` reaches `here` at `ADDRESS`.

    `namespace.unsupported_reason` returns why this machine can't create them, if so.

    Raises:
        WorkerError: the system can't create them.
    """

    def __init__(self, seed: int = 0) -> None:
        self.here, self.there = Namespace(), Namespace()
        self._shape = 0.0, 0.0
        self.by_netem = has_netem()
        self._link: Link = Cable(self.here, self.there, _NAMES) if self.by_netem else self._relay(seed)
        for host, name, address in zip((self.here, self.there), _NAMES, (ADDRESS, _THERE), strict=True):
            host.ip("address", "add", f"{address}/24", "dev", name)
            host.ip("link", "set", name, "up")

    def _relay(self, seed: int) -> PacketRelay:
        return PacketRelay(self.here, self.there, _NAMES, seed)

    def shape(self, rtt_ms: float = 0.0, loss: float = 0.0) -> None:
        """Sets the round-trip time of the link, and the share of packets that is lost in each direction."""
        self._shape = rtt_ms / 2, loss
        self._link.shape(*self._shape)

    def traffic(self) -> Traffic:
        """Returns the traffic so far."""
        there, back = (
            json.loads(host.run("ip", "-j", "-s", "link", "show", "dev", name))[0]["stats64"]["tx"]
            for host, name in ((self.here, _NAMES[0]), (self.there, _NAMES[1]))
        )
        return Traffic(there["bytes"], back["bytes"], there["packets"] + back["packets"])

    def cut(self, pulled: bool = False) -> None:
        """Cuts the link: in the middle, which neither host notices, or (`pulled`) by taking down the device of the far
        host, which notices it."""
        if pulled:
            self.there.ip("link", "set", _NAMES[1], "down")
        else:
            self._link.shape(self._shape[0], 1.0)

    def heal(self) -> None:
        """Restores the link after either cut."""
        self.there.ip("link", "set", _NAMES[1], "up")
        self._link.shape(*self._shape)

    def close(self) -> None:
        self._link.close()
        self.here.close()
        self.there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
