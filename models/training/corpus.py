"""Selects the Python files of the training text, their order, and the held-out files.

A file's position depends only on the seed and its name, so that the same Python always gives the same split.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

MIN_CHARACTERS = 200
MAX_CHARACTERS = 400_000
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Source:
    """One file; `name` is its path relative to its source folder, with forward slashes."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training files in training order, and the standard library's held-out files."""

    train: tuple[Source, ...]
    held_out: tuple[Source, ...]

    @property
    def characters(self) -> int:
        """The number of characters of the training text."""
        return sum(len(source.text) for source in self.train)

    def digest(self) -> str:
        """Returns a hash of all names and contents of both parts, in order."""
        digest = hashlib.sha256()
        for source in (*self.train, *self.held_out):
            digest.update(f"{source.name}\0{source.text}\0".encode())
        return digest.hexdigest()


def standard_library() -> Path:
    """Returns the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def gather(
    library: Path, extra: Sequence[Path] = (), *, seed: int, held_out: int, max_characters: int | None = None
) -> Corpus:
    """Reads `library` and every folder of `extra`; holds out `held_out` files of the library.

    Of equal files only one is used, so that no copy of a held-out file is trained on. `max_characters` limits the
    training text.

    Raises:
        InvalidRequest: a folder is missing or has no Python files, or the library has too few.
    """
    ranked = sorted(python_files(library), key=lambda source: _rank(seed, source.name))
    if len(ranked) <= held_out:
        raise InvalidRequest(
            f"{library} has {len(ranked)} usable Python files; expected more than {held_out}, which are held out: "
            "use a Python with the sources of its standard library"
        )
    unseen, train = ranked[:held_out], ranked[held_out:]
    for folder in extra:
        added = list(python_files(folder))
        if not added:
            raise InvalidRequest(f"{folder} has no .py file of {MIN_CHARACTERS} to {MAX_CHARACTERS} characters")
        train += added
    train.sort(key=lambda source: _rank(seed, source.name))
    return Corpus(tuple(_distinct(train, unseen, max_characters)), tuple(unseen))


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def python_files(folder: Path) -> Iterator[Source]:
    """Yields usable files under `folder`, by name. Files that are not UTF-8 (a few tests of encodings) are skipped."""
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder; expected a folder with .py files")
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not _SKIPPED_FOLDERS.isdisjoint(name.parts) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            yield Source(name.as_posix(), text)


def _distinct(sources: Sequence[Source], excluded: Sequence[Source], limit: int | None) -> Iterator[Source]:
    seen = {source.text for source in excluded}
    characters = 0
    for source in sources:
        if source.text in seen:
            continue
        if limit is not None and characters >= limit:
            return
        seen.add(source.text)
        characters += len(source.text)
        yield source
