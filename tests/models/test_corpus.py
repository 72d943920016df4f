"""The training text: its limits and order, and held-out files that occur nowhere else in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.training.corpus import gather
from outrider.protocol.errors import InvalidRequest


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    for index in range(20):
        write(folder, f"test/module{index}.py", f"value = {index}\n" * 40)
    return folder


def test_split_is_deterministic_and_depends_on_the_seed(library: Path) -> None:
    once, again = gather(library, seed=1, held_out=5), gather(library, seed=1, held_out=5)
    assert once == again
    assert once.digest() == again.digest()
    other = gather(library, seed=2, held_out=5)
    assert {source.name for source in other.held_out} != {source.name for source in once.held_out}


def test_the_split_does_not_depend_on_where_the_library_lies(library: Path, tmp_path: Path) -> None:
    before = gather(library, seed=1, held_out=5)
    moved = library.rename(tmp_path / "elsewhere")
    assert gather(moved, seed=1, held_out=5) == before


def test_held_out_and_training_files_partition_the_library(library: Path) -> None:
    corpus = gather(library, seed=1, held_out=5)
    held_out, train = ({source.name for source in part} for part in (corpus.held_out, corpus.train))
    assert len(held_out) == 5
    assert len(train) == 15
    assert held_out.isdisjoint(train)


def test_a_copy_of_a_held_out_file_is_not_trained_on(library: Path, tmp_path: Path) -> None:
    held_out = gather(library, seed=1, held_out=1).held_out[0]
    write(tmp_path / "extra", "copy.py", held_out.text)
    write(tmp_path / "extra", "new.py", "other = 1\n" * 40)
    train = gather(library, [tmp_path / "extra"], seed=1, held_out=1).train
    assert held_out.text not in {source.text for source in train}
    assert "new.py" in {source.name for source in train}


def test_only_library_files_are_held_out(library: Path, tmp_path: Path) -> None:
    for index in range(50):
        write(tmp_path / "extra", f"extra{index}.py", f"extra = {index}\n" * 40)
    corpus = gather(library, [tmp_path / "extra"], seed=1, held_out=5)
    assert corpus.held_out == gather(library, seed=1, held_out=5).held_out


def test_short_long_foreign_and_installed_files_are_skipped(library: Path) -> None:
    before = gather(library, seed=1, held_out=5)
    write(library, "short.py", "x" * 199)
    write(library, "long.py", "x" * 400_001)
    write(library, "site-packages/installed.py", "x" * 300)
    write(library, "note.txt", "x" * 300)
    (library / "latin.py").write_bytes(b"# \xe9\n" * 100)
    assert gather(library, seed=1, held_out=5) == before
    write(library, "shortest.py", "x" * 200)
    write(library, "longest.py", "x" * 400_000)
    assert len(gather(library, seed=1, held_out=5).train) == len(before.train) + 2


def test_max_characters_ends_the_text_early_and_keeps_its_beginning(library: Path) -> None:
    whole, cut = (gather(library, seed=1, held_out=5, max_characters=limit) for limit in (None, 1000))
    assert cut.train == whole.train[: len(cut.train)]
    assert 1000 <= cut.characters < 2000


def test_folder_missing_or_without_python_files_is_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere is not a folder"):
        gather(library, [tmp_path / "nowhere"], seed=1, held_out=5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"empty has no .py file"):
        gather(library, [tmp_path / "empty"], seed=1, held_out=5)
    with pytest.raises(InvalidRequest, match="20 usable Python files"):
        gather(library, seed=1, held_out=20)
