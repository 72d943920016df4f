"""A partial pair never appears, an interrupted run continues, and other files are not touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.training.storage import open_store, replacing, workspace
from outrider.protocol.errors import InvalidRequest

IDENTITY: dict[str, object] = {"seed": 1}


def test_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("hal")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_published_pair_appears_and_nothing_else_stays(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "pair"
    with workspace(out, IDENTITY) as space:
        (space.result / "target").mkdir(parents=True)
        assert not out.exists()
        space.publish()
    assert [entry.name for entry in out.iterdir()] == ["target"]
    assert [entry.name for entry in out.parent.iterdir()] == ["pair"]


def test_a_stopped_run_finds_its_files_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), workspace(tmp_path / "pair", IDENTITY) as space:
        (space.partial / "target.pt").write_text("weights")
        raise KeyboardInterrupt
    with workspace(tmp_path / "pair", IDENTITY) as space:
        assert (space.partial / "target.pt").read_text() == "weights"


def test_an_unfinished_run_with_other_settings_is_left_alone(tmp_path: Path) -> None:
    with workspace(tmp_path / "pair", IDENTITY) as space:
        kept = space.partial
    with pytest.raises(InvalidRequest, match="other settings"), workspace(tmp_path / "pair", {"seed": 2}):
        pass
    assert (kept / "run.json").exists()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    with (
        workspace(tmp_path / "pair", IDENTITY),
        pytest.raises(InvalidRequest, match="another run"),
        workspace(tmp_path / "pair", IDENTITY),
    ):
        pass


def test_existing_output_folder_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "mine").write_text("mine")
    for out in (tmp_path / "pair", tmp_path / "pair" / "mine"):
        with pytest.raises(InvalidRequest, match="exists already"), workspace(out, IDENTITY):
            pass


def test_a_folder_that_is_only_named_partial_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "pair.partial").mkdir()
    (tmp_path / "pair.partial" / "mine").write_text("mine")
    with pytest.raises(InvalidRequest, match="other files"), workspace(tmp_path / "pair", IDENTITY):
        pass
    assert (tmp_path / "pair.partial" / "mine").read_text() == "mine"


def test_unwritable_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="can't write"), workspace(tmp_path / "file" / "pair", IDENTITY):
        pass


def test_processes_that_begin_together_create_one_store(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            list(pool.map(open_store, [tmp_path / str(number)] * 8, [IDENTITY] * 8))
            assert [entry.name for entry in (tmp_path / str(number)).iterdir()] == ["store.json"]


def test_a_store_is_refused_in_a_folder_with_other_files_or_another_store(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    with pytest.raises(InvalidRequest, match="other files"):
        open_store(tmp_path / "other", IDENTITY)
    open_store(tmp_path / "store", IDENTITY)
    with pytest.raises(InvalidRequest, match="another target or with other settings"):
        open_store(tmp_path / "store", {"seed": 2})
