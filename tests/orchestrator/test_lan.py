"""Servers are discovered on the network only by a trusted key."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from outrider.orchestrator.machine import lan
from outrider.orchestrator.machine.lan import DiscoveredServer, find_server
from outrider.protocol import version
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.keys import make_pair

pytest.importorskip("zeroconf")

OWN, OTHER = make_pair().public, make_pair().public
HERE = ("127.0.0.1",)


@pytest.fixture(scope="module")
def announced() -> Iterator[None]:
    try:
        announcement = lan.announce("tcp://127.0.0.1:45556", OWN)
    except EndpointError as error:
        pytest.skip(f"this machine has no multicast on loopback: {error}")
    yield
    announcement.close()


@pytest.mark.usefixtures("announced")
def test_server_is_discovered_only_by_a_trusted_key() -> None:
    assert find_server({OWN, OTHER}, interfaces=HERE) == DiscoveredServer("tcp://127.0.0.1:45556", OWN)
    with pytest.raises(EndpointError, match=r"found no server with a trusted key, only tcp://127.0.0.1:45556"):
        find_server({OTHER}, interfaces=HERE)


def fake_discovery(monkeypatch: pytest.MonkeyPatch, *found: DiscoveredServer) -> None:
    monkeypatch.setattr(lan, "_discover", lambda interfaces: list(found))


def test_discovery_failures_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_discovery(monkeypatch)
    with pytest.raises(EndpointError, match=r"found no server within .* --advertise"):
        find_server({OWN})
    fake_discovery(monkeypatch, DiscoveredServer("tcp://10.0.0.1:1", OWN), DiscoveredServer("tcp://10.0.0.2:1", OTHER))
    with pytest.raises(EndpointError, match=r"found several servers .* tcp://10.0.0.1:1 .* choose one with --connect"):
        find_server({OWN, OTHER})


def test_missing_zeroconf_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(version.EXTRA_MODULES, "discovery", ("no_zeroconf",))
    for use in (lambda: find_server({OWN}), lambda: lan.announce("tcp://127.0.0.1:1", OWN)):
        with pytest.raises(InvalidRequest, match=r"run pip install '\.\[discovery\]'"):
            use()


def test_ipc_endpoint_is_not_announced() -> None:
    with pytest.raises(InvalidRequest, match="expected tcp://HOST:PORT"):
        lan.announce("ipc:///tmp/x", OWN)


def test_a_machine_without_a_network_can_not_be_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [loopback]})
    with pytest.raises(EndpointError, match=r"no IPv4 address but loopback; leave out"):
        lan.announce("tcp://*:45557", OWN)
