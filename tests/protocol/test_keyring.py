"""A folder of keys belongs to its owner only: one that others could read or write is refused."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from outrider.protocol import keys
from outrider.protocol.endpoints import find_client_keys
from outrider.protocol.errors import EndpointError, KeyFault
from outrider.protocol.keys import (
    CLIENT,
    DRAFTER,
    SERVER,
    AllowedKey,
    ClientKeys,
    Keyring,
    default_folder,
    derive_pair,
    from_zmq,
    key_bytes,
    make_pair,
    parse_key,
)

FAR = "tcp://studio.local:5556"
KEY = "obJWyamd5TelGcsQ+fdYrs7hj+eDvWso+4Z8WFyozGE="  # fixed, because ids of test cases contain it


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    made = Keyring(tmp_path / "deep" / "keys")
    made.make()
    return made


def secret(ring: Keyring) -> Path:
    return ring.folder / "secret"


def test_key_is_zeromqs_key_in_44_shell_safe_characters() -> None:
    public, hidden = zmq.curve_keypair()
    pair = derive_pair(from_zmq(hidden))
    assert pair.public == from_zmq(public) and key_bytes(pair.public) == z85.decode(public)
    assert len(pair.public) == 44 and set(pair.public) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/="
    )
    assert parse_key(f" {pair.public}\n") == pair.public
    assert pair.secret not in repr(pair) and pair.secret not in repr(ClientKeys(pair, pair.public))


@pytest.mark.parametrize("text", ["", "x", KEY[:-1], KEY + "=", KEY[:-4], "é" * 44, KEY.replace("=", "!"), KEY * 2])
def test_invalid_key_is_refused(text: str) -> None:
    with pytest.raises(KeyFault, match="is not a key; expected 44 characters"):
        parse_key(text)


def test_key_files_are_private_and_not_overwritten_without_force(ring: Keyring) -> None:
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret(ring).stat().st_mode) == 0o600
    before = ring.own()
    with pytest.raises(KeyFault, match="already has a key; --force"):
        ring.make()
    assert ring.own() == before != ring.make(overwrite=True)
    assert [path.name for path in ring.folder.iterdir()] == ["secret"]


def test_key_files_are_private_under_an_open_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Keyring(tmp_path / "k").make()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "k", tmp_path / "k" / "secret")} == {0o700, 0o600}


def test_missing_own_key_error_names_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(KeyFault, match=r"there is no key in .*; create one with `outrider keys make --keys "):
        Keyring(tmp_path / "none").own()


def test_folder_of_keys_that_is_a_file_keeps_its_mode(tmp_path: Path) -> None:
    """The error must not advise `chmod 700` for a file such as /etc/passwd."""
    file = tmp_path / "passwd"
    file.touch(0o644)
    with pytest.raises(KeyFault, match="Not a directory"):
        Keyring(file).allowed()


def test_folder_that_cannot_be_looked_up_is_refused(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / ("x" * 300))
    assert not ring.has_own
    with pytest.raises(KeyFault, match="File name too long"):
        ring.make()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o644])
def test_keys_accessible_to_others_are_refused_with_the_remedy(ring: Keyring, mode: int) -> None:
    secret(ring).chmod(mode)
    with pytest.raises(KeyFault, match=rf"can be read by other users \(mode {mode:o}\); run `chmod 600 "):
        ring.own()
    secret(ring).chmod(0o600)
    ring.folder.chmod(0o755)
    with pytest.raises(KeyFault, match=f"run `chmod 700 {ring.folder}`"):
        ring.own()
    with pytest.raises(KeyFault, match="chmod 700"):
        ring.allow(AllowedKey(CLIENT, KEY, "n"))


def test_keys_of_another_user_are_refused(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.os, "geteuid", lambda: os.getuid() + 4711)
    with pytest.raises(KeyFault, match="belongs to another user"):
        ring.own()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff\xfe", b"%s\n%s" % (KEY.encode(), KEY.encode())])
def test_invalid_secret_file_error_does_not_reveal_its_content(ring: Keyring, content: bytes) -> None:
    secret(ring).write_bytes(content)
    with pytest.raises(KeyFault) as refused:
        ring.own()
    assert str(ring.folder) in str(refused.value) and KEY not in str(refused.value)


@pytest.mark.parametrize("line", ["client", "guest KEY n", "client x n", f"{KEY} laptop", "server x h", "# a note"])
def test_invalid_line_of_the_allowed_list_is_refused(ring: Keyring, line: str) -> None:
    ring.allow(AllowedKey(CLIENT, KEY, "laptop"))
    with ring.allowed_file.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(KeyFault, match="expected"):
        ring.allowed()


def test_allowed_keys_are_added_renamed_and_revoked(ring: Keyring) -> None:
    other = make_pair().public
    ring.allow(AllowedKey(CLIENT, KEY, "laptop"))
    ring.allow(AllowedKey(DRAFTER, KEY, "laptop"))
    ring.allow(AllowedKey(DRAFTER, other, "mini"))
    ring.allow(AllowedKey(DRAFTER, other, "mini-2"))
    assert ring.allowed() == (
        AllowedKey(CLIENT, KEY, "laptop"), AllowedKey(DRAFTER, KEY, "laptop"), AllowedKey(DRAFTER, other, "mini-2"),
    )  # fmt: skip
    with pytest.raises(KeyFault, match="has the name laptop; choose another name"):
        ring.allow(AllowedKey(CLIENT, other, "laptop"))
    assert [one.role for one in ring.revoke("laptop")] == [CLIENT, DRAFTER]
    assert ring.revoke(other) == [AllowedKey(DRAFTER, other, "mini-2")] and ring.allowed() == ()
    with pytest.raises(KeyFault, match="no key is called 'laptop' in the role client"):
        ring.revoke("laptop")


@pytest.mark.parametrize("place", ["", " ", "my studio", "a\nb"])
def test_place_with_spaces_is_refused_and_the_list_stays_readable(ring: Keyring, place: str) -> None:
    with pytest.raises(KeyFault, match="is not a valid name; expected one word"):
        ring.allow(AllowedKey(SERVER, KEY, place))
    assert ring.servers() == {}


def test_changes_by_several_processes_at_once_are_all_kept(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process reads the list, changes it and writes it back."""
    write = Keyring._write

    def slowly(self: Keyring, *arguments: Any) -> None:
        time.sleep(0.02)
        write(self, *arguments)

    monkeypatch.setattr(Keyring, "_write", slowly)
    entries = [AllowedKey(CLIENT, make_pair().public, f"n{number}") for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda entry: Keyring(ring.folder).allow(entry), entries))
    assert {entry.name for entry in ring.allowed()} == {entry.name for entry in entries}


