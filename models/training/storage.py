"""Files that are either whole or absent, and the folder an unfinished run works in.

`out` appears in one rename when everything is done. Until then all lies in `out.partial`, which also lets the same
command go on where it was stopped. Raises InvalidRequest when either can't be used.
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

from outrider.protocol.errors import InvalidRequest

_IDENTITY = "run.json"
_LOCK = "lock"
_PAIR = "pair"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; it becomes `path` when the block ends well."""
    temporary = path.with_name(path.name + ".new")
    yield temporary
    os.replace(temporary, path)


def open_store(folder: Path, form: Mapping[str, Any]) -> None:
    """Make `folder` a store of this form, or find that it is one.

    Raises:
        InvalidRequest: it holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said, path = json.dumps(form, indent=1), folder / "store.json"
    if not path.exists():
        if any(folder.iterdir()):
            raise InvalidRequest(f"{folder} holds files of another origin; expected an empty folder or a store")
        with replacing(path) as temporary:
            temporary.write_text(said)
    elif path.read_text() != said:
        raise InvalidRequest(f"{folder} holds text of another target, or made otherwise; choose another --store")


@dataclass(frozen=True, slots=True)
class Workspace:
    """An unfinished run: `partial` holds its files, and its pair until `publish` moves it to `out`."""

    out: Path
    partial: Path

    @property
    def pair(self) -> Path:
        """Where the finished pair's files go."""
        return self.partial / _PAIR

    def clear_pair(self) -> None:
        """Drop what a stopped export left behind."""
        shutil.rmtree(self.pair, ignore_errors=True)

    def publish(self) -> None:
        """Make the pair appear at `out` and clear the rest away."""
        os.rename(self.pair, self.out)
        shutil.rmtree(self.partial)


def check_out(out: Path) -> None:
    """Raise InvalidRequest unless a pair can be put at `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(
            f"{out} exists already; expected a path that doesn't, or an empty folder: choose another --out"
        )


@contextmanager
def workspace(out: Path, identity: dict[str, object]) -> Iterator[Workspace]:
    """Open or go on with the run for `out`, alone. `identity` says what makes two runs the same."""
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
            raise InvalidRequest(f"another run is at work in {partial}; wait for it or choose another --out") from error
        _claim(partial, json.dumps(identity, indent=1, sort_keys=True))
        yield Workspace(out, partial)


def _claim(partial: Path, identity: str) -> None:
    path = partial / _IDENTITY
    if not path.exists():
        # The folder is removed at the end, so it must never be someone else's.
        if any(entry.name != _LOCK and not entry.name.startswith(_IDENTITY) for entry in partial.iterdir()):
            raise InvalidRequest(f"{partial} holds files of another origin; move them or choose another --out")
        with replacing(path) as temporary:
            temporary.write_text(identity)
    elif path.read_text() != identity:
        raise InvalidRequest(
            f"{partial} holds an unfinished run with other settings or other text; remove it or choose another --out"
        )
