"""`outrider fleet` without Ray: help, one-line errors, service files, tokens, and the processes that it starts."""

from __future__ import annotations

import configparser
import os
import plistlib
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from outrider.fleet.commands import COMMANDS
from outrider.fleet.commands.status import format_table
from outrider.fleet.commands.unit import systemd_unit
from outrider.fleet.host import (
    FleetHost,
    HostProcess,
    Resources,
    create_token,
    end_process,
    is_loopback,
    read_token,
    require_free,
    start_time,
)
from outrider.orchestrator.cli import main
from outrider.protocol.errors import EndpointError, KeyFault

Run = Callable[..., tuple[int, str, str]]
SLEEP = (sys.executable, "-c", "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: calls `outrider fleet` as without Ray and with an empty home; returns code, stdout, stderr."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("outrider.protocol.version.find_spec", lambda name: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["fleet", *arguments])
        except SystemExit as finished:
            code = finished.code if isinstance(finished.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostProcess]:
    """A process with a child that outlives it, in place of Ray's."""
    monkeypatch.setattr("outrider.fleet.host.STOP_TIMEOUT_SECONDS", 0.5)
    process = subprocess.Popen(SLEEP)
    found = psutil.Process(process.pid)
    while not found.children():
        pass
    yield HostProcess(False, "192.0.2.1:6379", process.pid, start_time(found))
    for one in (*found.children(recursive=True), found) if found.is_running() else ():
        one.kill()
    process.wait()


def test_ray_is_not_imported_before_it_is_needed() -> None:
    names = ", ".join(f"outrider.fleet.commands.{name}" for name in COMMANDS)
    code = f"import sys, {names}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_works_without_ray_and_fits_80_columns(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert code == 0 and "usage: outrider fleet" in out and not err
    assert not [line for line in out.splitlines() if len(line) > 80]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["heed"], 2, "unknown command 'heed' (did you mean head?); see"),
        (["head"], 2, "pip install '.[fleet]'"),
        (["join", "192.0.2.1:6379"], 2, "pip install '.[fleet]'"),
        (["join"], 2, "required: ADDRESS"),
        (["status"], 2, "pip install '.[fleet]'"),
        (["run", "no-such.yaml"], 2, "no-such.yaml can't be read"),
        (["unit", "ipc:///tmp/x"], 2, "expected tcp://HOST:PORT"),
        (["unit", "tcp://*:7777"], 4, "is an address to listen on, not to connect to"),
        (["unit", "tcp://10.0.0.1:7777", "--max-active", "0"], 2, "max_active is 0"),
    ],
)
def test_invalid_command_line_is_a_one_line_error(run: Run, arguments: list[str], code: int, sentence: str) -> None:
    got, out, err = run(*arguments)
    assert (got, out) == (code, "") and sentence in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["head", "--port", "15000"], 2, "which Ray's workers use"),
        (["head", "--ip", "192.0.2.77"], 4, "this machine has no such address"),
        (["join", "127.0.0.1:6379"], 2, "accepts no other host"),
        (["join", "192.0.2.1:6379"], 8, "does not exist; expected a copy of the head's token"),
        (["status"], 2, "this host is not the head of a fleet"),
    ],
)
def test_invalid_input_is_refused_before_ray_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, sentence: str
) -> None:
    monkeypatch.setattr("outrider.protocol.version.find_spec", lambda name: True)
    got, out, err = run(*arguments)
    assert (got, out) == (code, "") and sentence in err and len(err.splitlines()) == 1


