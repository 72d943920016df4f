"""`outrider keys`, and other commands with missing or wrong keys: a sentence with the remedy."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from outrider.orchestrator.auth import CurveAuth
from outrider.orchestrator.cli import main
from outrider.protocol.endpoints import BoundSocket
from outrider.protocol.errors import KeyFault
from outrider.protocol.keys import DRAFTER, AllowedKey, Keyring, make_pair

KEY = make_pair().public
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command as a user without keys. A command that would replace this process is printed instead."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        print(*command)
        raise SystemExit(99)

    monkeypatch.setattr(os, "execve", execve)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_key_is_made_shown_allowed_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    code, made, err = run("keys", "make")
    assert code == 0 and str(tmp_path / "config") in err
    assert run("keys", "show") == (0, made, "")
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "config" / "outrider" / "keys").iterdir()} == {0o600}
    code, out, err = run("keys", "allow", KEY, "mini", "--as", "prefill")
    assert (code, out, err) == (0, "", "mini is allowed in the role prefill; running servers accept it at once.\n")
    assert run("keys", "allow", KEY, "mini", "--as", "drafter")[0] == 0
    assert run("keys", "allow", "--as=client", KEY, "mini")[0] == 0
    code, out, err = run("keys", "trust", "tcp://studio.local:5556", KEY)
    assert (code, out) == (0, "") and "studio.local:5556" in err
    own = made.strip()
    assert run("keys", "list")[1].splitlines() == [
        f"own      {own}",
        f"prefill  {KEY} mini",
        f"drafter  {KEY} mini",
        f"client   {KEY} mini",
        f"server   {KEY} studio.local:5556",
    ]
    code, out, err = run("keys", "revoke", "mini")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        f"mini is no longer allowed in the role {role}." for role in ("prefill", "drafter", "client")
    ]
    code, out, err = run("keys", "forget", "studio.local:5556")
    assert (code, out) == (0, "") and "no longer trusted" in err
    assert run("keys", "list")[1] == f"own      {own}\n"
    assert run("keys", "make", "--force")[1] not in (made, "")


def test_each_keys_folder_has_its_own_identity(run: Run, tmp_path: Path) -> None:
    first, second = (run("keys", "make", "--keys", str(tmp_path / name))[1] for name in "ab")
    assert first != second and run("keys", "show", "--keys", str(tmp_path / "a"))[1] == first
    assert run("keys", "show")[0] == KeyFault.exit_code


def test_recommended_command_names_the_folder(run: Run, tmp_path: Path) -> None:
    folder = ("--keys", str(tmp_path / "my keys"))
    named = f"--keys '{tmp_path / 'my keys'}'`"
    assert f"`outrider keys make {named}" in run("keys", "list", *folder)[2]
    assert f"`outrider keys make {named}" in run("keys", "show", *folder)[2]
    assert f"`outrider keys list {named}" in run("keys", "revoke", "mini", *folder)[2]
    connected = run("generate", "-p", "x", "--connect", "tcp://192.0.2.1:5", *folder)[2]
    assert f"`outrider keys trust 192.0.2.1 KEY {named}" in connected


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["keys"], 2, "required"),
        (["keys", "sign"], 2, "invalid choice"),
        (["keys", "allow", KEY], 2, "expected `outrider keys allow KEY NAME`"),
        (["keys", "allow", "x", "mini"], 8, "'x' is not a key"),
        (["keys", "allow", KEY, "my mini"], 8, "is not a valid name; expected one word"),
        (["keys", "allow", KEY, "mini", "--as", "root"], 2, "invalid choice"),
        (["keys", "revoke", "mini"], 8, "no key is called 'mini' in the role client"),
        (["keys", "forget", "studio"], 8, "no key is called 'studio' in the role server"),
        (["keys", "show"], 8, "create one with `outrider keys make`"),
        (
            ["serve", "--endpoint", "tcp://0.0.0.0:0"],
            8,
            "tcp://0.0.0.0:0 can't be served without keys: there is no key",
        ),
        (["serve", "--workers-endpoint", "tcp://*:0"], 8, "tcp://*:0 can't be served without keys: there is no key"),
        (["serve", "--endpoint", "tcp://127.0.0.1:0", "--keyed"], 8, "can't be served without keys"),
        (["generate", "-p", "x", "--connect", "tcp://192.0.2.1:5"], 8, "`outrider keys trust 192.0.2.1 KEY`"),
        (["generate", "-p", "x", "--connect", "tcp://192.0.2.1:5", "--server-key", "x"], 8, "'x' is not a key"),
        (["generate", "-p", "x", "--connect", "tcp://192.0.2.1:5", "--server-key", KEY], 8, "outrider keys make"),
        (["worker", "draft", "--connect", "tcp://192.0.2.1:5"], 8, "`outrider keys trust 192.0.2.1 KEY`"),
        (["worker", "draft", "--connect", "tcp://no-such-host.invalid:5"], 4, "the host no-such-host.invalid can't be"),
        (["generate", "-p", "x", "--connect", "tcp://no-such-host.invalid:5", "--server-key", KEY], 8, "keys make"),
    ],
)
def test_mistake_prints_one_sentence_and_exits_with_its_code(
    run: Run, arguments: list[str], code: int, words: str
) -> None:
    got, out, err = run(*arguments)
    assert (got, out) == (code, "") and words in err and len(err.splitlines()) == 1


class KeyedEndpoint:
    """The endpoint for workers of a server that requires keys."""

    def __init__(self, folder: Path, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.ring = Keyring(folder)
        self.ring.make()
        self.context: zmq.Context[Any] = zmq.Context()
        self.auth = CurveAuth(self.context, self.ring)
        self.bound = BoundSocket(self.context.socket(zmq.ROUTER), endpoint, self.auth.own, DRAFTER)

    def close(self) -> None:
        self.bound.close()
        self.auth.close()
        self.context.term()


def test_drafter_checks_its_key_with_the_server_before_loading(run: Run, tmp_path: Path, model_folder: Path) -> None:
    server = KeyedEndpoint(tmp_path / "server")
    own, join = run("keys", "make")[1].strip(), ("worker", "draft", "--connect", server.bound.endpoint)
    try:
        code, out, err = run(*join, "--server-key", server.auth.own.public)
        assert (code, out) == (8, "") and f"refuses this side's key {own}" in err
        assert "(`outrider keys allow`, with --as for a worker)" in err
        server.ring.allow(AllowedKey(DRAFTER, own, "mini"))
        code, out, err = run(*join, "--server-key", KEY)
        assert (code, out) == (8, "") and f"has a server with another key than {KEY}" in err
        code, out, err = run(*join, "--server-key", server.auth.own.public)
        assert code == 99 and f"--server-key={server.auth.own.public}" in out and "--vocabulary" in out
        run("keys", "trust", "127.0.0.1", server.auth.own.public)
        code, out, err = run(*join, "--draft-model", str(model_folder))  # which is all that the worker needs
        assert code == 99 and f"--model {model_folder}" in out
    finally:
        server.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # as the worker does once it can handle the signal


def test_drafter_without_keys_is_refused_at_a_path_before_loading(run: Run, tmp_path: Path, short: Path) -> None:
    server = KeyedEndpoint(tmp_path / "server", f"ipc://{short}/workers")
    try:
        code, out, err = run("worker", "draft", "--connect", server.bound.endpoint)
        assert (code, out) == (8, "") and "requires keys; expected --server-key" in err
    finally:
        server.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def test_client_reports_an_unknown_host(run: Run) -> None:
    run("keys", "make")
    code, out, err = run("generate", "-p", "x", "--connect", "tcp://no-such-host.invalid:5", "--server-key", KEY)
    assert (code, out) == (4, "") and "the host no-such-host.invalid can't be found" in err