def test_trusted_key_for_host_and_port_precedes_that_for_the_host(ring: Keyring) -> None:
    other = make_pair().public
    ring.allow(AllowedKey(SERVER, KEY, "studio.local"))
    assert find_client_keys(FAR, folder=ring.folder) == ClientKeys(ring.own(), KEY)
    ring.allow(AllowedKey(SERVER, other, "studio.local:5556"))
    assert find_client_keys(FAR, folder=ring.folder) == ClientKeys(ring.own(), other)
    assert find_client_keys(FAR, KEY, ring.folder) == ClientKeys(ring.own(), KEY)
    ring.revoke("studio.local:5556", (SERVER,))
    assert find_client_keys(FAR, folder=ring.folder) == ClientKeys(ring.own(), KEY)
    ring.revoke("studio.local", (SERVER,))
    with pytest.raises(KeyFault, match=r"is on another machine.* `outrider keys trust studio.local KEY --keys "):
        find_client_keys(FAR, folder=ring.folder)
    with pytest.raises(KeyFault, match="in the role server"):
        ring.revoke("studio.local", (SERVER,))


def test_local_endpoint_needs_no_keys_unless_one_is_trusted(ring: Keyring, tmp_path: Path) -> None:
    for endpoint in ("ipc:///tmp/x", "tcp://127.0.0.1:5", "tcp://localhost:5"):
        assert find_client_keys(endpoint, folder=tmp_path / "none") is None
        assert find_client_keys(endpoint, folder=ring.folder) is None
        assert find_client_keys(endpoint, KEY, ring.folder) == ClientKeys(ring.own(), KEY)
    ring.allow(AllowedKey(SERVER, KEY, "127.0.0.1:5"))
    assert find_client_keys("tcp://127.0.0.1:5", folder=ring.folder) == ClientKeys(ring.own(), KEY)
    assert find_client_keys("tcp://127.0.0.1:6", folder=ring.folder) is None
    with pytest.raises(EndpointError):
        find_client_keys("nowhere", folder=ring.folder)
    with pytest.raises(KeyFault, match="is not a key"):
        find_client_keys(FAR, "x", ring.folder)


def test_default_key_folder_follows_xdg_config_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "outrider" / "keys"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert default_folder() == Path.home() / ".config" / "outrider" / "keys"


def test_user_without_a_home_folder_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert [find_client_keys(endpoint) for endpoint in ("ipc:///tmp/x", "tcp://127.0.0.1:5")] == [None, None]
    with pytest.raises(KeyFault, match="no key of its server is trusted"):
        find_client_keys(FAR)
    with pytest.raises(KeyFault, match="expected a folder of your own"):
        Keyring().make()


def test_unwritable_key_folder_is_a_key_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFault, match="can't be used"):
        Keyring(tmp_path / "file" / "keys").make()
