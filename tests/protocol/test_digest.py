"""Different models have different digests; unused folders of the cache are removed, and folders in use are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.protocol import digest
from outrider.protocol.digest import cache_folder, digests_match, make_cached, model_digest
from outrider.protocol.errors import ModelError


def test_other_weights_have_another_digest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    found = {model_digest(tiny_model("llama", seed)) for seed in (0, 1)} | {
        model_digest(tiny_model("llama", rope_theta=5000.0))
    }
    assert len(found) == 3
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        model_digest(tmp_path)
    with pytest.raises(ModelError, match=r"has no readable config\.json"):
        model_digest(tmp_path / "nowhere")


def test_cache_by_a_relative_path_in_a_deleted_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "cache")
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ModelError, match=r"OUTRIDER_CACHE is cache, which is not a folder: .*No such file"):
        cache_folder()


def test_digest_without_weights_matches_by_configuration() -> None:
    assert digests_match("ab-cd", "ab-cd") and digests_match("ab-", "ab-cd") and digests_match("ab-cd", "ab-")
    assert not digests_match("ab-cd", "ab-ce") and not digests_match("ab-", "ac-cd") and not digests_match("ab-cd", "")


KILLED_WHILE_MAKING = """
import os, signal, sys
from pathlib import Path
from outrider.protocol.digest import make_cached
def make(folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
make_cached(Path(sys.argv[1]) / "killed.1", make, "whole")
"""
USER = """
import sys
from pathlib import Path
from outrider.protocol.digest import use_cached
print(use_cached(Path(sys.argv[1]), "whole"), flush=True)
sys.stdin.read()
"""


def make_whole(folder: Path) -> None:
    (folder / "whole").write_text("x")


def content(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir() if entry.suffix != ".lock"}


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, run_until_killed: Callable[[str, str], None]
) -> None:
    run_until_killed(KILLED_WHILE_MAKING, str(tmp_path))
    assert content(tmp_path) == {".killed.unfinished"}
    make_cached(tmp_path / "other.1", make_whole, "whole")
    assert content(tmp_path) == {"other.1"}


def test_cached_folder_stays_while_a_process_uses_it_and_for_a_time(tmp_path: Path) -> None:
    for name in ("unused.1", "used.1", "lately.1"):
        make_cached(tmp_path / name, make_whole, "whole")
    digest._in_use.clear()  # as if their processes had ended
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", USER, str(tmp_path / "used.1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as user:
        assert user.stdout is not None and user.stdout.readline() == "True\n"
        for name in ("unused.1", "used.1"):
            os.utime(tmp_path / name, (0, 0))  # as if they had been used long ago
        make_cached(tmp_path / "new.1", make_whole, "whole")
        assert content(tmp_path) == {"used.1", "lately.1", "new.1"}
        user.communicate("")
    make_cached(tmp_path / "new.2", make_whole, "whole")
    assert content(tmp_path) == {"lately.1", "new.2"}
    make_cached(tmp_path / "new.3", lambda folder: (folder / "another").touch(), "another")
    assert "lately.1" in content(tmp_path)


def test_damaged_cached_folder_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "damaged.1").mkdir()
    (tmp_path / "damaged.1" / "whole").touch()  # empty, as after a power failure
    make_cached(tmp_path / "damaged.1", make_whole, "whole")
    assert (tmp_path / "damaged.1" / "whole").read_text() == "x"


def test_cached_files_are_on_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = tmp_path / "new.1", set[int]()

    def make(unfinished: Path) -> None:
        make_whole(unfinished)
        (unfinished / "part").mkdir()
        make_whole(unfinished / "part")

    def sync(number: int) -> None:
        assert not folder.exists()
        synced.add(os.fstat(number).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    make_cached(folder, make, "whole")
    assert synced == {path.stat().st_ino for path in (folder / "whole", folder / "part" / "whole")}