def test_run_check_prints_the_plan_and_starts_nothing(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("placed: {replicas: 2, needs: {metal: 1}}\nattached: [tcp://10.0.0.1:7777]\n")
    code, out, err = run("run", str(file), "--check")
    assert code == 0 and not err
    assert "2 of the default model, each needs metal 1" in out and "attached: tcp://10.0.0.1:7777" in out


def test_unit_prints_a_service_file_and_the_next_step(run: Run, tmp_path: Path) -> None:
    flags = ("--model", str(tmp_path), "--max-active", "4", "--user", "ann", "--home", "/Users/ann b")
    code, out, err = run("unit", "tcp://10.0.0.1:7777", "--for", "launchd", *flags)
    plist = plistlib.loads(out.encode())
    assert code == 0 and plist["KeepAlive"] and plist["UserName"] == "ann"
    command = plist["ProgramArguments"]
    assert command[1:6] == ["-P", "-m", "outrider", "serve", "--no-http"]
    assert {f"--model={tmp_path}", "--endpoint=tcp://10.0.0.1:7777", "--max-active=4"} == set(command[6:])
    assert "launchctl bootstrap" in err and "outrider keys trust 10.0.0.1:7777" in err
    code, out, err = run("unit", "tcp://127.0.0.1:7777", "--for", "systemd", *flags)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(out)
    assert shlex.split(unit["Service"]["ExecStart"])[1:6] == command[1:6] and unit["Service"]["Restart"] == "always"
    assert unit["Service"]["KillMode"] == "mixed"
    assert "systemctl enable" in err and "keys" not in err


def test_paths_in_a_unit_are_absolute(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("heads", "smollm2", "mtp", "coreml"):
        (tmp_path / folder).mkdir()
    flags = ["--model=smollm2", "--draft-prefill=coreml", "--head=heads", "--head=mtp", "--keys=keys", "--trace=t.json"]
    _, out, _ = run("unit", "tcp://10.0.0.1:7777", "--for", "systemd", *flags)
    for word in ("--model=smollm2 ", "--draft-prefill=coreml ", "--head=mtp "):
        assert word in out
    for flag, path in (("head", "heads"), ("keys", "keys"), ("trace", "t.json")):
        assert f"--{flag}={tmp_path}/{path}" in out


def test_unit_of_a_user_without_an_account_asks_for_user_and_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with an arbitrary user id."""
    for variable in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
    code, out, err = run("unit", "tcp://10.0.0.1:7777")
    assert (code, out) == (2, "") and "expected --user and --home" in err and len(err.splitlines()) == 1
    code, out, _ = run("unit", "tcp://10.0.0.1:7777", "--for", "systemd", "--user", "ann", "--home", "/home/ann")
    assert code == 0 and "User=ann\n" in out and "WorkingDirectory=/home/ann\n" in out
    assert run("unit", "--help")[0] == 0


def test_systemd_unit_escapes_the_words_of_its_command() -> None:
    unit = systemd_unit(("/bin/x", "100%", "a b", "$HOME", 'say "hi"'), "ann", "/home/ann")
    assert 'ExecStart=/bin/x "100%%" "a b" "$$HOME" "say \\"hi\\""\n' in unit


def test_token_file_must_be_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = create_token(tmp_path / "fleet")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(file.read_text()) == 64
    assert create_token(tmp_path / "fleet").read_text() == file.read_text(), "it is created only once"
    file.chmod(0o644)
    with pytest.raises(KeyFault, match="can be read by other users"):
        read_token(tmp_path / "fleet")
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(KeyFault, match="is empty"):
        read_token(tmp_path / "fleet")


def test_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_token(tmp_path)
    other = os.geteuid() + 1
    monkeypatch.setattr("outrider.protocol.keys.os.geteuid", lambda: other)
    with pytest.raises(KeyFault, match=r"belongs to another user; .*\(--folder sets the folder\)"):
        read_token(tmp_path)


def test_only_processes_started_here_are_ended(parent: HostProcess) -> None:
    """They are ended with all children. A process with the same id but another start time is not ended."""
    process = parent.process()
    assert process is not None
    own = process.children()
    end_process(HostProcess(parent.head, parent.address, parent.pid, parent.began - 1))
    assert process.is_running()
    end_process(parent)
    assert parent.process() is None and not psutil.wait_procs(own, 10)[1]


def test_a_process_is_known_after_the_clock_was_set(parent: HostProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    after = psutil.boot_time() + 3600
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: after)  # type: ignore[attr-defined]
    assert parent.process() is not None


def test_running_process_is_found_and_ended_by_a_later_command(parent: HostProcess, tmp_path: Path, run: Run) -> None:
    host = FleetHost(tmp_path)
    assert host.running() is None
    host.keep(parent)
    assert host.running() == parent
    _, _, err = run("down", "--folder", str(tmp_path))
    assert "This host has left the fleet." in err and host.running() is None and parent.process() is None
    assert "No fleet runs on this host." in run("down", "--folder", str(tmp_path))[2]


def test_head_and_join_are_refused_on_a_host_with_a_running_head(
    parent: HostProcess, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.protocol.version.find_spec", lambda name: True)
    FleetHost(tmp_path).keep(replace(parent, head=True))
    for command in (("head", "--port", "7001"), ("join", "192.0.2.9:6379")):
        code, _, err = run(*command, "--folder", str(tmp_path))
        assert code == 2 and f"this host is already the head of the fleet at {parent.address}" in err
        assert "run `outrider fleet down` first" in err and len(err.splitlines()) == 1


def test_ray_is_private_sends_no_statistics_and_keeps_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, started = FleetHost(tmp_path), list[list[str]]()
    monkeypatch.setattr(FleetHost, "_start", lambda _, head, address, line, *more: started.append(line))
    host.start_head("10.0.0.1", 6379, Resources(), tmp_path / "token")
    assert {"--dashboard-host=127.0.0.1", "--disable-usage-stats"} <= set(started[0])
    environment = host.environment("10.0.0.1:6379", tmp_path / "token")
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", str(tmp_path / "token"))
    assert (environment["RAY_gcs_storage"], environment["RAY_USAGE_STATS_ENABLED"]) == ("rocksdb", "0")
    assert stat.S_IMODE(Path(environment["RAY_gcs_storage_path"]).stat().st_mode) == 0o700


def test_only_a_restarted_head_at_the_same_address_keeps_its_state(
    parent: HostProcess, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, state_file = FleetHost(tmp_path), tmp_path / "gcs" / "known"
    monkeypatch.setattr(FleetHost, "_start", lambda *_: parent)

    def is_state_kept(ip: str, begun_at: str = "192.0.2.1:6379") -> bool:
        state_file.parent.mkdir(exist_ok=True)
        state_file.touch()
        host.keep(replace(parent, head=True, address=begun_at, began=0))  # it has ended
        host.start_head(ip, 6379, Resources(), tmp_path / "token")
        return state_file.exists()

    assert is_state_kept("192.0.2.1") and not is_state_kept("192.0.2.2")
    assert state_file.parent.is_dir() and not is_state_kept("192.0.2.1", "192.0.2.1:7000")
    host.keep(replace(parent, head=True, began=0))
    run("down", "--folder", str(tmp_path))
    assert not state_file.parent.exists() and not host.was_head_of("192.0.2.1:6379")


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=f"{port} can.t be used: the port is in use"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_loopback_addresses_are_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1:6379", "localhost:6379", "[::1]:6379")))
    assert not any(map(is_loopback, ("10.0.0.1:6379", "studio:6379")))


@dataclass
class Host:
    name: str
    alive: bool
    offers: dict[str, float]


def test_table_has_a_column_for_each_field_that_fits_its_content() -> None:
    rows = [Host("long", True, {"cpu": 2, "metal": 0}), Host("y", False, {})]
    assert format_table(rows) == "NAME  ALIVE  OFFERS\nlong  True   cpu 2\ny     False  nothing"
