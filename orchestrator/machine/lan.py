"""Announces servers on the local network and finds them with zeroconf (mDNS), if the user asks for it.

Anything on the network can announce itself, so only an address is taken from an announcement: a server is accepted only
with a key that was trusted before. Knows names and addresses; opens no socket itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.protocol import version
from outrider.protocol.endpoints import Tcp, parse_endpoint
from outrider.protocol.errors import EndpointError, InvalidRequest

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_outrider._tcp.local."
SEARCH_SECONDS = 5.0
ANSWER_TIMEOUT_MS = 2000
WILDCARD_HOSTS = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class DiscoveredServer:
    """An announced server: the endpoint for workers, and the key that it claims."""

    endpoint: str
    key: str


def announce(endpoint: str, key: str) -> Zeroconf:
    """Announces the endpoint for workers; `close` of the returned object withdraws the announcement.

    Raises:
        EndpointError: the announcement can't be sent.
        InvalidRequest: zeroconf is not installed.
    """
    where = parse_endpoint(endpoint)
    if not isinstance(where, Tcp):
        raise InvalidRequest(f"{endpoint} can't be announced; expected tcp://HOST:PORT")
    version.require_extra("discovery", "finding servers")
    import psutil
    from zeroconf import NonUniqueNameException, ServiceInfo

    anywhere = where.host in WILDCARD_HOSTS
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    ipv4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
    others = [address for address in ipv4 if not address.startswith("127.")]
    own = others if anywhere else [str(socket.getaddrinfo(where.host, None)[0][4][0])]
    if not own:
        raise EndpointError(
            f"{endpoint} can't be announced: this machine has no IPv4 address but loopback; leave out --advertise"
        )
    name = f"{socket.gethostname().partition('.')[0][:40]}-{where.port}"
    about, host = {"key": key}, f"{name}.local."
    service = ServiceInfo(SERVICE, f"{name}.{SERVICE}", where.port, 0, 0, about, host, parsed_addresses=own)
    zeroconf = _open_zeroconf(None if anywhere else own)
    try:
        zeroconf.register_service(service)
    except (OSError, NonUniqueNameException) as error:
        zeroconf.close()
        raise EndpointError(f"{endpoint} can't be announced ({error!r}); leave out --advertise") from None
    return zeroconf


def find_server(trusted: Collection[str], interfaces: Sequence[str] | None = None) -> DiscoveredServer:
    """Finds the only announced server with one of the `trusted` keys.

    `interfaces`: this machine's addresses to search from; None: all.

    Raises:
        EndpointError: there is no such server, or more than one; the message lists them.
        InvalidRequest: zeroconf is not installed.
    """
    version.require_extra("discovery", "finding servers")
    announced = _discover(interfaces)
    known = [server for server in announced if server.key in trusted]
    if len(known) > 1:
        raise EndpointError(f"found several servers with trusted keys: {_format(known)}; choose one with --connect")
    if not known and announced:
        raise EndpointError(
            f"found no server with a trusted key, only {_format(announced)}; if one is yours, run `outrider keys trust"
            " HOST KEY` with the key that it prints"
        )
    if not known:
        raise EndpointError(f"found no server within {SEARCH_SECONDS:g} s; expected one started with --advertise")
    return known[0]


def _discover(interfaces: Sequence[str] | None) -> list[DiscoveredServer]:
    """Returns the announced servers that answer within a second of the first answer."""
    from zeroconf import ServiceBrowser, ServiceStateChange

    names: set[str] = set()
    answered = threading.Event()

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        (names.discard if state_change is ServiceStateChange.Removed else names.add)(name)
        answered.set()

    zeroconf = _open_zeroconf(interfaces)
    try:
        browser = ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
        if answered.wait(SEARCH_SECONDS):
            time.sleep(1.0)  # for other servers that answer the same query
        browser.cancel()
        infos = [zeroconf.get_service_info(SERVICE, name, ANSWER_TIMEOUT_MS) for name in sorted(names)]
    finally:
        zeroconf.close()
    return [server for info in infos if info is not None for server in _parse_service(info)]


def _parse_service(info: ServiceInfo) -> list[DiscoveredServer]:
    addresses = info.parsed_addresses()
    if not addresses or not info.port:
        return []
    address = min(addresses, key=lambda address: (":" in address, address.startswith("127.")))
    return [DiscoveredServer(str(Tcp(address, info.port)), (info.decoded_properties.get("key") or "")[:100])]


def _format(servers: Sequence[DiscoveredServer]) -> str:
    return ", ".join(f"{server.endpoint} (key {server.key!r})" for server in servers[:8])


def _open_zeroconf(interfaces: Sequence[str] | None) -> Zeroconf:
    from zeroconf import InterfaceChoice, Zeroconf

    try:
        return Zeroconf(interfaces=list(interfaces) if interfaces is not None else InterfaceChoice.All)
    except OSError as error:
        raise EndpointError(f"can't search the local network ({error}); give the address with --connect") from None
