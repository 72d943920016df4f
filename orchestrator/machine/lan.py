"""Servers that are announced on the local network, and how to find one: zeroconf (mDNS), where it is requested.

Anybody on the network can announce anything, so what is found is an address and nothing more: a server is accepted only
by a key that was trusted before. Knows names and addresses; opens no socket of ours.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from outrider.protocol import version
from outrider.protocol.endpoints import Tcp, parse
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_outrider._tcp.local."
SECONDS = 5.0
ANSWER_MS = 2000
ANYWHERE = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class DiscoveredServer:
    """A server that somebody announces: where drafters join it, the key it says it has, and its protocol version."""

    endpoint: str
    key: str
    version: str


class Beacon:
    """Announces the endpoint where drafters join, from creation to `close`.

    Raises:
        EndpointError: the network takes no announcement.
        InvalidRequest: zeroconf is not installed.
    """

    def __init__(self, endpoint: str, key: str) -> None:
        where = parse(endpoint)
        if not isinstance(where, Tcp):
            raise InvalidRequest(f"{endpoint} can't be announced; expected tcp://HOST:PORT")
        version.require("discovery", "finding servers")
        from zeroconf import NonUniqueNameException, ServiceInfo

        own = _own_addresses() if where.host in ANYWHERE else [_address_of(where.host)]
        name = f"{socket.gethostname().partition('.')[0][:40]}-{where.port}"
        about = {"key": key, "protocol": str(PROTOCOL_VERSION)}
        self._zeroconf = _opened(None if where.host in ANYWHERE else own)
        try:
            self._zeroconf.register_service(
                ServiceInfo(
                    SERVICE, f"{name}.{SERVICE}", where.port, 0, 0, about, f"{name}.local.", parsed_addresses=own
                )
            )
        except (OSError, NonUniqueNameException) as error:
            self._zeroconf.close()
            raise EndpointError(f"{endpoint} can't be announced ({error!r}); leave out --advertise") from None

    def close(self) -> None:
        """Takes the announcement back."""
        self._zeroconf.close()


def find(
    trusted: Collection[str], seconds: float = SECONDS, interfaces: Sequence[str] | None = None
) -> DiscoveredServer:
    """The one server here whose key is among the `trusted`. `interfaces`: own addresses to look from; None: all.

    Raises:
        EndpointError: there is none, or more than one; the message tells which there are.
        InvalidRequest: zeroconf is not installed.
    """
    version.require("discovery", "finding servers")
    found = _announced(seconds, interfaces)
    known = [one for one in found if one.key in trusted]
    if len(known) > 1:
        raise EndpointError(f"found several servers with trusted keys: {_listed(known)}; choose one with --connect")
    if not known and found:
        raise EndpointError(
            f"no server is here whose key is known, only {_listed(found)}; if one is yours,"
            " `outrider keys trust HOST KEY` with the key that it prints itself"
        )
    if not known:
        raise EndpointError(f"no server is announced here within {seconds:g} s; expected `outrider serve --advertise`")
    if known[0].version != str(PROTOCOL_VERSION):
        raise EndpointError(
            f"the server at {known[0].endpoint} speaks protocol version {known[0].version}, this side version"
            f" {PROTOCOL_VERSION}; run the same release of outrider on both"
        )
    return known[0]


def _announced(seconds: float, interfaces: Sequence[str] | None) -> list[DiscoveredServer]:
    """All that is announced: whoever is quick, and the others until the time is over."""
    from zeroconf import ServiceBrowser, ServiceStateChange

    names: set[str] = set()
    heard = threading.Event()

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        (names.discard if state_change is ServiceStateChange.Removed else names.add)(name)
        heard.set()

    zeroconf = _opened(interfaces)
    try:
        browser = ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
        if heard.wait(seconds):
            threading.Event().wait(min(1.0, seconds))  # for others that answer the same question
        browser.cancel()
        told = [zeroconf.get_service_info(SERVICE, name, ANSWER_MS) for name in sorted(names)]
    finally:
        zeroconf.close()
    return [one for info in told if info is not None for one in _read(info)]


def _read(info: ServiceInfo) -> list[DiscoveredServer]:
    about = {name: value or "" for name, value in info.decoded_properties.items()}
    addresses = info.parsed_addresses()
    if not addresses or not info.port:
        return []
    address = min(addresses, key=lambda one: (":" in one, one.startswith("127.")))
    return [DiscoveredServer(str(Tcp(address, info.port)), about.get("key", "")[:100], about.get("protocol", "")[:20])]


def _own_addresses() -> list[str]:
    every = [one for many in psutil.net_if_addrs().values() for one in many if one.family == socket.AF_INET]
    return [one.address for one in every if not one.address.startswith("127.")]


def _address_of(host: str) -> str:
    return str(socket.getaddrinfo(host, None)[0][4][0])


def _listed(found: Sequence[DiscoveredServer]) -> str:
    return ", ".join(f"{one.endpoint} (key {one.key!r})" for one in found[:8])


def _opened(interfaces: Sequence[str] | None) -> Zeroconf:
    from zeroconf import InterfaceChoice, Zeroconf

    try:
        return Zeroconf(interfaces=list(interfaces) if interfaces is not None else InterfaceChoice.All)
    except OSError as error:
        raise EndpointError(f"can't search the local network ({error}); give the address with --connect") from None
