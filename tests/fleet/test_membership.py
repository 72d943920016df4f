"""Hosts that don't fit the fleet, and plans that can't run, are refused with a one-line error; nothing is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.fleet.host import FleetHost, HostProcess, start_time
from outrider.orchestrator.cli import main

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(400)]
Result = tuple[int, str]


@pytest.fixture
def folder(hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the fleet's token. The environment is restored afterwards."""
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "token").chmod(0o600)
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def address(hosts: Any) -> str:
    """The head's address, in a form that does not look like loopback."""
    return str(hosts.address).replace("127.0.0.1", "0.0.0.0")


@pytest.fixture
def call(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def called(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(["fleet", *arguments, "--folder", str(folder)])
        return code, last_line(capfd.readouterr().err)

    return called


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ray.__version__", "2.1", "the head has Ray 2.60.0 and this host 2.1; expected the same on every host"),
        ("platform.python_version", lambda: "3.99.1", "and this host 3.99.1; expected the same on every host"),
        ("outrider.fleet.membership.__version__", "0.0.1", "and this host 0.0.1; expected the same on every host"),
    ],
)
def test_a_host_with_another_version_does_not_join(
    call: Callable[..., Result], address: str, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, sentence: str
) -> None:
    import outrider.fleet.membership  # noqa: F401  # imported before a version is replaced

    monkeypatch.setattr(name, value)
    code, err = call("join", address)
    assert code == 6 and sentence in err


def test_a_host_without_the_model_does_not_join(call: Callable[..., Result], address: str) -> None:
    from outrider.fleet.membership import FleetHead

    FleetHead(address).store_models(["/no/such/model"])  # as `outrider fleet run` does
    try:
        code, err = call("join", address)
        assert code == 3 and "this host lacks a model of the fleet" in err and "/no/such/model" in err
    finally:
        FleetHead(address).store_models([])


def test_a_host_with_another_token_does_not_join(folder: Path, address: str) -> None:
    (folder / "token").write_text("b" * 64)
    refused = command("join", address, "--folder", str(folder))
    last_error = last_line(refused.stderr)
    assert refused.returncode == 8 and "refuses this host's token; expected a copy of the head's own" in last_error


def test_an_address_without_a_head_is_refused(call: Callable[..., Result]) -> None:
    code, err = call("join", "0.0.0.0:1")
    assert code == 4 and "there is no head of a fleet at 0.0.0.0:1" in err and "expected the address that" in err


@pytest.fixture
def at_head(hosts: Any, folder: Path) -> Path:
    """A folder whose state says that this process has started the head."""
    own = psutil.Process()
    FleetHost(folder).keep(HostProcess(True, hosts.address, own.pid, start_time(own)))
    return folder


def test_plan_whose_needs_no_host_offers_is_refused(call: Callable[..., Result], at_head: Path) -> None:
    (at_head / "fleet.yaml").write_text("placed: {needs: {cuda: 1}}\n")
    code, err = call("run", str(at_head / "fleet.yaml"))
    assert code == 2 and "placed needs cuda 1, but no host of the fleet offers that; run" in err


def test_an_ingress_port_in_use_is_refused(at_head: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (at_head / "fleet.yaml").write_text(f"placed:\ningress: {{port: {port}}}\n")
        refused = command("run", str(at_head / "fleet.yaml"), "--folder", str(at_head))
    last_error = last_line(refused.stderr)
    assert refused.returncode == 4 and f"127.0.0.1:{port} can't be used: the port is in use" in last_error
    assert "choose another port (ingress.host, ingress.port)" in last_error


def last_line(err: str) -> str:
    """Returns the last line, the error, which follows the progress."""
    return err.splitlines()[-1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `outrider fleet` in a process of its own."""
    line = [sys.executable, "-m", "outrider", "fleet", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)
