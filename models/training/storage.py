"""Writes files that are either complete or absent, and manages the folder of an unfinished run.

`out` appears in one rename when everything is done. Until then all files are in `out.partial`, from which the same
command continues after an interruption. Raises InvalidRequest if either can't be used.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.protocol.digest import replace_file
from outrider.protocol.errors import InvalidRequest

_IDENTITY = "run.json"
_LOCK = "lock"
_PAIR = "pair"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write, which becomes `path` when the block succeeds. Only one process may write it."""
    temporary = path.with_name(path.name + ".new")
    yield temporary
    os.replace(temporary, path)


def open_store(folder: Path, form: Mapping[str, Any]) -> None:
    """Creates a store with this identity in `folder`, or checks that the folder has it. Several processes may do so.

    Raises:
        InvalidRequest: the folder has something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identity, path = json.dumps(form, indent=1), folder / "store.json"
    if not path.exists():
        others = [entry for entry in folder.iterdir() if not entry.name.startswith((".", path.name))]
        if others and not path.exists():  # otherwise another process has just created it
            raise InvalidRequest(f"{folder} holds files of another origin; expected an empty folder or a store")
        replace_file(path, identity)
    if path.read_text() != identity:
        raise InvalidRequest(f"{folder} has text of another target or with other settings; choose another --store")


@dataclass(frozen=True, slots=True)
class Workspace:
    """An unfinished run: `partial` has its files, and its pair until `publish` moves it to `out`."""

    out: Path
    partial: Path

    @property
    def pair(self) -> Path:
        """The folder for the finished pair's files."""
        return self.partial / _PAIR

    def clear_pair(self) -> None:
        """Removes the files of an interrupted export."""
        shutil.rmtree(self.pair, ignore_errors=True)

    def publish(self) -> None:
        """Moves the pair to `out`, and removes all other files."""
        os.rename(self.pair, self.out)
        shutil.rmtree(self.partial)


def check_out(out: Path) -> None:
    """Raises InvalidRequest if `out` can't be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists already; expected a new path or an empty folder: choose another --out")


@contextmanager
def workspace(out: Path, identity: dict[str, object]) -> Iterator[Workspace]:
    """Begins or continues the run for `out`, under a lock. A run continues if its `identity` is the same."""
    check_out(out)
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / _LOCK).open("w")
    except OSError as error:
        raise InvalidRequest(f"can't write to {partial} ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidRequest(f"another run uses {partial}; wait for its end or choose another --out") from error
        _claim(partial, json.dumps(identity, indent=1, sort_keys=True))
        yield Workspace(out, partial)


def _claim(partial: Path, identity: str) -> None:
    path = partial / _IDENTITY
    if not path.exists():
        # The folder is removed at the end, so it must not contain other files.
        if any(entry.name != _LOCK and not entry.name.startswith(_IDENTITY) for entry in partial.iterdir()):
            raise InvalidRequest(f"{partial} holds files of another origin; move them or choose another --out")
        with replacing(path) as temporary:
            temporary.write_text(identity)
    elif path.read_text() != identity:
        raise InvalidRequest(
            f"{partial} has an unfinished run with other settings or other text; remove it or choose another --out"
        )
