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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.protocol.digest import replace_file
from outrider.protocol.errors import InvalidRequest

_IDENTITY = "run.json"
_LOCK = "lock"
_RESULT = "pair"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write, which becomes `path` when the block succeeds. Only one process may write it."""
    temporary = path.with_name(path.name + ".new")
    yield temporary
    os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks `path` until the end of the block, and yields whether that succeeded; with `wait` it always does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def check_free_space(folder: Path, needed: int, what: str, advice: str) -> None:
    """Raises InvalidRequest if the disk of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InvalidRequest(
            f"{what} need {needed / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free; {advice}"
        )


def open_store(folder: Path, identity: Mapping[str, Any]) -> None:
    """Creates a store with this identity in `folder`, or checks that the folder has it. Several processes may do so.

    Raises:
        InvalidRequest: the folder has something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content, path = json.dumps(identity, indent=1), folder / "store.json"
    if not path.exists():
        others = [entry for entry in folder.iterdir() if not entry.name.startswith((".", path.name))]
        if others and not path.exists():  # otherwise another process has just created it
            raise InvalidRequest(f"{folder} has other files; expected an empty folder or a store")
        replace_file(path, content)
    if path.read_text() != content:
        raise InvalidRequest(f"{folder} has text of another target or with other settings; choose another --store")


@dataclass(frozen=True, slots=True)
class Workspace:
    """An unfinished run: `partial` has its files, and its result until `publish` moves that to `out`."""

    out: Path
    partial: Path

    @property
    def result(self) -> Path:
        """The folder for the files that are to appear in `out`."""
        return self.partial / _RESULT

    def clear_result(self) -> None:
        """Removes the files of an interrupted export."""
        shutil.rmtree(self.result, ignore_errors=True)

    def publish(self) -> None:
        """Moves the result to `out`, and removes all other files."""
        os.rename(self.result, self.out)
        shutil.rmtree(self.partial)


def partial_folder(out: Path) -> Path:
    """Returns the folder of the unfinished run for `out`."""
    return out.with_name(out.name + ".partial")


def check_out(out: Path) -> None:
    """Raises InvalidRequest if `out` can't be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists already; expected a new path or an empty folder: choose another --out")


@contextmanager
def workspace(out: Path, identity: dict[str, object]) -> Iterator[Workspace]:
    """Starts or continues the run for `out`, under a lock. A run continues if its `identity` is the same."""
    check_out(out)
    partial = partial_folder(out)
    with ExitStack() as stack:
        try:
            locked = stack.enter_context(file_lock(partial / _LOCK))
        except OSError as error:
            raise InvalidRequest(f"can't write to {partial} ({error.strerror}); choose another --out") from error
        if not locked:
            raise InvalidRequest(f"another run uses {partial}; wait for its end or choose another --out")
        _check_identity(partial, json.dumps(identity, indent=1, sort_keys=True))
        yield Workspace(out, partial)


def _check_identity(partial: Path, identity: str) -> None:
    path = partial / _IDENTITY
    if not path.exists():
        # The folder is removed at the end, so it must not contain other files.
        if any(entry.name != _LOCK and _IDENTITY not in entry.name for entry in partial.iterdir()):
            raise InvalidRequest(f"{partial} has other files; move them or choose another --out")
        replace_file(path, identity)
    elif path.read_text() != identity:
        raise InvalidRequest(
            f"{partial} has an unfinished run with other settings or other text; remove it or choose another --out"
        )
