"""A cluster's sockets are in a directory that only its user may enter and that is removed when the cluster ends."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from outrider.protocol import socket_files
from outrider.protocol.endpoints import parse_endpoint
from outrider.protocol.errors import EndpointError
from outrider.protocol.socket_files import MAX_PATH_BYTES, PrivateDirectory

KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from outrider.protocol.keys import AllowedKey, Keyring
from outrider.protocol.socket_files import PrivateDirectory
private = PrivateDirectory()
open(private.path / "s.lock", "w")
ring = Keyring(private.path / "keys")
own = ring.make().public
ring.allow(AllowedKey("client", own, "x"))
ring.allow(AllowedKey("server", own, "host"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(short, monkeypatch):
    """Makes an empty folder the system's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


def test_socket_directory_is_private_and_removed_on_close(temporary):
    with PrivateDirectory() as private:
        assert stat.S_IMODE(private.path.stat().st_mode) == 0o700
        assert private.path.parent == temporary
        (private.path / "log").write_text("x")
        assert parse_endpoint(private.endpoint("workers")).path == str(private.path / "workers")
    private.close()
    assert not list(temporary.iterdir())


def test_socket_directory_is_in_tmp_when_the_temporary_path_is_too_long(tmp_path, monkeypatch):
    long = tmp_path / ("x" * MAX_PATH_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with PrivateDirectory() as private:
        assert private.path.parent == Path("/tmp")
        assert parse_endpoint(private.endpoint("x" * socket_files.MAX_NAME_CHARACTERS))


@pytest.mark.parametrize("name", ["line\nbreak", "no-break\xa0space"])
def test_socket_directory_is_in_tmp_when_the_temporary_path_can_not_be_an_endpoint(temporary, monkeypatch, name):
    odd = temporary / name
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with PrivateDirectory() as private:
        assert private.path.parent == Path("/tmp")
        assert parse_endpoint(private.endpoint("clients"))


def test_directory_of_a_killed_process_is_removed_and_a_live_one_is_kept(temporary, run_until_killed):
    run_until_killed(KILLED, str(temporary))
    (left,) = temporary.iterdir()
    (left / "target-0.log").write_text("what a worker wrote there")
    with PrivateDirectory() as first, PrivateDirectory() as second:
        assert set(temporary.iterdir()) == {first.path, second.path}
    assert not list(temporary.iterdir())


def test_directories_of_users_are_never_removed(temporary):
    mine = temporary / "outrider-run-notes"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    with PrivateDirectory():
        assert (mine / "thesis.tex").exists()


def test_full_disk_error_names_the_place_and_the_remedy(temporary, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(
        EndpointError,
        match=r"create a directory for sockets in .*: No space left on device; free"
        r" some space, .* TMPDIR",
    ):
        PrivateDirectory()
